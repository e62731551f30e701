"""Train with the DeepSpeed engine of the example: its contract, and the same results as with realign's own engine."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.deepspeed_engine import DeepSpeedModel
from realign.demo.arithmetic import prepare
from realign.engines import OptimizerSpec
from realign.models import Value
from realign.testing import check_engine, random_batch
from tests.engines.distributed import scenarios
from tests.engines.distributed.comparisons import OWN
from tests.engines.distributed.run_ranks import run_ranks
from tests.torchrun_ranks import torchrun

trains = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra deepspeed is not installed")
"""Tests that train. DeepSpeed compiles a module of its own when it first runs on a CPU."""

ALGORITHMS = ("sft", "grpo", "ppo", "dpo", "gkd", "kto", "early_stop", "uneven")
KINDS = ("value head", "value branch", "lora", "trained layers", "checkpointing", "tied")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    scenarios.write_models(folder)
    return folder


def contract(folder: Path, out: Path, name: str, settings: dict[str, Any]) -> None:
    """Check the engine on this rank, with an optimizer whose step is a smooth function of the gradient."""
    optimizer = OptimizerSpec(lr=1e-2, eps=0.1, weight_decay=0.1)

    def load(path: Path = folder / name) -> Any:
        return DeepSpeedModel(str(path), device="cpu", optimizer=optimizer, **settings).load("actor", seed=0).engine

    check_engine(load, random_batch(vocabulary=90).select(["input_ids"]), load=load, folder=out)


@trains
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "name", "settings"),
    [
        (1, "llama", {}),
        (2, "llama", {"stage": 1}),
        (2, "gpt2", {"stage": 2}),
        (2, "critic", {"head": Value()}),
        (3, "llama", {"stage": 2}),
    ],
)
def test_the_engine_fulfills_its_contract(
    folder: Path, tmp_path: Path, size: int, name: str, settings: dict[str, Any]
) -> None:
    run_ranks(size, contract, folder, tmp_path, name, settings)


def results(folder: Path, own: Path, others: dict[str, Path]) -> dict[str, Any]:
    """Train, and write a checkpoint into `own`; resume from it and from the checkpoints of `others`."""
    algorithms = {name: getattr(scenarios, name)(folder) for name in ALGORITHMS}
    settings = {}
    for kind in KINDS:
        kwargs, loss = scenarios.KINDS[kind]
        settings[kind] = scenarios.steps(scenarios.load(folder, **kwargs), loss)
    return {**algorithms, **settings, "kept": scenarios.kept(folder, own, others)}


def of_deepspeed(*arguments: Any) -> dict[str, Any]:
    """Return the results with DeepSpeed, and those of steps that are not finite on one rank."""
    scenarios.TransformersModel = DeepSpeedModel  # type: ignore[misc]
    return {**results(*arguments), "faults of one rank": scenarios.faults_of_one_rank(arguments[0])}


def comparable(tree: Any) -> Any:
    """Return a tree of results without what depends on the number of ranks."""
    if isinstance(tree, dict):
        return {key: comparable(value) for key, value in tree.items() if key not in {"n", *OWN}}
    return [comparable(value) for value in tree] if isinstance(tree, list) else tree


@trains
@pytest.mark.slow
def test_two_ranks_compute_what_realigns_own_engine_computes_and_resume_from_its_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    expected = comparable(results(folder, tmp_path / "alone", {}))
    end = expected.pop("kept")["end"]
    for rank in run_ranks(2, of_deepspeed, folder, tmp_path / "own", {"alone": tmp_path / "alone"}, seconds=300):
        faults, kept = rank.pop("faults of one rank"), rank.pop("kept")
        assert kept.pop("problems") == []
        starts = dict.fromkeys(("end", "own", "alone"), end)
        close(comparable(kept), starts)
        close(comparable(rank), expected)
        assert [step["nonfinite_steps"] for step in faults["metrics"]] == [1, 1]
        assert faults["same"]
    # And the other way round: realign's own engine resumes from what DeepSpeed wrote.
    close(comparable(scenarios.going_on(scenarios.restored(folder, tmp_path / "own"))), end)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)


@trains
@pytest.mark.slow
def test_a_run_chooses_it_by_target(tmp_path: Path) -> None:
    task = prepare(tmp_path / "task", seed=0, demonstrations=128, held_out=16)
    data = [f"models.actor.path={task.model}", f"data.path={task.demonstrations}"]
    words = ["experiment=sft_arithmetic", "steps=3", "evaluation=null", *data]
    target = f"models.actor._target_={DeepSpeedModel.__module__}.DeepSpeedModel"
    nll = {}
    for name, chosen in {"own": [], "deepspeed": [target]}.items():
        done, left = torchrun(tmp_path, *words, f"output_dir={tmp_path / name}", *chosen)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not left
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        nll[name] = [json.loads(line).get("nll", 0) for line in lines]
    assert nll["deepspeed"] == pytest.approx(nll["own"], rel=1e-5)
