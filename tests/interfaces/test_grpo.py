from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from realign.api import GenerationConfig, Model, SequenceSample, stat_values
from realign.errors import SettingsError
from realign.functional import Scope
from realign.interfaces.components import (
    GAE,
    Constant,
    GroupRelative,
    KLPenalty,
    KLPlace,
    Normalization,
    RewardShaping,
)
from realign.interfaces.grpo import GRPOActorInterface
from realign.testing import BigramEngine, random_batch


def batch(rewards: list[list[float]], tokens: int = 3) -> SequenceSample:
    """Return sequences of one prompt token and `tokens - 1` sampled tokens, with these rewards per group."""
    ids = [f"p{i}" for i in range(len(rewards))]
    data = SequenceSample.from_sequences(ids, {"input_ids": [[[1] * tokens for _ in group] for group in rewards]})
    mask = torch.tensor(([False] + [True] * (tokens - 1)) * sum(map(len, rewards)))
    flat = torch.tensor([r for group in rewards for r in group])
    return data.with_tokens(loss_mask=mask, logprobs=torch.zeros(len(mask))).with_sequences(rewards=flat)


def advantages(data: SequenceSample, **settings) -> list[float]:
    """Return the advantage of the last token of each sequence."""
    out = GRPOActorInterface(**settings).estimate_advantages(Model("actor", BigramEngine()), data)
    return [float(x[-1]) for x in out.sequences("advantages")]


def test_rewards_are_normalised_within_each_group():
    found = advantages(batch([[1.0, 0.0, 0.0, 0.0], [5.0, 3.0]]))
    assert found == pytest.approx([3**0.5, *[-(3**-0.5)] * 3, 1.0, -1.0], abs=1e-6)


def test_every_sampled_token_gets_its_responses_advantage_and_prompts_get_none():
    data = batch([[1.0, 0.0]])
    out = GRPOActorInterface().estimate_advantages(Model("actor", BigramEngine()), data)
    assert out["advantages"].tolist() == pytest.approx([0, 1, 1, 0, -1, -1], abs=1e-6)


def test_trap_e1_a_group_of_equal_rewards_teaches_exactly_nothing():
    data = batch([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0]])
    assert advantages(data)[:4] == [0.0] * 4
    model, interface = Model("actor", BigramEngine()), GRPOActorInterface()
    stats = interface.batch_stats(model, interface.estimate_advantages(model, data))
    assert stat_values(stats)["zero_std_fraction"] == 0.5


def test_trap_e4_ragged_groups_are_found_by_id():
    assert advantages(batch([[1.0, 0.0], [1.0, 2.0, 3.0]])) == pytest.approx(
        [1.0, -1.0, -(1.5**0.5), 0.0, 1.5**0.5], abs=1e-6
    )


def test_trap_e5_a_group_of_one_raises_in_the_config_and_gives_0_in_the_data():
    message = r"generation\.n=1: adv_norm compares the responses to a prompt"
    with pytest.raises(SettingsError, match=message):
        GRPOActorInterface(generation=GenerationConfig(n=1))
    divided = Normalization(Scope.batch, Scope.group)  # the std of one response is 0, so all advantages would be 0
    with pytest.raises(SettingsError, match=message):
        GRPOActorInterface(
            generation=GenerationConfig(n=1), adv_norm=divided, advantage=GroupRelative(min_group_size=1)
        )
    with pytest.raises(SettingsError, match=r"min_group_size=5: must be at most generation\.n=4"):
        GRPOActorInterface(generation=GenerationConfig(n=4), advantage=GroupRelative(min_group_size=5))
    one = GroupRelative(min_group_size=1)
    for spec in (Normalization(Scope.group, Scope.group), Normalization(Scope.group, Scope.none, leave_one_out=True)):
        assert advantages(batch([[3.0], [1.0, 0.0]]), adv_norm=spec, advantage=one)[0] == 0.0


def test_trap_e6_order_and_equal_texts_do_not_matter():
    rewards = [[1.0, 0.0, 0.0], [0.0, 2.0], [1.0, 0.0, 0.0]]
    data = batch(rewards)  # all prompts have the same text, and different ids
    straight = dict(zip(data.ids, np.split(np.array(advantages(data)), [3, 5]), strict=True))
    order = [2, 0, 1]
    shuffled = data.take(order)
    moved = np.split(np.array(advantages(shuffled)), [3, 6])
    for i, values in zip(shuffled.ids, moved, strict=True):
        np.testing.assert_array_equal(values, straight[i])


def test_trap_e8_group_and_batch_scopes_differ_and_loo_and_bias_are_explicit():
    data = batch([[1.0, 0.0, 0.0, 0.0], [4.0, 0.0]])
    first = {
        (mean, std): advantages(data, adv_norm=Normalization(mean, std))[0]
        for mean in (Scope.group, Scope.batch)
        for std in (Scope.none, Scope.group, Scope.batch)
    }
    assert len({round(v, 4) for v in first.values()}) == 6
    biased, unbiased, loo = (
        advantages(batch([[1.0, 0.0, 0.0, 0.0]]), adv_norm=Normalization(Scope.group, Scope.group, **kwargs))[0]
        for kwargs in ({}, {"unbiased": True}, {"leave_one_out": True})
    )
    assert (biased, unbiased, loo) == pytest.approx((1.7321, 1.5, 2.3094), abs=1e-4)


def test_trap_e9_a_missing_reward_leaves_the_loss_and_its_siblings_statistics():
    with_missing = batch([[1.0, math.nan, 0.0, 0.0]])
    without = batch([[1.0, 0.0, 0.0]])
    found = advantages(with_missing)
    assert [found[0], found[2], found[3]] == advantages(without)
    model = Model("actor", BigramEngine())
    interface = GRPOActorInterface()
    out = interface.estimate_advantages(model, with_missing)
    assert interface.loss_weight(out) == 6  # three responses of two sampled tokens


def test_a_group_with_too_few_rewards_is_left_out():
    data = batch([[1.0, math.nan, math.nan], [1.0, 0.0, 0.5]])
    interface = GRPOActorInterface(advantage=GroupRelative(min_group_size=2))
    out = interface.estimate_advantages(Model("actor", BigramEngine()), data)
    assert interface.loss_weight(out) == 6
    assert out["loss_mask"][:9].sum() == 0


def test_rescaling_makes_up_for_groups_of_equal_rewards():
    rewards = [[1.0, 1.0, 1.0], [1.0, 0.0], [0.0, math.nan, 0.0], [5.0]]
    settings = {
        "adv_norm": Normalization(Scope.group, Scope.none),
        "advantage": GroupRelative(rescale_degenerate=True),
    }
    interface = GRPOActorInterface(**settings)
    factor = 7 / 2  # the group of one is excluded; among 3 + 2 + 2 responses, two have different rewards
    expected = [0, 0, 0, 0.5 * factor, -0.5 * factor, 0, 0, 0, 0]
    assert advantages(batch(rewards), **settings) == pytest.approx(expected)
    assert interface.describe(4)["advantage"].endswith("times B / (B - M)")
    with pytest.raises(SettingsError, match=r"adv_norm\.mean=batch\. Set adv_norm\.mean=group"):
        GRPOActorInterface(
            adv_norm=Normalization(Scope.batch, Scope.none), advantage=GroupRelative(rescale_degenerate=True)
        )


def test_kl_in_the_reward_is_taken_off_before_the_group_is_compared():
    data = batch([[1.0, 1.0]]).with_tokens(ref_logprobs=torch.tensor([0, -0.5, -0.5, 0, 0, 0]))
    kl = KLPenalty(KLPlace.reward, coef=0.1)
    none = Normalization(Scope.group, Scope.none)
    assert advantages(data, kl=kl, adv_norm=none) == pytest.approx([-0.05, 0.05], abs=1e-6)


def test_length_weighted_statistics_weight_a_response_by_its_length():
    lengths = [[[1, 1, 1, 1], [1, 1]]]
    data = SequenceSample.from_sequences(["p"], {"input_ids": lengths})
    data = data.with_tokens(loss_mask=torch.tensor([False, True, True, True, False, True]), logprobs=torch.zeros(6))
    data = data.with_sequences(rewards=torch.tensor([1.0, 0.0]))
    spec, weighted = Normalization(Scope.group, Scope.none), GroupRelative(length_weighted=True)
    assert advantages(data, adv_norm=spec, advantage=weighted) == pytest.approx([0.25, -0.75])


@pytest.mark.parametrize("coef", [0.0, 0.5])
def test_gae_in_the_group_equals_group_adv_norm_of_realhf(coef):
    """It normalizes the returns of tokens over all tokens of a group."""
    data = SequenceSample.from_sequences(["p"], {"input_ids": [[[1, 2, 2, 2], [1, 2, 2]]]})
    data = data.with_tokens(
        loss_mask=torch.tensor([False, True, True, True, False, True, True]),
        logprobs=torch.tensor([0.0, -1.0, -0.5, -1.5, 0.0, -2.0, -0.5]),
        ref_logprobs=torch.tensor([0.0, -1.5, -0.5, -0.5, 0.0, -1.0, -1.5]),
    ).with_sequences(rewards=torch.tensor([1.0, 0.0]))
    rewards = -coef * (data["logprobs"] - data["ref_logprobs"])
    rewards[[3, 6]] += data["rewards"]  # the score, at the last token of each response
    returns = torch.cat([part.flip(0).cumsum(0).flip(0) for part in (rewards[1:4], rewards[5:7])])
    kl = KLPenalty(place="reward", estimator="k1", coef=coef)
    of_group = Normalization("group", "group", eps=1e-5)
    actor = GRPOActorInterface(advantage=GAE(gamma=1, lam=1), adv_norm=of_group, kl=kl)
    found = actor.estimate_advantages(Model("actor", BigramEngine()), data)["advantages"]
    expected = (returns - returns.mean()) / (returns.std(correction=0) + 1e-5)
    torch.testing.assert_close(found[data["loss_mask"]], expected)


@pytest.mark.parametrize("advantage", [GroupRelative(), GroupRelative(length_weighted=True), GAE(lam=1.0)], ids=str)
def test_statistics_of_the_batch_are_added_up_over_the_ranks(advantage):
    """A second rank with rewards of 0 reduces the mean. Statistics of a group do not depend on other ranks."""
    own, other = batch([[4.0, 2.0], [2.0, 0.0]]), batch([[0.0, 0.0], [0.0, 0.0]])
    interface = GRPOActorInterface(adv_norm=Normalization(Scope.batch, Scope.none), advantage=advantage)

    def credit(data: SequenceSample, engine: BigramEngine) -> torch.Tensor:
        return interface.estimate_advantages(Model("actor", engine), data)["advantages"]

    sums: list[torch.Tensor] = []

    class Recording(BigramEngine):
        def reduce(self, x):
            sums.append(x)
            return x

    class WithAnother(BigramEngine):
        def reduce(self, x):
            return x + sums.pop(0)

    credit(other, Recording())
    found = credit(own, WithAnother())
    assert found[own["loss_mask"]].tolist() == pytest.approx([3, 3, 1, 1, 1, 1, -1, -1])


@pytest.mark.parametrize("seed", range(5))
def test_trap_e12_agrees_with_a_plain_reference_on_random_groups(seed):
    data = random_batch(seed, n_prompts=8).select(["input_ids", "loss_mask", "rewards"])
    rewards, found = data["rewards"].tolist(), advantages_per_sequence(data)
    start = 0
    for count in data.lengths["input_ids"].counts.tolist():
        trained = [s for s in range(start, start + count) if found[s] is not None]
        group = np.array([rewards[s] for s in trained])
        for s in trained:
            std = group.std()
            want = 0.0 if std == 0 else (rewards[s] - group.mean()) / (std + 1e-8)
            assert found[s] == pytest.approx(want, abs=1e-6)
        start += count


def advantages_per_sequence(data: SequenceSample) -> list[float | None]:
    out = GRPOActorInterface().estimate_advantages(Model("actor", BigramEngine()), data)
    pairs = zip(out.sequences("advantages"), out.sequences("loss_mask"), strict=True)
    return [float(a[m][0]) if m.any() else None for a, m in pairs]


def test_dr_grpo_by_flags():
    interface = GRPOActorInterface(
        adv_norm=Normalization(Scope.group, Scope.none),
        aggregation=Constant(10.0),
    )
    out = interface.estimate_advantages(Model("actor", BigramEngine()), batch([[1.0, 0.0]]))
    assert out["advantages"].tolist() == pytest.approx([0, 0.5, 0.5, 0, -0.5, -0.5])
    assert interface.loss_weight(out) == 20


def test_a_greedy_baseline_raises_where_the_mean_of_the_group_would_cancel_it():
    greedy = RewardShaping(baseline="greedy")
    with pytest.raises(SettingsError, match=r"reward\.baseline=greedy: .* adv_norm\.mean=group cancels"):
        GRPOActorInterface(reward=greedy)
    assert GRPOActorInterface(reward=greedy, adv_norm=Normalization(Scope.none, Scope.none)).reward.has_baseline
