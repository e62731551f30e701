from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from realign.functional.losses import CapMode, ImportanceLevel, behavior_weights, nll_loss, policy_loss
from realign.functional.packed import cu_seqlens_of
from realign.interfaces.components import TokenMean


def ones(n):
    return torch.ones(n, dtype=torch.bool)


def at_ratio(ratio, advantage, **options):
    """Return the outputs and loss of one token, and the derivative of the loss with respect to the ratio."""
    logprobs_T = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    out = policy_loss(
        logprobs_T, torch.zeros(1).double(), torch.tensor([advantage], dtype=torch.float64), ones(1), **options
    )
    out.loss_T.sum().backward()
    return out, out.loss_T.item(), float(logprobs_T.grad) / ratio


# Columns: ratio, advantage, loss, d loss / d ratio, clipped, dual clipped (clip 0.2 below, 0.3 above, dual clip at
# 3).
TABLE = [
    (1.0, 2.0, -2.0, -2.0, False, False),
    (1.2, 2.0, -2.4, -2.0, False, False),
    (1.5, 2.0, -2.6, 0.0, True, False),
    (0.5, 2.0, -1.0, -2.0, False, False),
    (5.0, 2.0, -2.6, 0.0, True, False),
    (1.0, -2.0, 2.0, 2.0, False, False),
    (0.5, -2.0, 1.6, 0.0, True, False),
    (1.5, -2.0, 3.0, 2.0, False, False),
    (2.9, -2.0, 5.8, 2.0, False, False),
    (3.5, -2.0, 6.0, 0.0, False, True),
    (3.5, 0.0, 0.0, 0.0, False, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope", "clipped", "dual"), TABLE)
def test_trap_f9_sign_of_the_advantage_times_ratio(ratio, advantage, loss, slope, clipped, dual):
    out, got, derivative = at_ratio(ratio, advantage, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    assert got == pytest.approx(loss, abs=1e-12)
    assert derivative == pytest.approx(slope, abs=1e-12)
    assert (out.clipped_T.item(), out.dual_clipped_T.item()) == (clipped, dual)
    assert out.ratio_T.item() == pytest.approx(ratio)


def test_policy_clip_of_the_source_a31_a32():
    logprobs_T = torch.tensor([-1.0, -0.4, -2.0, -0.1])
    old_T = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    advantages_T = torch.tensor([1.0, 1.0, -1.0, -1.0])
    r, a = np.exp(logprobs_T.numpy() - old_T.numpy()), advantages_T.numpy()
    first, second = -a * r, -a * np.clip(r, 0.8, 1.2)
    out = policy_loss(logprobs_T, old_T, advantages_T, ones(4))
    np.testing.assert_allclose(out.loss_T, np.maximum(first, second), rtol=1e-6)
    assert out.clipped_T.tolist() == (second > first).tolist()


def test_trap_a7_the_ratio_off_the_mask_is_exactly_one():
    out = policy_loss(torch.tensor([0.0, -3.0]), torch.tensor([-1.0, -3.0]), torch.ones(2), torch.tensor([False, True]))
    assert out.ratio_T.tolist() == [1.0, 1.0]
    assert out.loss_T.tolist() == [0.0, -1.0]


def decoupled_inputs(n=12):
    generator = torch.Generator().manual_seed(3)
    current, proximal, behavior, advantages = torch.randn(4, n, generator=generator, dtype=torch.float64)
    return current * 0.3, proximal * 0.3, behavior * 0.3, advantages


def test_trap_f2_the_cap_takes_tokens_out_of_the_denominator_or_truncates():
    log_weights_T = torch.tensor([0.0, 2.0, -1.0, 3.0])
    mask_T, cu_seqlens = torch.tensor([True, True, True, False]), cu_seqlens_of([4])
    args = (log_weights_T, torch.zeros(4), mask_T, cu_seqlens)
    weight_T, keep_T, _ = behavior_weights(*args, cap=2.0, mode=CapMode.mask)
    assert keep_T.tolist() == [True, False, True, False]
    assert weight_T.tolist() == pytest.approx([1.0, 0.0, math.exp(-1), 0.0])
    assert TokenMean().weight(keep_T, cu_seqlens) == 2
    weight_T, keep_T, _ = behavior_weights(*args, cap=2.0, mode=CapMode.truncate)
    assert keep_T.tolist() == mask_T.tolist()
    assert weight_T.tolist() == pytest.approx([1.0, 2.0, math.exp(-1), 0.0])
    weight_T, keep_T, _ = behavior_weights(*args)
    assert keep_T.tolist() == mask_T.tolist()
    assert weight_T.tolist() == pytest.approx([1.0, math.exp(2), math.exp(-1), 0.0])


def test_trap_f4_a_sequence_is_kept_or_dropped_as_a_whole():
    proximal_T = torch.tensor([0.5, -0.25, 0.75, 0.1, -0.2])
    weight_T, keep_T, _ = behavior_weights(
        proximal_T, torch.zeros(5), ones(5), cu_seqlens_of([3, 2]), cap=1.5, level=ImportanceLevel.sequence
    )
    assert keep_T.tolist() == [False, False, False, True, True]
    assert weight_T.tolist() == pytest.approx([0, 0, 0, math.exp(-0.1), math.exp(-0.1)])


@pytest.mark.parametrize("level", [ImportanceLevel.sequence, ImportanceLevel.geometric])
def test_trap_f6_sequence_ratios_equal_a_padded_reference(level):
    rng = np.random.default_rng(0)
    lengths = [3, 0, 5, 1]
    rows = [(rng.normal(size=n) * 0.2, rng.normal(size=n) * 0.2, rng.random(n) < 0.7) for n in lengths]
    padded = np.zeros((4, 5))
    for row, (proximal, behavior, mask) in zip(padded, rows, strict=True):
        row[: len(mask)] = (proximal - behavior) * mask
    tokens = [max(1, row[2].sum()) if level is ImportanceLevel.geometric else 1 for row in rows]
    expected = np.concatenate([np.exp(padded.sum(1) / tokens)[s] * rows[s][2] for s in range(4)])
    packed = [torch.tensor(np.concatenate(column)) for column in zip(*rows, strict=True)]
    weight_T, keep_T, _ = behavior_weights(*packed, cu_seqlens_of(lengths), level=level)
    np.testing.assert_allclose(weight_T.numpy(), expected, rtol=1e-12)
    assert torch.equal(keep_T, packed[2])


def test_trap_f10_every_weight_is_1_when_the_proximal_policy_is_the_behavior_policy():
    _, proximal, _, _ = decoupled_inputs()
    weight_T, keep_T, _ = behavior_weights(proximal, proximal, ones(12), cu_seqlens_of([5, 7]), cap=5.0)
    assert torch.equal(weight_T, torch.ones_like(weight_T))
    assert keep_T.all()


def test_trap_a5_a_nan_on_the_mask_is_not_hidden():
    nan_T = torch.tensor([math.nan])
    assert policy_loss(nan_T, torch.zeros(1), torch.ones(1), ones(1)).loss_T.isnan().all()


def test_bad_input_is_named():
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="clip_low"):
        policy_loss(x, x, x, ones(2), clip_low=1.2)
    with pytest.raises(ValueError, match="clip_high"):
        policy_loss(x, x, x, ones(2), clip_high=-0.1)
    with pytest.raises(ValueError, match=r"dual_clip must be above 1 .* found 1.0"):
        policy_loss(x, x, x, ones(2), dual_clip=1.0)
    with pytest.raises(ValueError, match="cap"):
        behavior_weights(x, x, ones(2), cu_seqlens_of([2]), cap=0.0)
    with pytest.raises(ValueError, match=r"floor must be positive and at most the cap 2.0 .* found 3.0"):
        behavior_weights(x, x, ones(2), cu_seqlens_of([2]), floor=3.0, cap=2.0)
    with pytest.raises(ValueError, match="floor must be positive"):
        behavior_weights(x, x, ones(2), cu_seqlens_of([2]), floor=0.0)
    with pytest.raises(ValueError, match="advantages_T has shape"):
        policy_loss(x, x, x[:1], ones(2))
    with pytest.raises(ValueError, match="mask_T has dtype"):
        nll_loss(x, torch.ones(2))
    with pytest.raises(ValueError, match="'seq'"):
        behavior_weights(x, x, ones(2), cu_seqlens_of([2]), level="seq")
