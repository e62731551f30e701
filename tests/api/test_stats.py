"""Test metrics: merging rules, and that results do not depend on how the batch is divided."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realign.api import (
    Max,
    Mean,
    MicroBatchSpec,
    Min,
    Model,
    Stats,
    Sum,
    correlation,
    masked_max,
    masked_mean,
    masked_variance,
    merge_stats,
    stat_values,
)
from realign.api.stats import iter_traced
from realign.interfaces.components import KLPenalty
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.testing import BigramEngine, random_batch

ROWS = st.lists(st.tuples(st.integers(-50, 50), st.booleans()), min_size=1, max_size=12)


def t(value: float) -> Tensor:
    return torch.tensor(value)


def metrics(rows: list[tuple[int, bool]]) -> Stats:
    """Return one metric of each kind, computed from numbers that floats represent exactly."""
    x = torch.tensor([float(v) for v, _ in rows])
    mask = torch.tensor([m for _, m in rows])
    return {
        "mean": masked_mean(x, mask),
        "max": masked_max(x, mask),
        "min": Min(-masked_max(-x, mask).value),
        "sum": Sum((x * mask).sum()),
        "count": Sum(mask.sum()),
    }


@settings(deadline=None)
@given(ROWS, st.data())
def test_trap_d12_metrics_are_those_of_the_whole_however_it_is_cut(
    rows: list[tuple[int, bool]], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(rows))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows) - 1)) if len(rows) > 1 else st.just(set())))
    parts = [metrics(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    k = data.draw(st.integers(0, len(parts)))
    nested = merge_stats([merge_stats(parts[:k]), merge_stats(parts[k:])])  # merge over micro-batches, then over ranks
    chosen = [v for v, m in rows if m]
    want = {"sum": sum(chosen), "count": len(chosen)}
    if chosen:
        want |= {"max": max(chosen), "min": min(chosen), "mean": pytest.approx(sum(chosen) / len(chosen), rel=1e-12)}
    assert stat_values(merge_stats(parts)) == stat_values(nested) == stat_values(metrics(rows)) == want


def test_a_metric_of_nothing_is_left_out_and_a_sum_of_nothing_is_zero() -> None:
    nothing = torch.zeros(3, dtype=torch.bool)
    x = torch.tensor([1.0, math.nan, math.inf])
    stats: Stats = {"mean": masked_mean(x, nothing), "max": masked_max(x, nothing), "min": Min(t(math.inf))}
    assert stat_values({**stats, "sum": Sum(t(0.0))}) == {"sum": 0.0}
    assert stat_values({}) == {}
    assert stat_values(merge_stats([])) == {}


@pytest.mark.parametrize(
    ("a", "b", "kinds"),
    [
        (Mean(t(1.0), t(1)), Max(t(1.0)), "Mean in one micro-batch and Max"),
        (Sum(t(1.0)), (t(1.0), t(1)), "Sum in one micro-batch and Mean"),
        (Min(t(1.0)), Sum(t(1.0)), "Min in one micro-batch and Sum"),
    ],
)
def test_one_name_has_one_kind(a: object, b: object, kinds: str) -> None:
    with pytest.raises(ValueError, match=f"metric 'm' is {kinds} in another"):
        merge_stats([{"m": a}, {"m": b}])  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("stat", "message"),
    [
        (t(1.0), "must be Mean, Max, Min, Sum, Variance, Std, Correlation or .*, found Tensor"),
        ((t(1.0),), "must be Mean, Max, Min, Sum, Variance, Std, Correlation or .*, found tuple"),
        (Sum(torch.zeros(2)), r"must contain single numbers, found a tensor of shape \[2\]"),
    ],
)
def test_what_is_no_metric_is_refused_by_name(stat: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"metric 'm' {message}"):
        merge_stats([{"m": stat}])  # type: ignore[dict-item]


def test_a_correlation_of_parts_is_that_of_the_whole() -> None:
    """Compare with numpy for scores far from 0 and any division. Masked values have no effect."""
    rng = np.random.default_rng(0)
    x = rng.normal(1000.0, 0.1, 200)
    y = 3 * x + rng.normal(0, 0.2, 200)
    x[::7] = np.nan
    mask = torch.from_numpy(np.isfinite(x))
    xs, ys = torch.from_numpy(x), torch.from_numpy(y)
    cuts = [slice(0, 1), slice(1, 90), slice(90, 200)]
    merged = merge_stats([{"r": correlation(xs[c], ys[c], mask[c])} for c in cuts])
    want = np.corrcoef(x[np.isfinite(x)], y[np.isfinite(x)])[0, 1]
    assert stat_values(merged)["r"] == pytest.approx(want, abs=1e-6)


def test_a_variance_is_that_of_all_parts_together():
    x = torch.tensor([1.0, 1.5, 4.0, -2.0, math.nan])
    mask = x.isfinite()
    whole = stat_values({"v": masked_variance(x, mask)})
    parts = merge_stats({"v": masked_variance(x[i : i + 2], mask[i : i + 2])} for i in (0, 2, 4))
    assert whole["v"] == pytest.approx(float(x[:4].var(correction=0)))
    assert stat_values(parts)["v"] == pytest.approx(whole["v"])
    assert stat_values({"v": masked_variance(x, torch.zeros(5, dtype=torch.bool))}) == {}


TRACED = MicroBatchSpec(trace_ids=("q0",))
KEYS = ("input_ids", "loss_mask", "logprobs", "rewards", "ref_logprobs")


def trained(interface, spec, data):
    engine = BigramEngine()
    stats = interface.train_step(Model("actor", engine), data, spec)
    return engine.parameters, stats


@pytest.mark.parametrize("n_microbatches", [1, 3, 7])
def test_traces_are_the_same_however_the_batch_is_cut_and_change_nothing_else(n_microbatches):
    data = random_batch().select(KEYS)
    interface = GRPOActorInterface(kl=KLPenalty("loss", 0.1))
    plain, off = trained(interface, MicroBatchSpec(n_microbatches=n_microbatches), data)
    weights, stats = trained(interface, MicroBatchSpec(n_microbatches=n_microbatches, trace_ids=("q1", "q3")), data)
    assert all(torch.equal(a, b) for a, b in zip(plain, weights, strict=True))
    assert stat_values(stats) == stat_values(off)
    assert not list(iter_traced(off, ("q1", "q3")))
    traces = {(one.prompt, one.response): one.values for one in iter_traced(stats, ("q1", "q3"))}
    whole = {
        (one.prompt, one.response): one.values
        for one in iter_traced(trained(interface, MicroBatchSpec(trace_ids=("q1", "q3")), data)[1], ("q1", "q3"))
    }
    trained_responses = {key for key, values in whole.items() if values["token/mask"].any()}
    assert trained_responses
    assert traces.keys() == whole.keys()
    for key, values in whole.items():
        for name, x_T in values.items():
            assert torch.allclose(traces[key][name], x_T, atol=1e-6), (key, name)


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_a_trace_belongs_to_the_same_response_whichever_other_one_is_left_out(dropped):
    data = random_batch().select(KEYS).take([0])  # four responses
    whole = {one.response: one.values for one in iter_traced(trained(PPOActorInterface(), TRACED, data)[1], data.ids)}
    rewards_S = data["rewards"].clone()
    rewards_S[dropped] = math.nan
    left = data.with_sequences(rewards=rewards_S)
    traces = {one.response: one.values for one in iter_traced(trained(PPOActorInterface(), TRACED, left)[1], data.ids)}
    assert traces.keys() == whole.keys() - {dropped}
    for response, values in traces.items():
        torch.testing.assert_close(values["token/logprob"], whole[response]["token/logprob"])
