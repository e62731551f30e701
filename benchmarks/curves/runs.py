"""Training runs of both implementations: on equal data, with separate random numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.curves import padded, task
from realign.config import build_experiment, compose
from realign.runtime.local import LocalRuntime

Record = dict[str, float]

TABLE = ("approxkl", "clipfrac", *(f"ratio_{x}" for x in ("mean", "var", "max", "min")))
TABLE += tuple(f"logprob_diff_{x}" for x in ("mean", "var", "max", "min"))
"""The ten metrics of the reproduction study, by its names."""
CURVES = {"score": "score", "kl": "KL to the reference (nats per response)", "kl_coef": "KL coefficient"}
"""Compared curves, with their titles."""
NAMES = {"realign": "realign (packed)", "padded": "independent (padded)"}
"""Implementations, with their titles."""
QUERY_TOKENS = 16


@dataclass(frozen=True)
class Run:
    """A training run. Runs with equal fields except for `implementation` differ in their random numbers only."""

    implementation: str = "realign"
    """realign or padded."""
    reward: str = "sentiment"
    seed: int = 1
    width: int = 64
    """Hidden size of the model."""
    adam: str = "tensorflow"
    """tensorflow or pytorch."""
    scaled_logprobs: bool = True
    """False: log-probs without temperature (implementation=padded)."""
    steps: int = 40
    batch: int = 32
    lr: float = 3e-4
    horizon: int = 160
    """Horizon of the KL controller in episodes. The original has 100 horizons per run; this has 8."""

    @property
    def name(self) -> str:
        """Name of the file with the records."""
        return "_".join(str(value) for value in asdict(self).values())

    def constants(self, *, pad_left: bool = True) -> padded.Constants:
        """Return the constants of the independent implementation."""
        return padded.Constants(
            updates=self.steps,
            lr=self.lr,
            horizon=self.horizon,
            tensorflow_adam=self.adam == "tensorflow",
            scaled_logprobs=self.scaled_logprobs,
            pad_left=pad_left,
        )

    def overrides(self, folder: Path) -> list[str]:
        """Return the overrides of the preset: paths, the reward function, and the size of the run."""
        if not self.scaled_logprobs:
            raise ValueError("scaled_logprobs=False: realign always divides the logits of log-probs by the temperature")
        return [
            "experiment=lm_human_preferences",
            f"models.actor.path={folder / 'model'}",
            "~models.reward",
            "interfaces.reward._target_=realign.interfaces.rule_reward.RuleRewardInterface",
            f"+interfaces.reward.function={task.__file__}:{self.reward}",
            "+interfaces.reward.workers=0",
            f"data.path={folder / 'texts.jsonl'}",
            f"data.excerpt.max_tokens={QUERY_TOKENS}",
            f"models.actor.optimizer.lr={self.lr}",
            f"models.actor.optimizer.eps_hat={str(self.adam == 'tensorflow').lower()}",
            f"interfaces.actor.kl.horizon={self.horizon}",
            f"steps={self.steps}",
            f"batch_prompts={self.batch}",
            f"seed={self.seed}",
            f"output_dir={folder / 'run'}",
        ]


def vocabulary(folder: Path) -> dict[str, int]:
    """Return the tokens of a model folder."""
    ids: dict[str, int] = json.loads((folder / "model" / "tokenizer.json").read_text(encoding="utf-8"))["model"][
        "vocab"
    ]
    return ids


def runtime_of(run: Run, folder: Path) -> LocalRuntime:
    """Load the preset."""
    return LocalRuntime(build_experiment(compose(run.overrides(folder))))


def realign_record(values: dict[str, float]) -> Record:
    """Translate the metrics of a step of realign to the names of the independent implementation."""
    names = {"score": "reward", "kl": "ref_kl_per_sequence", "kl_coef": "kl_coef"}
    names |= {name: name for name in ("policy_loss", "value_loss", "entropy", "return_mean")}
    return {name: values[source] for name, source in names.items()} | ratio_record(values)


def ratio_record(values: dict[str, float]) -> Record:
    """Return the ten metrics of the reproduction study from those of a step of realign."""
    same = [name for name in TABLE if name not in ("approxkl", "clipfrac", "logprob_diff_max")]
    record = {"clipfrac": values["clip_fraction"], **{name: values[name] for name in same}}
    # approx_kl is another estimator, and logprob_diff_max is of absolute values
    record["approxkl"] = 0.5 * (values["logprob_diff_var"] + values["logprob_diff_mean"] ** 2)
    record["logprob_diff_max"] = math.log(values["ratio_max"])
    return record


def realign_records(run: Run, folder: Path) -> Iterator[Record]:
    """Train with the preset."""
    runtime = runtime_of(run, folder)
    try:
        for step in range(1, run.steps + 1):
            yield realign_record(runtime.step(step)[0])
    finally:
        runtime.close()


def padded_records(run: Run, folder: Path) -> Iterator[Record]:
    """Train with the independent implementation."""
    known = vocabulary(folder)
    words, reward = list(known), partial(score_text, run.reward)
    texts = [json.loads(line)["prompt"] for line in (folder / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
    every = padded.queries(texts, known, QUERY_TOKENS)
    trainer = padded.PaddedPPO(folder / "model", run.constants(), seed=run.seed)
    order = torch.randperm(len(every), generator=trainer.random).tolist()
    for step in range(run.steps):
        asked = [every[order[i % len(order)]] for i in range(step * run.batch, (step + 1) * run.batch)]
        responses = trainer.sample(asked)
        scores = padded.scores(responses, lambda ids: " ".join(words[i] for i in ids), reward)
        yield trainer.update(trainer.rollout(asked, responses, scores))


def score_text(reward: str, response: str) -> float:
    """Return the reward of a response."""
    return task.REWARDS[reward]("", response, {})


def records_of(run: Run, folder: Path) -> list[Record]:
    """Return the records of a run, from its file if it exists.

    Args:
        run: the run.
        folder: folder of the study. Tasks are in `task_<width>`, records in `records`.
    """
    home, file = folder / f"task_{run.width}", folder / "records" / f"{run.name}.json"
    if not file.exists():
        if not (home / "model" / "config.json").exists():
            task.prepare(home, width=run.width)
        records = list((realign_records if run.implementation == "realign" else padded_records)(run, home))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(records), encoding="utf-8")
    kept_records: list[Record] = json.loads(file.read_text(encoding="utf-8"))
    return kept_records


def seeds_of(run: Run, folder: Path, seeds: Iterable[int]) -> list[list[Record]]:
    """Return the records of a run for several seeds."""
    return [records_of(replace(run, seed=seed), folder) for seed in seeds]


def series(runs: Sequence[Sequence[Record]], name: str) -> Any:
    """Return a metric as an array [seeds, steps]."""
    import numpy as np

    return np.array([[record[name] for record in records] for records in runs])
