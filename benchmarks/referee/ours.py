"""realign's side: from overrides, as on the command line, to the loss and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.referee.batches import packed, padded
from realign.api import MicroBatchSpec, Model, ModelInterface, SequenceSample, Stats
from realign.config import build_experiment, compose
from realign.interfaces.kto import KTOReferenceInterface, mismatch_responses

TO_COMPOSE = {
    "grpo": ("interfaces.reward.function=reward.py:score",),
    "ppo": ("models.reward.path=REWARD_MODEL",),
    "openrlhf_ppo": ("models.reward.path=REWARD_MODEL",),
}
"""What an experiment needs besides a model and data."""


class Output:
    """`ModelOutput` whose log-probs and values are leaves, one per token id."""

    def __init__(self, leaf: Tensor, data: SequenceSample) -> None:
        flat = torch.cat([torch.zeros(1), leaf.view(-1)])
        self.x_T = flat[data["input_ids"]]

    def logprobs(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> Tensor:
        """Return [T]."""
        return self.x_T

    def logprobs_and_entropy(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return [T] log-probs, and an entropy that nothing reads."""
        return self.x_T, torch.zeros_like(self.x_T)

    def values(self) -> Tensor:
        """Return [T]."""
        return self.x_T


class Engine:
    """The part of an engine that train steps call. It keeps the loss and its gradient instead of training."""

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf.clone().requires_grad_()
        self.loss = torch.zeros(())

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum over one process."""
        return x

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: Callable[..., Any]) -> SequenceSample:
        """Score without gradient."""
        with torch.no_grad():
            return post_hook(Output(self.leaf, data), data)

    def train_batch(
        self, data: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: Any, loss_weight_fn: Any, step_if: Any = None
    ) -> Stats:
        """Compute the loss and its gradient."""
        total, stats = loss_fn(Output(self.leaf, data), data)
        self.loss = total / loss_weight_fn(data)
        self.loss.backward()
        return dict(stats)


@cache
def interfaces(overrides: tuple[str, ...]) -> dict[str, ModelInterface]:
    """Compose a config and build its interfaces."""
    experiment = overrides[0].removeprefix("experiment=")
    needed = ("models.actor.path=MODEL", "data.path=prompts.jsonl", *TO_COMPOSE.get(experiment, ()))
    given = {word.partition("=")[0] for word in overrides}
    words = [*overrides, *(word for word in needed if word.partition("=")[0] not in given)]
    return dict(build_experiment(compose(words)).interfaces)


def run(kind: str, batch: dict[str, Tensor], overrides: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the loss, and its gradient [S, R]; for kind=advantages 0 and the advantages [S, R]."""
    built = interfaces(tuple(overrides))
    interface: Any = built["critic" if kind == "value" else "actor"]
    engine = Engine(batch["new_values" if kind == "value" else "new"])
    model, data = Model("actor", engine), packed(batch)  # type: ignore[arg-type]
    if "critic" not in built:
        data = data.select(data.keys - {"values", "returns"})
    if kind == "advantages":
        scored = interface.score(model, data)
        advantages_T = interface.estimate_advantages(model, scored)["advantages"]
        return torch.zeros(()), padded(advantages_T, data["input_ids"], batch["mask"])
    if kind == "kto":
        reference = Engine(batch["ref"])
        scored = KTOReferenceInterface().inference(Model("ref", reference), data, MicroBatchSpec())  # type: ignore[arg-type]
        data = data.merge(scored.select(["mismatched_ref_logprobs"]))
    interface.train_step(model, data, MicroBatchSpec())
    assert engine.leaf.grad is not None
    return engine.loss.detach(), engine.leaf.grad


def with_mismatched(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the log-prob [S] of the response that KTO pairs with each prompt, under the policy and the reference."""
    data = packed(batch)
    other = mismatch_responses(data.select(["input_ids", "prompt_mask", "loss_mask"]))
    sums = {}
    for key in ("new", "ref"):
        flat = torch.cat([torch.zeros(1), batch[key].view(-1)])
        parts = zip(other.sequences(), other.sequences("loss_mask"), strict=True)
        sums[f"kl_{key}"] = torch.stack([flat[ids][mask].sum() for ids, mask in parts])
    return batch | sums
