"""`check_train_step`: the conformance test of interfaces that train."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace

import numpy as np
from torch import Tensor

from realign.api import (
    MicroBatchSpec,
    Model,
    ModelInterface,
    SequenceSample,
    stat_values,
)
from realign.testing.batches import random_batch, random_heads, with_own_keys
from realign.testing.bigram import BigramEngine

TOKENIZER = SimpleNamespace(eos_token_id=0)
"""What interfaces read from a tokenizer in `train_step`."""


@dataclass
class TrainStepResult:
    """The parameters and the metrics after a train_step."""

    parameters: list[Tensor]
    metrics: dict[str, float] = field(default_factory=dict)


def train_once(
    interface: ModelInterface, data: SequenceSample, mb_spec: MicroBatchSpec, *, seed: int = 0
) -> TrainStepResult:
    """Run `train_step` of a copy of the interface, which may have state, on a new bigram model."""
    engine = BigramEngine(seed=seed)
    engine.use_heads(random_heads(seed))
    stats = deepcopy(interface).train_step(Model("actor", engine, TOKENIZER, seed), data, mb_spec)
    return TrainStepResult(engine.parameters, stat_values(stats))


def check_train_step(
    interface: ModelInterface,
    inputs: Collection[str],
    *,
    data: SequenceSample | None = None,
    own: Mapping[str, str] = MappingProxyType({}),
    whole_groups: bool = False,
    seed: int = 0,
) -> None:
    """Check that micro-batching, prompt order and values outside the loss mask do not change a `train_step`.

    It works for any interface that trains on sequences, such as a policy, a reward model or a verifier of your own. One
    without `loss_mask` in its inputs trains on whole sequences, so no token is masked and no such value is changed.

    Args:
        interface: the configured algorithm.
        inputs: keys that its RPC reads, with `input_ids`. The last of the `rewards` of `random_batch` is NaN (missing),
            and that of each named reward (`rewards/<name>`).
        data: a batch with these keys; None uses `random_batch`.
        own: further keys that it reads, by their shape: "T" is one random number per token, "S" one per sequence.
        whole_groups: whether the loss compares the sequences of a prompt. If True, groups are never split.
        seed: seed of the weights and the batch.

    Raises:
        AssertionError: the weights or the metrics changed. The message names the change and the difference.
    """
    data = with_own_keys(random_batch(seed) if data is None else data, inputs, own, seed).select({*inputs, *own})
    reference = train_once(interface, data, MicroBatchSpec(), seed=seed)
    lengths = data.lengths["input_ids"]
    limit = int((lengths.per_prompt if whole_groups else lengths.flat).max())
    for spec in (MicroBatchSpec(n_microbatches=2), MicroBatchSpec(limit)):
        _assert_same(reference, train_once(interface, data, spec, seed=seed), f"split by {spec}", tolerance=1e-10)
    # With several mini-batches, another order also divides the prompts differently.
    if interface.plan().n_minibatches == 1:
        order = np.random.default_rng(seed).permutation(len(data))
        shuffled = train_once(interface, data.take(order), MicroBatchSpec(n_microbatches=2), seed=seed)
        _assert_same(reference, shuffled, "prompts in another order", tolerance=1e-10)
    for fill in (math.nan, math.inf) if "loss_mask" in data else ():
        dirty = train_once(interface, _fill_masked(data, fill), MicroBatchSpec(), seed=seed)
        # Exactly equal: masked values must not even enter a sum.
        _assert_same(reference, dirty, f"{fill} at every masked token", tolerance=0.0)


def _fill_masked(data: SequenceSample, fill: float) -> SequenceSample:
    masked_T = ~data["loss_mask"]
    token_keys = [
        k for k, x in data.data.items() if data.lengths[k] == data.lengths["input_ids"] and x.dtype.is_floating_point
    ]
    filled = {}
    for key in token_keys:
        x = data[key]
        filled[key] = x.masked_fill(masked_T.view(-1, *[1] * (x.ndim - 1)), fill)
    return data.with_tokens(**filled)


def _assert_same(a: TrainStepResult, b: TrainStepResult, what: str, *, tolerance: float) -> None:
    for x, y in zip(a.parameters, b.parameters, strict=True):
        difference = float((x - y).abs().max())
        if not difference <= tolerance:
            raise AssertionError(f"{what}: the weights after a train_step differ by {difference:.3g}")
    if a.metrics.keys() != b.metrics.keys():
        raise AssertionError(
            f"{what}: metrics {sorted(a.metrics.keys() ^ b.metrics.keys())} are missing in one of the two results"
        )
    for name, value in a.metrics.items():
        other = b.metrics[name]
        # Metrics are sums in fp32, while the weights are float64.
        if not abs(value - other) <= max(tolerance, 1e-5 if tolerance else 0.0) * max(1.0, abs(value)):
            raise AssertionError(f"{what}: metric {name} changes from {value!r} to {other!r}")


__all__ = ["TrainStepResult", "check_train_step", "train_once"]
