from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.functional.packed import cu_seqlens_of
from realign.functional.returns import discounted_returns, gae, n_step, token_rewards

NAN = math.nan
REWARDS = torch.tensor([0.0, 0, 1, 0, -1])
VALUES = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
CU = cu_seqlens_of([3, 2])
ALL = torch.ones(5, dtype=torch.bool)


def reference_gae(rewards, values, gamma, lam, bootstrap):
    """Compute GAE of one sequence of trainable tokens in plain Python."""
    advantages, after, value_after = [], 0.0, bootstrap
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        after = reward + gamma * value_after - value + gamma * lam * after
        value_after = value
        advantages.append(after)
    return advantages[::-1]


def test_trap_c1_gae_stays_inside_its_sequence():
    advantages_T, returns_T = gae(REWARDS, VALUES, ALL, CU, gamma=0.9, lam=0.5)
    assert advantages_T.tolist() == pytest.approx([0.25325, 0.385, 0.7, -0.625, -1.5], abs=1e-6)
    assert (returns_T - VALUES).tolist() == pytest.approx(advantages_T.tolist(), abs=1e-6)


def test_trap_c2_a_truncated_sequence_is_bootstrapped():
    advantages_T, _ = gae(REWARDS, VALUES, ALL, CU, gamma=0.9, lam=0.5, bootstrap_S=torch.tensor([0.6, 0.0]))
    assert advantages_T.tolist() == pytest.approx([0.3626, 0.628, 1.24, -0.625, -1.5], abs=1e-6)
    returns_T = discounted_returns(REWARDS, ALL, CU, gamma=0.5, bootstrap_S=torch.tensor([0.6, 0.0]))
    assert returns_T.tolist() == pytest.approx([0.325, 0.65, 1.3, -0.5, -1.0], abs=1e-6)


def test_trap_c3_nothing_decays_over_a_tool_call():
    mask_T = torch.tensor([True, False, True])
    rewards_T = torch.tensor([0.0, 7.0, 1.0])
    assert discounted_returns(rewards_T, mask_T, cu_seqlens_of([3]), gamma=0.5).tolist() == [0.5, 0.0, 1.0]
    values_T = torch.tensor([0.3, NAN, 0.4])
    gap = gae(rewards_T, values_T, mask_T, cu_seqlens_of([3]), gamma=0.9, lam=0.8)
    alone = gae(rewards_T[mask_T], values_T[mask_T], mask_T[mask_T], cu_seqlens_of([2]), gamma=0.9, lam=0.8)
    for with_gap, compressed in zip(gap, alone, strict=True):
        assert with_gap[mask_T].tolist() == compressed.tolist()
        assert with_gap[1] == 0


def test_trap_c3_the_score_lands_on_the_last_trainable_token():
    mask_T = torch.tensor([False, True, True, False, True, False])
    cu_seqlens = cu_seqlens_of([4, 2])
    rewards_T = token_rewards(torch.tensor([2.0, 3.0]), mask_T, cu_seqlens)
    assert rewards_T.tolist() == [0, 0, 2, 0, 3, 0]
    assert discounted_returns(rewards_T, mask_T, cu_seqlens, gamma=0.0).tolist() == [0, 0, 2, 0, 3, 0]


def test_trap_c4_returns_are_raw_advantages_plus_values_on_the_mask():
    generator = torch.Generator().manual_seed(0)
    rewards_T, values_T = torch.randn(2, 12, generator=generator)
    mask_T = torch.rand(12, generator=generator) < 0.6
    values_T[~mask_T] = 1e30  # arbitrary critic values on prompts and after the end
    advantages_T, returns_T = gae(rewards_T, values_T, mask_T, cu_seqlens_of([5, 7]), gamma=0.9, lam=0.9)
    assert torch.equal(returns_T[mask_T], advantages_T[mask_T] + values_T[mask_T])
    assert not returns_T[~mask_T].any()
    assert not advantages_T[~mask_T].any()


def test_trap_c10_the_kl_of_masked_tokens_is_in_no_return():
    mask_T = torch.tensor([False, True, False, True])
    cu_seqlens = cu_seqlens_of([4])
    clean = token_rewards(torch.tensor([1.0]), mask_T, cu_seqlens, kl_T=torch.tensor([0.0, 1, 0, 2]), kl_coef=0.5)
    dirty = token_rewards(torch.tensor([1.0]), mask_T, cu_seqlens, kl_T=torch.tensor([NAN, 1, 9, 2]), kl_coef=0.5)
    assert clean.tolist() == dirty.tolist() == [0, -0.5, 0, 0.0]


def test_trap_a10_rewards_add_up_to_the_score_less_the_kl():
    kl_T = torch.tensor([0.5, 0.25, 0.0, 1.0, 2.0])
    rewards_T = token_rewards(torch.tensor([3.0, -1.0]), ALL, CU, kl_T=kl_T, kl_coef=0.1)
    assert rewards_T.tolist() == pytest.approx([-0.05, -0.025, 3.0, -0.1, -1.2], abs=1e-6)
    assert rewards_T[:3].sum() == pytest.approx(3.0 - 0.075)


def test_trap_a14_sequences_without_trainable_tokens_are_left_alone():
    cu_seqlens = cu_seqlens_of([0, 1, 2, 0])
    mask_T = torch.tensor([False, False, True])
    scores_S = torch.tensor([NAN, NAN, 5.0, NAN])
    rewards_T = token_rewards(scores_S, mask_T, cu_seqlens)
    assert rewards_T.tolist() == [0, 0, 5]
    advantages_T, returns_T = gae(
        rewards_T, torch.full((3,), 2.0), mask_T, cu_seqlens, gamma=1.0, lam=1.0, bootstrap_S=torch.zeros(4)
    )
    assert advantages_T.tolist() == [0, 0, 3]
    assert returns_T.tolist() == [0, 0, 5]


def test_trap_c13_scores_of_any_dtype_give_fp32_rewards():
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        rewards_T = token_rewards(torch.tensor([1, 2]).to(dtype), ALL, CU)
        assert rewards_T.dtype == torch.float32
        assert rewards_T.tolist() == [0, 0, 1, 0, 2]
    assert gae(REWARDS.bfloat16(), VALUES.bfloat16(), ALL, CU, gamma=1.0, lam=1.0)[0].dtype == torch.float32


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.5, 0.97, 1.0]),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.integers(0, 2**31),
)
def test_packed_credit_equals_a_loop_over_sequences(lengths, gamma, lam, seed):
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens, total = cu_seqlens_of(lengths), sum(lengths)
    rewards_T, values_T = torch.randn(2, total, generator=generator, dtype=torch.float64)
    bootstrap_S = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    mask_T = torch.rand(total, generator=generator) < 0.7
    advantages_T, returns_T = gae(
        rewards_T, values_T, mask_T, cu_seqlens, gamma=gamma, lam=lam, bootstrap_S=bootstrap_S
    )
    discounted_T = discounted_returns(rewards_T, mask_T, cu_seqlens, gamma=gamma, bootstrap_S=bootstrap_S)
    start = 0
    for length, bootstrap in zip(lengths, bootstrap_S.tolist(), strict=True):
        kept = [t for t in range(start, start + length) if mask_T[t]]
        rewards, values = rewards_T[kept].tolist(), values_T[kept].tolist()
        expected = reference_gae(rewards, values, gamma, lam, bootstrap)
        assert advantages_T[kept].tolist() == pytest.approx(expected, abs=1e-10)
        assert returns_T[kept].tolist() == pytest.approx(
            [a + v for a, v in zip(expected, values, strict=True)], abs=1e-10
        )
        without_critic = reference_gae(rewards, [0.0] * len(kept), gamma, 1.0, bootstrap)
        assert discounted_T[kept].tolist() == pytest.approx(without_critic, abs=1e-10)
        start += length


def reference_n_step(rewards, values, gamma, n, bootstrap):
    """Compute the n-step return of every token of one sequence in plain Python."""
    returns = []
    for t in range(len(rewards)):
        end = min(t + n, len(rewards))
        after = values[end] if end < len(rewards) else bootstrap
        value = sum(gamma ** (k - t) * rewards[k] for k in range(t, end))
        returns.append(value + gamma ** (end - t) * after)
    return returns


def test_n_step_returns_by_hand():
    advantages_T, returns_T = n_step(REWARDS, VALUES, ALL, CU, gamma=0.5, n=2)
    # 0.25 * 0.3; 0.5 * 1; 1; 0.5 * -1; -1
    assert returns_T.tolist() == pytest.approx([0.075, 0.5, 1.0, -0.5, -1.0], abs=1e-6)
    assert advantages_T.tolist() == pytest.approx([-0.025, 0.3, 0.7, -0.9, -1.5], abs=1e-6)
    bootstrap_S = torch.tensor([0.6, 0.0])
    _, truncated_T = n_step(REWARDS, VALUES, ALL, CU, gamma=0.5, n=2, bootstrap_S=bootstrap_S)
    assert truncated_T.tolist() == pytest.approx([0.075, 0.65, 1.3, -0.5, -1.0], abs=1e-6)


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.5, 0.97, 1.0]),
    st.integers(1, 12),
    st.integers(0, 2**31),
)
def test_packed_n_step_returns_equal_a_loop_over_sequences(lengths, gamma, n, seed):
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens, total = cu_seqlens_of(lengths), sum(lengths)
    rewards_T, values_T = torch.randn(2, total, generator=generator, dtype=torch.float64)
    bootstrap_S = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    mask_T = torch.rand(total, generator=generator) < 0.7
    args = (rewards_T, values_T.masked_fill(~mask_T, NAN), mask_T, cu_seqlens)
    advantages_T, returns_T = n_step(*args, gamma=gamma, n=n, bootstrap_S=bootstrap_S)
    assert not advantages_T[~mask_T].any()
    start = 0
    for length, bootstrap in zip(lengths, bootstrap_S.tolist(), strict=True):
        kept = [t for t in range(start, start + length) if mask_T[t]]
        want = reference_n_step(rewards_T[kept].tolist(), values_T[kept].tolist(), gamma, n, bootstrap)
        assert returns_T[kept].tolist() == pytest.approx(want, abs=1e-10)
        assert advantages_T[kept].tolist() == pytest.approx((torch.tensor(want) - values_T[kept]).tolist(), abs=1e-6)
        start += length


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"gamma must be in \[0, 1\], found 1.1"):
        discounted_returns(REWARDS, ALL, CU, gamma=1.1)
    with pytest.raises(ValueError, match=r"lam must be in"):
        gae(REWARDS, VALUES, ALL, CU, gamma=1.0, lam=NAN)
    with pytest.raises(ValueError, match=r"values_T has shape \(4,\), should be \(5,\)"):
        gae(REWARDS, VALUES[:4], ALL, CU, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"scores_S has shape \(3,\), should be \(2,\)"):
        token_rewards(torch.zeros(3), ALL, CU)
    with pytest.raises(ValueError, match=r"kl_coef=0.1 needs kl_T"):
        token_rewards(torch.zeros(2), ALL, CU, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"bootstrap_S"):
        discounted_returns(REWARDS, ALL, CU, gamma=1.0, bootstrap_S=torch.zeros(1))
