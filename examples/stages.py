"""What the examples share: imitation as the first stage, and the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from realign.data import SupervisedData, Template
from realign.engines import TransformersModel
from realign.engines.training.optimizer import OptimizerSpec
from realign.interfaces import sft
from realign.runtime import Experiment


def imitation(name: str, folder: Path, seed: int, steps: int) -> Experiment:
    """Define SFT of `task/model` on `task/demonstrations.jsonl`; `sft` contains the result."""
    return Experiment(
        name=f"{name}_sft",
        steps=steps,
        batch_prompts=64,
        seed=seed,
        graph=sft.dataflow(),
        interfaces={"actor": sft.SFTInterface()},
        models={"actor": TransformersModel(str(folder / "task" / "model"), optimizer=OptimizerSpec(lr=2e-3))},
        data=SupervisedData(str(folder / "task" / "demonstrations.jsonl"), template=Template.plain),
        output_dir=folder / "sft",
        overwrite=True,
    )


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, *, folder: Path, steps: int
) -> argparse.Namespace:
    """Return the arguments of the command line, with the settings of both stages."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=folder)
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--steps", type=int, default=steps)
    return parser.parse_args(arguments)


def flags(words: Sequence[str], *stages: str) -> list[dict[str, Any]]:
    """Return the settings of each stage and of the last one: `sft.steps=9` is `steps=9` of the stage `sft`."""
    found: dict[str, dict[str, Any]] = {stage: {} for stage in (*stages, "")}
    for word in words:
        key, _, value = word.partition("=")
        stage, _, rest = key.partition(".")
        found[stage if stage in stages else ""][rest if stage in stages else key] = yaml.safe_load(value)
    return list(found.values())
