"""Test which prompts the error names if a loss or gradient is not finite."""

from __future__ import annotations

import warnings

import pytest
import torch

from realign.api import MicroBatchSpec, SequenceSample, stat_values
from realign.engines import OptimizerSpec
from realign.models.network.passes import ParallelPasses
from tests.tiny import random_sample, tiny_engine

STEP = OptimizerSpec(lr=1e-2, eps=1.0, grad_clip=None)
LENGTHS = ((9, 4, 6), (12,), (3, 5), (8, 2, 2, 1), (7,))


class Poisoned:
    """Sum of log-probs in which some prompts have a non-finite loss, or only a non-finite gradient."""

    def __init__(self, data: SequenceSample, ids: tuple[str, ...], *, gradient: bool = False) -> None:
        self.ids, self.gradient, self.calls = ids, gradient, 0
        self.firsts = {int(data.take([data.ids.index(i)])["input_ids"][2]) for i in ids}

    def __call__(self, output, data):
        self.calls += 1
        loss = output.logprobs(where_T=data["loss_mask"])[data["loss_mask"]].sum()
        for i in set(data.ids) & set(self.ids):
            zero = output.logprobs().sum() * 0
            # The square root of 0 has value 0 and an infinite slope.
            loss = loss + (zero.sqrt() if self.gradient else zero + float("nan")) * (1 + len(str(i)))
        return loss, {}


def told(engine, data, loss, spec):
    with pytest.warns(UserWarning, match="is not finite") as warned:
        stats = stat_values(engine.train_batch(data, spec, loss, lambda d: torch.tensor(1.0)))
    assert stats["nonfinite_steps"] == 1
    assert len(warned) == 1
    return str(warned[0].message)


SPECS = [MicroBatchSpec(), MicroBatchSpec(n_microbatches=3), MicroBatchSpec(max_tokens_per_microbatch=13)]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("parallel", list(ParallelPasses))
def test_the_guilty_prompts_are_named_and_no_others(spec, gradient, parallel):
    data = random_sample(LENGTHS)
    engine = tiny_engine(optimizer=STEP, parallel_passes=parallel)
    message = told(engine, data, Poisoned(data, ("p1", "p3"), gradient=gradient), spec)
    what = "gradient" if gradient else "loss"
    assert f"from the {what} of ids 'p1', 'p3')" in message
    assert all(p.grad is None for p in engine.network.parameters())
    assert not any(m.training for m in engine.module.modules())


def test_passes_side_by_side_name_the_same(monkeypatch):
    monkeypatch.setattr("realign.models.network.passes.MIN_ROWS", 1)
    data = random_sample(LENGTHS)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for gradient in (False, True):
            engine = tiny_engine(optimizer=STEP)
            assert engine.network.passes(data, MicroBatchSpec(), parallel=True, training=True).lanes == 2
            message = told(engine, data, Poisoned(data, ("p2",), gradient=gradient), MicroBatchSpec())
            assert message.count("'p") == 1
            assert "of id 'p2')" in message
    finally:
        torch.set_num_threads(threads)


def test_a_good_step_computes_nothing_twice():
    data = random_sample(LENGTHS)
    loss = Poisoned(data, ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_engine(optimizer=STEP).train_batch(data, SPECS[1], loss, lambda d: torch.tensor(1.0))
    assert loss.calls == 3


def test_a_sum_that_overflows_blames_nobody():
    data = random_sample([[4], [5]])

    def huge(output, part):
        return output.logprobs().sum() * 0 + 3e38, {}

    message = told(tiny_engine(optimizer=STEP), data, huge, MicroBatchSpec(n_microbatches=2))
    assert "from no single micro-batch: each has a finite loss and gradient" in message


def test_a_broken_weight_is_named_instead():
    data = random_sample([[4], [5]])
    engine = tiny_engine(optimizer=STEP)
    torch.nn.init.constant_(engine.module.model.norm.weight, float("nan"))
    message = told(engine, data, Poisoned(data, ()), MicroBatchSpec())
    assert "from the model: weight 'model.norm.weight' is not finite" in message
