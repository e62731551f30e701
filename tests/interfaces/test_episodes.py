"""Test that episodes count once, into however many sequences an agent divides them."""

from __future__ import annotations

import math
from copy import deepcopy

import numpy as np
import pytest
import torch

from realign.api import GenerationConfig, Model, SequenceSample, stat_values
from realign.api.sample import EPISODE, with_response_index
from realign.functional import Scope
from realign.interfaces.components import (
    GAE,
    AdvantageEstimator,
    Gdpo,
    GroupRelative,
    KLPenalty,
    MaxRL,
    Normalization,
    NStep,
    RewardShaping,
    TeacherKL,
    TurnReturns,
)
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.runtime.evaluation.scores import group_values, sequence_stats
from realign.testing import BigramEngine
from tests.interfaces.declared import NORMALIZATIONS, subclasses

GROUPS = (4, 3, 5)
"""Number of episodes of each prompt."""
TOKENS = 6
"""Sampled tokens of each episode."""
EPISODES = sum(GROUPS)
WHOLE = (1,) * EPISODES


def batch(sequences=WHOLE, seed=0) -> SequenceSample:
    """Return episodes of equal tokens and rewards, each divided into this number of sequences after the prompt."""
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 3, EPISODES) / 2.0
    rewards[1] = math.nan
    keys = ("logprobs", "prox_logprobs", "ref_logprobs", "teacher_logprobs")
    nested = {key: [] for key in ("input_ids", "turn_index", "turn_rewards", *keys)}
    given_T, episode, of_sequence = [False] * 2, [], []
    masks, e = [], 0
    for size in GROUPS:
        for column in (*nested.values(), masks):
            column.append([])
        for number in range(size):
            ids, values = rng.integers(1, 9, TOKENS), {key: rng.normal(-2, 0.3, TOKENS) for key in keys}
            truncated = bool(rng.random() < 0.3)
            gains = rng.normal(0, 1, TOKENS) * (np.arange(TOKENS) % 2)  # three turns of two tokens
            for part in np.split(np.arange(TOKENS), sequences[e]):
                nested["turn_index"][-1].append(torch.tensor([-1, -1, *part // 2]))
                nested["turn_rewards"][-1].append(torch.tensor([0.0, 0.0, *gains[part]]))
                nested["input_ids"][-1].append(torch.tensor([1, 2, *ids[part]]))
                masks[-1].append(torch.tensor([*given_T, *[True] * len(part)]))
                for key in keys:
                    nested[key][-1].append(torch.tensor([0.0, 0.0, *values[key][part]]))
                last = part[-1] == TOKENS - 1
                of_sequence.append((rewards[e], truncated and last, len(part), 2 if math.isnan(rewards[e]) else 0))
                episode.append(number)
            e += 1
    nested |= {"loss_mask": masks, "prompt_mask": [[~x for x in group] for group in masks]}
    reward, truncated, turns, failure = zip(*of_sequence, strict=True)
    sample = SequenceSample.from_sequences(["a", "b", "c"], nested).with_sequences(
        rewards=torch.tensor(reward),
        truncated=torch.tensor(truncated),
        turns=torch.tensor(turns),
        failure=torch.tensor(failure),
        **{EPISODE: torch.tensor(episode), "rewards/own": torch.tensor(reward)},
    )
    return with_response_index(sample)


MODEL = Model("actor", BigramEngine())
ESTIMATORS = {
    GAE: GAE(lam=1.0, reward_norm=Normalization(Scope.group, Scope.batch)),
    NStep: NStep(n=TOKENS, reward_norm=Normalization(Scope.batch, Scope.none, leave_one_out=True)),
    GroupRelative: GroupRelative(min_group_size=3, rescale_degenerate=False),
    Gdpo: Gdpo(weights={"own": 2.0}, reward_norm=Normalization(Scope.group, Scope.group)),
    MaxRL: MaxRL(),
    TurnReturns: TurnReturns(gamma=0.5),
    TeacherKL: TeacherKL(),
}
"""Estimators with settings under which the credit of a token does not depend on the end of its sequence."""
FREE = GenerationConfig(n=5, max_new_tokens=8)
POLICIES = {
    **{
        f"{kind.__name__}, {norm['adv_norm'].describe()}": PPOActorInterface(
            advantage=ESTIMATORS[kind], generation=FREE, **norm
        )
        for kind in ESTIMATORS
        for norm in NORMALIZATIONS
        if not (kind is MaxRL and norm["adv_norm"].std is Scope.group)
    },
    "GPG": GRPOActorInterface(advantage=GroupRelative(rescale_degenerate=True)),
    "OPO": GRPOActorInterface(advantage=GroupRelative(length_weighted=True)),
    "KL in the reward": GRPOActorInterface(kl=KLPenalty("reward", 0.1)),
    "scaled": GRPOActorInterface(reward=RewardShaping(scale="running", center=True)),
    "best": GRPOActorInterface(keep_best=2),
    "unbiased": GRPOActorInterface(adv_norm=Normalization(Scope.group, Scope.group, unbiased=True)),
}


def test_every_estimator_is_in_the_table():
    assert set(ESTIMATORS) == set(subclasses(AdvantageEstimator))


def credited(policy, sequences, seed):
    """Return the advantages and the mask of the sampled tokens in their order, and the metrics of the batch."""
    policy = deepcopy(policy)  # which has running moments
    data = batch(sequences, seed)
    if not policy.advantage.needs_rewards:  # else it credits the last token of each sequence
        data = data.select(data.keys - {"rewards"})
    sampled_T = data["loss_mask"]
    data = policy.with_advantages(MODEL, data)
    stats = {k: x for k, x in stat_values(policy.batch_stats(MODEL, data)).items() if "per_sequence" not in k}
    return data["advantages"][sampled_T], data["loss_mask"][sampled_T], stats


@pytest.mark.parametrize("name", POLICIES)
def test_dividing_an_episode_changes_no_advantage_no_filter_and_no_metric(name):
    divided = np.random.default_rng(0).choice([1, 2, 3, 6], EPISODES).tolist()
    whole, divided = (credited(POLICIES[name], division, seed=0) for division in (WHOLE, divided))
    torch.testing.assert_close(divided[0], whole[0])
    assert torch.equal(divided[1], whole[1])
    assert divided[2] == pytest.approx(whole[2], abs=1e-6)


def test_two_episodes_of_one_and_three_sequences_are_a_group_of_two():
    """Rewards 1 and 0: the mean is 1/2, so the advantages are 1/2 and -1/2, and 1 and -1 without each one itself."""
    data = SequenceSample.from_sequences(["q"], {"input_ids": [[[1, 2]] * 4]})
    mask_T = torch.tensor([False, True] * 4)
    data = data.with_tokens(loss_mask=mask_T, prompt_mask=~mask_T, logprobs=torch.zeros(8))
    data = data.with_sequences(rewards=torch.tensor([1.0, 0, 0, 0]), **{EPISODE: torch.tensor([0, 1, 1, 1])})
    for norm, one, others in (
        (Normalization(Scope.group, Scope.none), 0.5, -0.5),
        (Normalization(Scope.group, Scope.none, leave_one_out=True), 1.0, -1.0),
        (Normalization(Scope.batch, Scope.batch, eps=0.0), 1.0, -1.0),
    ):
        advantages = GRPOActorInterface(adv_norm=norm).with_advantages(MODEL, data)["advantages"]
        assert advantages[mask_T].tolist() == [one, others, others, others]
    assert stat_values(sequence_stats(data))["reward"] == 0.5
    assert group_values(data, 2, [1, 2], 1.0) == {"mean@2": 0.5, "pass@1": 0.5, "pass@2": 1.0}
