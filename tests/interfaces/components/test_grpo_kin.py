"""Compare GRPO and its variants, which are settings of one normalization, with their own formulas in numpy.

Each reference follows its paper or the named library, one group at a time, with the constants of that library.
Groups are ragged, and their responses are in any order.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.functional.normalization import Scope, normalize
from realign.functional.packed import cu_seqlens_of, sequence_index
from realign.functional.returns import discounted_returns, token_rewards
from realign.interfaces.components.advantages import degenerate_rescale
from realign.interfaces.components.aggregation import SeqMeanTokenMean
from realign.interfaces.components.objectives import reinforce_loss
from tests.formulas import flags, over_ranks


class Rollout:
    """Ragged groups of at least two responses. Each response has at least one token, and some
    tokens are not trained."""

    def __init__(self, seed, binary=False):
        rng = np.random.default_rng(seed)
        self.groups = rng.permutation(np.repeat(rng.choice(1000, size=4, replace=False), rng.integers(2, 7, size=4)))
        n = len(self.groups)
        self.rewards = rng.integers(0, 2, size=n).astype(float) if binary else rng.normal(size=n) * 3 + 1
        self.lengths = rng.integers(1, 9, size=n)
        self.mask = rng.random(self.lengths.sum()) < 0.8
        starts = np.cumsum(self.lengths) - self.lengths
        self.mask[starts] = True
        self.sequence = np.repeat(np.arange(n), self.lengths)
        self.tokens = np.bincount(self.sequence, weights=self.mask)  # trained tokens per response
        self.cu_seqlens = cu_seqlens_of(self.lengths.tolist())

    def normalized(self, spec, x=None):
        x_S = torch.tensor(self.rewards if x is None else x)
        return normalize(x_S, torch.tensor(self.groups), torch.ones(len(x_S), dtype=torch.bool), **spec).numpy()

    def normalized_tokens(self, spec, x_T):
        group_T = torch.tensor(self.groups)[sequence_index(self.cu_seqlens)]
        return normalize(torch.as_tensor(x_T), group_T, torch.tensor(self.mask), **spec).numpy()

    def by_group(self, formula):
        """Apply `formula(rewards, trained tokens)` to each group, and return the results in the order of the
        responses."""
        out = np.zeros(len(self.rewards))
        for group in set(self.groups):
            members = self.groups == group
            out[members] = formula(self.rewards[members], self.tokens[members])
        return out


ANY_ROLLOUT = st.integers(0, 2**31).map(Rollout)
every_rollout = settings(deadline=None, max_examples=25)  # the machine may be busy


def grpo_of_verl(r, tokens):
    return (r - r.mean()) / (r.std(ddof=1) + 1e-6)


def grpo_of_trl(r, tokens):
    return (r - r.mean()) / (r.std(ddof=1) + 1e-4)


def dr_grpo(r, tokens):
    return r - r.mean()


def rloo(r, tokens):
    return np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))])


def opo(r, tokens):
    return r - (tokens * r).sum() / tokens.sum()


BY_GROUP = {
    grpo_of_verl: flags(Scope.group, Scope.group, unbiased=True, eps=1e-6),
    grpo_of_trl: flags(Scope.group, Scope.group, unbiased=True, eps=1e-4),
    dr_grpo: flags(Scope.group, Scope.none),
    rloo: flags(Scope.group, Scope.none, leave_one_out=True),
}


@pytest.mark.parametrize(("formula", "spec"), BY_GROUP.items(), ids=lambda x: getattr(x, "__name__", ""))
@every_rollout
@given(rollout=ANY_ROLLOUT)
def test_one_number_per_response(formula, spec, rollout):
    np.testing.assert_allclose(rollout.normalized(spec), rollout.by_group(formula), rtol=1e-9, atol=1e-12)


@every_rollout
@given(ANY_ROLLOUT)
def test_lite_ppo_takes_the_mean_of_the_group_and_the_deviation_of_the_batch(rollout):
    """arXiv:2508.08221. As with TRL's `scale_rewards="batch"`, the std is of the rewards before the mean is
    subtracted."""
    spec = flags(Scope.group, Scope.batch, unbiased=True, eps=1e-4)
    expected = rollout.by_group(dr_grpo) / (rollout.rewards.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(rollout.normalized(spec), expected, rtol=1e-9, atol=1e-12)


@every_rollout
@given(ANY_ROLLOUT)
def test_opo_is_the_group_mean_at_token_level(rollout):
    """arXiv:2505.23585: the baseline is sum(length * reward) / sum(length), the mean of the rewards assigned to each
    token."""
    got = rollout.normalized_tokens(flags(Scope.group, Scope.none), rollout.rewards[rollout.sequence])
    expected = rollout.by_group(opo)[rollout.sequence] * rollout.mask
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def whitened(x, mask):
    """Compute verl's masked_whiten: the sample variance, with eps inside the root."""
    values = x[mask]
    return np.where(mask, (x - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8), 0)


WHITENING = flags(Scope.batch, Scope.batch, unbiased=True, eps=1e-8, eps_inside_sqrt=True)


@every_rollout
@given(ANY_ROLLOUT, st.sampled_from([1.0, 0.9]))
def test_reinforce_plus_plus_whitens_the_returns_of_tokens_over_the_batch(rollout, gamma):
    """arXiv:2501.03262, as in verl, with a KL penalty in the token rewards."""
    kl = np.random.default_rng(0).normal(size=len(rollout.mask))
    mask_T = torch.tensor(rollout.mask)
    rewards_T = token_rewards(
        torch.tensor(rollout.rewards), mask_T, rollout.cu_seqlens, kl_T=torch.tensor(kl), kl_coef=0.1
    )
    returns_T = discounted_returns(rewards_T, mask_T, rollout.cu_seqlens, gamma=gamma)
    got = rollout.normalized_tokens(WHITENING, returns_T)
    returns = np.zeros(len(kl))
    for s, reward in enumerate(rollout.rewards):
        ahead, last = 0.0, True
        for t in np.flatnonzero(rollout.sequence == s)[::-1]:
            if rollout.mask[t]:
                ahead = -0.1 * kl[t] + (reward if last else 0) + gamma * ahead
                returns[t], last = ahead, False
    np.testing.assert_allclose(got, whitened(returns, rollout.mask), rtol=1e-9, atol=1e-10)


@every_rollout
@given(ANY_ROLLOUT)
def test_reinforce_plus_plus_baseline_is_two_normalisations_in_a_row(rollout):
    """arXiv:2501.03262: subtract the group mean from the rewards, then whiten over the tokens of the batch."""
    first = rollout.normalized(flags(Scope.group, Scope.none))
    got = rollout.normalized_tokens(WHITENING, first[rollout.sequence])
    expected = whitened(rollout.by_group(dr_grpo)[rollout.sequence], rollout.mask)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-10)


def gpg(rollout):
    """arXiv:2504.02546 with F_norm = 1: alpha (r - mean) with alpha = B / (B - M). M responses are in groups of equal
    rewards."""
    constant = rollout.by_group(lambda r, _: np.full(len(r), np.ptp(r) == 0)).astype(bool)
    alpha = len(constant) / max((~constant).sum(), 1) if (~constant).any() else 1.0
    return alpha, alpha * rollout.by_group(dr_grpo), constant


@every_rollout
@given(st.integers(0, 2**31))
def test_gpg_makes_up_for_groups_that_say_nothing(seed):
    rollout = Rollout(seed, binary=True)
    alpha, expected, _ = gpg(rollout)
    everyone = torch.ones(len(rollout.groups), dtype=torch.bool)
    rescale = degenerate_rescale(torch.tensor(rollout.rewards), torch.tensor(rollout.groups), everyone)
    assert rescale.item() == pytest.approx(alpha)
    got = rescale.item() * rollout.normalized(flags(Scope.group, Scope.none))
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@every_rollout
@given(st.integers(0, 2**31))
def test_the_loss_of_gpg_and_that_rescaling_is_leaving_constant_groups_out(seed):
    rollout = Rollout(seed, binary=True)
    _, advantages, constant = gpg(rollout)
    logprobs = -np.random.default_rng(1).random(len(rollout.mask))
    mask_T, cu_seqlens = torch.tensor(rollout.mask), rollout.cu_seqlens

    def loss(per_response, kept_T):
        advantages_T = torch.tensor(per_response[rollout.sequence])
        out = reinforce_loss(torch.tensor(logprobs), torch.zeros(len(mask_T)), advantages_T, kept_T)
        mean = SeqMeanTokenMean()
        return (mean.total(out.loss_T, kept_T, cu_seqlens) / mean.weight(kept_T, cu_seqlens)).item()

    per_response = [logprobs[(rollout.sequence == s) & rollout.mask].mean() for s in range(len(constant))]
    assert loss(advantages, mask_T) == pytest.approx(-(advantages * per_response).mean(), abs=1e-9)
    if not constant.all():
        telling_T = mask_T & torch.tensor(~constant[rollout.sequence])
        plain = rollout.by_group(dr_grpo)
        assert loss(plain, telling_T) == pytest.approx(loss(advantages, mask_T), abs=1e-9)


def test_gpg_by_hand_and_what_verl_counts_instead():
    rewards_S, group_S = torch.tensor([1.0, 1, 1, 0, 0, 0]), torch.tensor([5, 5, 2, 2, 9, 9])
    everyone = torch.ones(6, dtype=torch.bool)
    assert degenerate_rescale(rewards_S, group_S, everyone).item() == 3  # only group 2 has different rewards
    assert len(rewards_S) / rewards_S.count_nonzero().item() == 2  # alpha of verl: half of the answers are right
    assert degenerate_rescale(rewards_S, group_S, group_S != 5).item() == 2
    assert degenerate_rescale(rewards_S, group_S, group_S == 5).item() == 1
    assert degenerate_rescale(rewards_S, group_S, ~everyone).item() == 1


def test_trap_e10_gpg_counts_over_all_ranks():
    rewards_S, group_S = torch.tensor([1.0, 1, 1, 0, 0, 0, 3, 4]), torch.tensor([5, 5, 2, 2, 9, 9, 1, 1])
    everyone = torch.ones(8, dtype=torch.bool)
    got = over_ranks(
        [slice(0, 4), slice(4, 4), slice(4, 8)],
        lambda part, reduce: degenerate_rescale(rewards_S[part], group_S[part], everyone[part], reduce).view(1),
    )
    assert got.tolist() == [2, 2, 2]
