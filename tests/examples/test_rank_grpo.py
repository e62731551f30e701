"""Test the example of a custom advantage estimator: its ranks for given rewards, and the
invariances of a train step."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from realign.api import SequenceSample
from realign.functional import identity
from realign.interfaces.components import AdvantageEstimator, KLPenalty, Rewards
from realign.interfaces.grpo import GRPOActorInterface
from realign.testing import check_train_step

ROOT = Path(__file__).parents[2]


@pytest.fixture
def estimator(monkeypatch) -> AdvantageEstimator:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("examples.rank_grpo").RankRelative()


def test_ranks_are_between_minus_one_and_one_and_equal_rewards_share_one(estimator):
    data = SequenceSample.from_sequences(["a", "b"], {"input_ids": [[[1, 2]] * 4, [[3, 4]] * 2]})
    data = data.with_tokens(loss_mask=torch.tensor([False, True] * 6))
    data = data.with_sequences(rewards=torch.tensor([0.5, 100.0, 0.5, torch.nan, 7.0, 7.0]))
    ranks_S = estimator.estimate(Rewards.of(data), data, identity)
    assert ranks_S.tolist() == [-0.5, 1.0, -0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("kl", [KLPenalty(), KLPenalty("reward")], ids=["no KL", "KL in the reward"])
def test_a_train_step_keeps_the_invariances(estimator, kl):
    inputs = ["input_ids", "loss_mask", "logprobs", "rewards", "ref_logprobs"]
    check_train_step(GRPOActorInterface(advantage=estimator, kl=kl), inputs)
