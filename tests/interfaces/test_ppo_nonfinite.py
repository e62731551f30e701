"""Values of one response that are not finite do not reach other responses, under any advantage estimator."""

from __future__ import annotations

import math

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.errors import SettingsError
from realign.functional import Scope
from realign.interfaces.components import (
    GAE,
    AdvantageEstimator,
    EntropyBonus,
    KLPenalty,
    Normalization,
    RewardScale,
    RewardShaping,
)
from realign.interfaces.critic import PPOCriticInterface, ValueNormalization, ValueScale
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.testing import BigramEngine, random_batch, train_once
from realign.testing.batches import with_own_keys
from tests.grids import pairwise
from tests.interfaces.declared import COMPONENTS, subclasses

ACTORS = (PPOActorInterface, GRPOActorInterface)
ADVANTAGES = [x for kind in subclasses(AdvantageEstimator) for x in COMPONENTS[kind]]
CRITIC_TARGETS = [x for x in ADVANTAGES if x.gives_returns]
CENTERED = Normalization(Scope.group, Scope.none)
GROUPS = GenerationConfig(n=4)
CRITIC_KEYS = ["input_ids", "values", "returns", "loss_mask"]
VALUES = [math.nan, math.inf, -math.inf]
NONFINITE = pytest.mark.parametrize("value", VALUES)
SETTINGS = [
    {},
    {"adv_norm": Normalization(Scope.group, Scope.group)},
    {"adv_norm": Normalization(Scope.group, Scope.batch)},
    {"kl": KLPenalty("reward", 0.1), "n_minibatches": 2, "epochs": 2},
    {"kl": KLPenalty("loss", 0.1, importance_weighted=True), "entropy": EntropyBonus(0.1)},
    {"keep_best": 2},
    {"reward": RewardShaping(scale=RewardScale.running, center=True)},
    {"credit_per_minibatch": True, "n_minibatches": 2},
    {"min_response_tokens": 2},
]


def batch() -> SequenceSample:
    data = with_own_keys(random_batch(0), ["rewards/a", "rewards/b"], {})
    data = data.select(data.keys - {"advantages", "returns", "ptx_input_ids", "ptx_loss_mask", "baseline_rewards"})
    return data.with_sequences(rewards=data["rewards"].nan_to_num(0.5))


def victim(data: SequenceSample) -> int:
    """The first response with several trained tokens: it has siblings, and their advantages depend on its reward."""
    return next(s for s, mask in enumerate(data.sequences("loss_mask")) if int(mask.sum()) > 1)


def poisoned(data: SequenceSample, value: float) -> SequenceSample:
    """The batch with one dense reward of the victim's that is not finite."""
    s = victim(data)
    slot = int(data.cu_seqlens()[s]) + int(data.sequences("loss_mask")[s].nonzero()[0])
    return data.with_tokens(dense_rewards=data["dense_rewards"].index_fill(0, torch.tensor([slot]), value))


def without_reward(data: SequenceSample) -> SequenceSample:
    """The batch in which the victim has no reward."""
    return data.with_sequences(rewards=data["rewards"].index_fill(0, torch.tensor([victim(data)]), math.nan))


def assert_same_training(interface, data: SequenceSample, other: SequenceSample) -> None:
    trained, want = (train_once(interface, x, MicroBatchSpec()) for x in (data, other))
    for x, y in zip(trained.parameters, want.parameters, strict=True):
        assert torch.equal(x, y)
        assert x.isfinite().all()
    start = BigramEngine().parameters
    assert any(not torch.equal(x, y) for x, y in zip(trained.parameters, start, strict=True))
    assert trained.metrics == want.metrics
    assert all(math.isfinite(x) for x in trained.metrics.values())


def built(actor, advantage, settings):
    """Return the actor; None if the estimator refuses the settings."""
    try:
        return actor(**{"generation": GROUPS, "advantage": advantage, "adv_norm": CENTERED} | settings)
    except SettingsError:
        return None


CASES = [case for case in pairwise(ACTORS, ADVANTAGES, SETTINGS, VALUES) if built(*case.values[:3]) is not None]


def test_every_advantage_is_in_the_cases():
    assert {type(case.values[1]) for case in CASES} == {type(advantage) for advantage in ADVANTAGES}


@pytest.mark.parametrize(("actor", "advantage", "settings", "value"), CASES, ids=str)
def test_a_dense_reward_that_is_not_finite_excludes_its_response_and_no_other(actor, advantage, settings, value):
    interface, data = built(actor, advantage, settings), batch()
    if interface.reward.shapes_scores:  # dense rewards and shaped scores are not combined
        data = data.with_tokens(dense_rewards=torch.zeros_like(data["dense_rewards"]))
    assert_same_training(interface, poisoned(data, value), without_reward(data))


def credited(interface: PPOActorInterface, data: SequenceSample) -> SequenceSample:
    return interface.credit(Model("actor", BigramEngine()), data, MicroBatchSpec())


def with_credit(data: SequenceSample, credit: SequenceSample) -> SequenceSample:
    """The batch as the graph gives it to training after the call `actor_credit`."""
    return data.with_tokens(**{key: credit[key] for key in ("advantages", "returns", "loss_mask")})


@NONFINITE
@pytest.mark.parametrize("scale", ValueScale)
@pytest.mark.parametrize("advantage", CRITIC_TARGETS, ids=str)
def test_the_targets_of_a_separate_critic_are_finite_and_exclude_the_response(advantage, scale, value):
    actor, data = PPOActorInterface(generation=GROUPS, advantage=advantage, critic="own"), batch()
    credit, want = credited(actor, poisoned(data, value)), credited(actor, without_reward(data))
    for key in ("advantages", "returns", "loss_mask"):
        assert torch.equal(credit[key], want[key])
    assert credit["returns"].isfinite().all()
    assert not credit.sequences("loss_mask")[victim(data)].any()
    critic = PPOCriticInterface(normalization=ValueNormalization(scale))
    assert_same_training(critic, *(with_credit(data, x).select(CRITIC_KEYS) for x in (credit, want)))
    assert_same_training(actor, with_credit(poisoned(data, value), credit), with_credit(without_reward(data), want))


@NONFINITE
@pytest.mark.parametrize("critic", ["own", "shared"])
@pytest.mark.parametrize(
    "advantage", [GAE(bootstrap=True), GAE(0.9, 0.5, whiten_rewards=True, bootstrap=True)], ids=str
)
def test_a_finished_response_ignores_its_bootstrap_value(advantage, critic, value):
    interface, data = PPOActorInterface(advantage=advantage, critic=critic), batch()
    assert 0 < int(data["truncated"].sum()) < len(data["truncated"])
    spoilt = data.with_sequences(bootstrap_values=torch.where(data["truncated"], data["bootstrap_values"], value))
    credit, want = credited(interface, spoilt), credited(interface, data)
    for key in ("advantages", "returns", "loss_mask"):
        assert torch.equal(credit[key], want[key])
    assert credit["returns"].isfinite().all()
    if critic == "shared":
        assert_same_training(interface, spoilt, data)
