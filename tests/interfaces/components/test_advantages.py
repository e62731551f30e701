from __future__ import annotations

import math

import pytest
import torch

from realign.api import SequenceSample, stat_values
from realign.errors import RunError, SettingsError
from realign.functional import identity, segment_sum
from realign.interfaces.components import (
    GAE,
    Estimate,
    Gdpo,
    GroupRelative,
    MaxRL,
    Normalization,
    NStep,
    Rewards,
    RewardShaping,
    Truncation,
    TurnReturns,
    advantage_stats,
    normalize_advantages,
)
from realign.testing import random_batch

NONE = Normalization("none", "none")
GREEDY, DOUBLE = RewardShaping(baseline="greedy"), RewardShaping(gain=2.0)
PENALTY, CENTERED_SCORES = Truncation("add", -1.0), RewardShaping(scale="running", center=True)
GROUP = Normalization("group", "group")
GIVEN = {"responses": 4, "adv_norm": GROUP, "reward": RewardShaping(), "truncation": Truncation()}
"""Arguments of `AdvantageEstimator.check`."""


def rewards_of(data: SequenceSample, **more) -> Rewards:
    return Rewards.of(data, data["logprobs"] - data["ref_logprobs"], 0.1, **more)


def test_rewards_of_tokens_sum_to_the_reward_of_their_sequence():
    data = random_batch(1)
    rewards = rewards_of(data)
    total_S = segment_sum(rewards.per_token, data.cu_seqlens())
    trained_S = segment_sum(data["loss_mask"], data.cu_seqlens()) > 0
    known_S = trained_S & data["rewards"].isfinite()
    torch.testing.assert_close(total_S[known_S].double(), rewards.per_sequence[known_S].double(), rtol=1e-5, atol=1e-5)
    assert rewards.per_sequence[-1].isnan()  # a missing reward stays missing
    assert not rewards.per_token[~data["loss_mask"]].any()


def test_each_part_of_a_reward_counts():
    data = random_batch(1)
    mask_T, cu_seqlens = data["loss_mask"], data.cu_seqlens()
    bare = Rewards.of(data.select(["input_ids", "loss_mask", "rewards"])).per_sequence
    assert torch.equal(bare.nan_to_num(), data["rewards"].nan_to_num())
    dense = Rewards.of(data).per_sequence
    dense_S = segment_sum(torch.where(mask_T, data["dense_rewards"], 0), cu_seqlens)
    torch.testing.assert_close(dense - bare, torch.where(bare.isnan(), math.nan, dense_S), equal_nan=True)
    kl_S = segment_sum(torch.where(mask_T, data["logprobs"] - data["ref_logprobs"], 0), cu_seqlens)
    want_S = torch.where(bare.isnan(), math.nan, -0.1 * kl_S)
    torch.testing.assert_close(rewards_of(data).per_sequence - dense, want_S, equal_nan=True)
    assert torch.equal(Rewards.of(data).with_scores(torch.zeros_like(bare)).per_sequence, dense_S)


CU = torch.tensor([0, 2, 5], dtype=torch.int32)


def test_a_tensor_of_another_or_an_ambiguous_length_raises():
    with pytest.raises(ValueError, match=r"Own\.estimate returned shape \[3\]\. .*shape \[2\], .* shape \[5\]"):
        Estimate.of(torch.ones(3), CU, "Own")
    with pytest.raises(ValueError, match=r"shape \[2, 1\]"):
        Estimate.of(torch.ones(2, 1), CU, "Own")
    empty_and_long = torch.tensor([0, 0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"as many responses as tokens"):
        Estimate.of(torch.ones(2), empty_and_long, "Own")
    one_each = torch.tensor([0, 1, 2], dtype=torch.int32)
    # responses and tokens are then the same
    assert Estimate.of(torch.ones(2), one_each, "Own").advantages_S is not None


def two_groups() -> SequenceSample:
    data = SequenceSample.from_sequences(["a", "b"], {"input_ids": [[[1, 2], [1, 2, 3, 4]], [[1, 2]]]})
    mask_T = torch.tensor([False, True, False, True, True, True, False, True])
    return data.with_tokens(loss_mask=mask_T).with_sequences(rewards=torch.tensor([1.0, 0.0, 5.0]))


@pytest.mark.parametrize("norm", [NONE, GROUP, Normalization()], ids=str)
def test_advantages_of_responses_are_normalized_before_they_are_broadcast(norm):
    data = two_groups()
    valid_S = torch.tensor([True, True, False])
    found_T = normalize_advantages(Estimate(advantages_S=data["rewards"]), data, valid_S, norm, identity)
    want_S = norm(data["rewards"], torch.tensor([0, 0, 1]), valid_S, identity).tolist()
    assert found_T.tolist() == pytest.approx([0, want_S[0], 0, want_S[1], want_S[1], want_S[1], 0, 0])


def test_responses_of_small_groups_are_not_kept():
    data = two_groups()
    assert GroupRelative(2).keep(data).tolist() == [True, True, False]
    assert GroupRelative(1).keep(data).tolist() == [True, True, True]
    missing = data.with_sequences(rewards=torch.tensor([1.0, math.nan, 5.0]))
    assert GroupRelative(2).keep(missing).tolist() == [False] * 3
    assert GAE().keep(data) is None


@pytest.mark.parametrize(
    ("advantage", "settings", "text"),
    [
        (GroupRelative(), {"responses": 1}, r"generation\.n=1: adv_norm compares the responses"),
        (GroupRelative(5), {}, r"advantage\.min_group_size=5: must be at most generation\.n=4"),
        (GroupRelative(rescale_degenerate=True), {"adv_norm": NONE}, r"advantage\.rescale_degenerate=true"),
        (GroupRelative(), {"reward": GREEDY}, r"reward\.baseline=greedy: subtracts the same number"),
        (Gdpo(weights={"a": 1.0}), {"responses": 1, "adv_norm": NONE}, r"min_group_size=2: must be at most"),
        (Gdpo(1, {"a": 1.0}), {"responses": 1, "adv_norm": NONE}, r"n=1: advantage\.reward_norm compares"),
        (
            Gdpo(weights={"a": 1.0}),
            {"reward": DOUBLE},
            r"advantage=gdpo: normalizes each named reward",
        ),
        (Gdpo(weights={"a": 1.0}), {"truncation": PENALTY}, r"advantage=gdpo: normalizes each named reward"),
        (TurnReturns(), {"reward": DOUBLE}, r"advantage=turn_returns: takes the rewards of turns"),
        (Gdpo(weights={"a": 1.0}), {"reward": GREEDY, "adv_norm": NONE}, r"advantage=gdpo: normalizes each"),
        (MaxRL(), {}, r"adv_norm\.std=group: gives GRPO with advantage=max_rl"),
        (MaxRL(), {"reward": CENTERED_SCORES, "adv_norm": NONE}, r"reward\.center=true: makes rewards negative"),
        (MaxRL(), {"reward": GREEDY, "adv_norm": NONE}, r"reward\.baseline=greedy: makes rewards negative"),
        (GAE(reward_norm=GROUP), {"responses": 1}, r"generation\.n=1: advantage\.reward_norm compares"),
    ],
)
def test_settings_under_which_every_advantage_would_be_wrong_raise(advantage, settings, text):
    with pytest.raises(SettingsError, match=text):
        advantage.check(**(GIVEN | settings))
    advantage = GAE() if isinstance(advantage, GAE) else GroupRelative()
    advantage.check(**(GIVEN | {"adv_norm": NONE, "reward": GREEDY, "truncation": PENALTY}))


def test_bootstrapping_needs_the_values_of_the_critic():
    why = "advantage.bootstrap=true"
    assert GAE(bootstrap=True).needs() == {"bootstrap_values": why, "truncated": why}
    assert NStep(bootstrap=True).needs() == {"bootstrap_values": why, "truncated": why}
    assert GAE().needs() == GroupRelative().needs() == {}


def test_without_a_critic_all_values_are_0():
    data = random_batch(1)
    without = data.select(data.keys - {"values"})
    zeros = without.with_tokens(values=torch.zeros_like(data["values"]))
    credit, want = (GAE(0.9, 0.5).estimate(Rewards.of(x), x, identity) for x in (without, zeros))
    mask_T = data["loss_mask"] & credit.advantages_T.isfinite()  # the last response has no reward
    assert mask_T.any()
    assert torch.equal(credit.advantages_T[mask_T], want.advantages_T[mask_T])


def test_metrics_are_over_trained_tokens():
    data = two_groups().with_tokens(advantages=torch.tensor([99.0, 1, -99, 2, 3, -4, 99, 5]))
    assert stat_values(advantage_stats(data)) == {
        "advantage_mean": pytest.approx(7 / 5),
        "advantage_max": 5,
        "advantage_min": -4,
    }


def test_without_a_penalty_the_reward_of_a_response_is_its_score_at_the_last_trained_token():
    mask_T = torch.tensor([False, True, True, False])
    rewards = Rewards(torch.tensor([3.0]), mask_T, torch.tensor([0, 4], dtype=torch.int32))
    assert rewards.per_token.tolist() == [0.0, 0.0, 3.0, 0.0]
    assert rewards.per_sequence.tolist() == [3.0]


def three_groups(**named: list[float]) -> SequenceSample:
    """Return groups of 4, 3 and 1 responses of 1 to 3 tokens, with these rewards by name, whose sum is the reward."""
    lengths = [[2, 4, 3, 2], [3, 2, 2], [2]]
    ids = [[list(range(n)) for n in group] for group in lengths]
    data = SequenceSample.from_sequences(["a", "b", "c"], {"input_ids": ids})
    mask_T = torch.tensor([t > 0 for group in lengths for n in group for t in range(n)])
    columns = {f"rewards/{name}": torch.tensor(values, dtype=torch.float64) for name, values in named.items()}
    kl_T = torch.linspace(-0.4, 0.9, len(mask_T), dtype=torch.float64)
    data = data.with_tokens(loss_mask=mask_T, logprobs=kl_T, ref_logprobs=0 * kl_T)
    return data.with_sequences(rewards=sum(columns.values()), **columns)


CORRECT = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
FORMAT = [0.5, -0.5, 0.25, 0.5, 0.0, 1.0, 0.0, 0.7]
GROUPS = [range(0, 4), range(4, 7), range(7, 8)]


def normalized(values: dict[int, float], of: list[int]) -> dict[int, float]:
    """Return (x - mean) / population std over `of`, one number at a time; 0 if all are equal."""
    mean = sum(values[i] for i in of) / len(of)
    std = math.sqrt(sum((values[i] - mean) ** 2 for i in of) / len(of))
    return {i: (values[i] - mean) / std if std > 1e-9 else 0.0 for i in of}


def penalties(data: SequenceSample, coef: float) -> dict[int, float]:
    """Return minus the KL of each response, summed over its trained tokens, times `coef`."""
    rows = zip(data.sequences("logprobs"), data.sequences("loss_mask"), strict=True)
    return {
        i: -coef * sum(kl for kl, m in zip(x.tolist(), mask.tolist(), strict=True) if m)
        for i, (x, mask) in enumerate(rows)
    }


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("missing", [None, "one", "all"])
def test_gdpo_is_the_weighted_sum_of_rewards_each_normalized_in_its_group(kl_coef, missing):
    named = {"correct": list(CORRECT), "format": list(FORMAT)}
    data = three_groups(**named)
    if missing:  # of response 2; its total reward is missing too, or not
        lost = data["rewards/format"].clone()
        lost[2] = math.nan
        total = data["rewards"].nan_to_num() if missing == "one" else lost + data["rewards/correct"]
        data = data.with_sequences(**{"rewards/format": lost, "rewards": total})
    weights = {"correct": 2.0, "format": 0.5}
    rewards = Rewards.of(data, data["logprobs"], kl_coef)
    found_S = Gdpo(weights=weights, reward_norm=Normalization("group", "group", eps=0)).estimate(
        rewards, data, identity
    )
    cost = penalties(data, kl_coef)
    for group in GROUPS:
        here = [i for i in group if not (missing == "all" and i == 2)]
        want = {i: cost[i] - sum(cost[j] for j in here) / len(here) if len(here) > 1 else 0.0 for i in here}
        for name, weight in weights.items():
            has = [i for i in here if not (missing and name == "format" and i == 2)]
            for i, x in normalized(dict(enumerate(named[name])), has).items():
                want[i] += weight * x
        for i, x in want.items():
            assert found_S.advantages_S[i].item() == pytest.approx(x, abs=1e-12)
    assert found_S.advantages_S[7] == 0  # alone in its group


def test_gdpo_reads_the_rewards_that_its_weights_name_and_needs_one():
    assert Gdpo(weights={"a": 1.0}).needs() == {"rewards/a": "advantage.weights.a"}
    with pytest.raises(SettingsError, match=r"weights=\{\}: has no reward"):
        Gdpo()


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_max_rl_is_the_reward_relative_to_the_mean_of_its_group(kl_coef):
    data = three_groups(correct=[1.0, 0, 0, 1, 0, 0, 0, 1])
    found_S = MaxRL(1).estimate(Rewards.of(data, data["logprobs"], kl_coef), data, identity).advantages_S
    cost = penalties(data, kl_coef)
    for group, relative in zip(GROUPS, ([1, -1, -1, 1], [0, 0, 0], [1]), strict=True):  # the mean is 1/2, 0 and 1
        mean = sum(cost[i] for i in group) / len(group)
        for i, x in zip(group, relative, strict=True):
            penalty = cost[i] - mean if len(group) > 1 else 0.0
            assert found_S[i].item() == pytest.approx(x + penalty, abs=1e-12)


def test_a_negative_reward_stops_max_rl():
    data = three_groups(correct=[1.0, -1, 0, 1, 0, 0, 0, 1])
    with pytest.raises(RunError, match=r"advantage=max_rl: a reward is -1"):
        MaxRL().estimate(Rewards.of(data), data, identity)


def episodes(rewards: list[list[list[float]]], score: float = 0.0, kl: float = 0.0) -> SequenceSample:
    """Return episodes of each prompt with these rewards of turns; a turn has two tokens after an observation."""
    ids = [[[0] * (3 * len(turns) + 1) for turns in group] for group in rewards]
    index = [[[-1, *(x for k in range(len(turns)) for x in (-1, k, k))] for turns in group] for group in rewards]
    gains = [[[0.0, *(x for r in turns for x in (0.0, 0.0, r))] for turns in group] for group in rewards]
    data = SequenceSample.from_sequences(range(len(rewards)), {"input_ids": ids})
    data = data.with_tokens(turn_index=index, turn_rewards=gains)
    mask_T = data["turn_index"] >= 0
    data = data.with_tokens(
        loss_mask=mask_T, logprobs=torch.full(mask_T.shape, kl), ref_logprobs=torch.zeros(len(mask_T))
    )
    return data.with_sequences(rewards=torch.tensor([sum(turns) + score for group in rewards for turns in group]))


@pytest.mark.parametrize("compare", ["turn", "prompt"])
@pytest.mark.parametrize("coef", [0.0, 0.25])
def test_turn_returns_are_those_of_plain_sums_and_are_compared_turn_by_turn_or_all_together(compare, coef):
    rewards = [[[0.5, 0.0, 1.0], [0.25], [0.0, 2.0]], [[1.0, 1.0], [0.0, 3.0, -1.0, 0.5]]]
    score, gamma = 0.125, 0.5
    data = episodes(rewards, score, kl=1.0)
    estimator = TurnReturns(gamma=gamma, compare=compare)
    estimate = estimator.estimate(Rewards.of(data, data["logprobs"] - data["ref_logprobs"], coef), data, identity)
    norm = Normalization("group", "group", eps=0.0)
    found_T = normalize_advantages(estimate, data, torch.ones(5, dtype=torch.bool), norm, identity)
    returns = {}
    for prompt, group in enumerate(rewards):
        for episode, turns in enumerate(group):
            gains = [r - 2 * coef for r in turns]  # two tokens with a KL of 1
            gains[-1] += score  # belongs to no turn
            for k in range(len(gains)):
                returns[prompt, episode, k] = sum(gamma ** (j - k) * gains[j] for j in range(k, len(gains)))
    for found, (prompt, episode, k) in zip(found_T[data["loss_mask"]][::2].tolist(), returns, strict=True):
        others = [x for (p, _, j), x in returns.items() if p == prompt and (j == k or compare == "prompt")]
        mean = sum(others) / len(others)
        std = math.sqrt(sum((x - mean) ** 2 for x in others) / len(others))
        want = (returns[prompt, episode, k] - mean) / std if std > 1e-9 else 0.0
        assert found == pytest.approx(want, abs=1e-5)
    assert torch.equal(found_T[data["loss_mask"]][::2], found_T[data["loss_mask"]][1::2])  # both tokens of a turn
