"""Test checks of roles with incompatible weights, responses or learning rates."""

from __future__ import annotations

import re

import pytest

from realign.api import GenerationConfig
from realign.engines import Causal, OptimizerSpec, Schedule, SharedModel, TransformersModel, Value, ValueHead
from realign.errors import ConfigError
from realign.interfaces.components import KLPenalty, KLPlace, RewardShaping
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.greedy import GreedyInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.interfaces.reference import ReferenceInterface
from realign.runtime.checks.roles import check_roles
from tests.runtime.test_step import CountToken, experiment
from tests.tiny import save_tiny

GENERATION = GenerationConfig(n=2, max_new_tokens=4)
TRAINED = OptimizerSpec(lr=1e-3)
PENALIZED = PPOActorInterface(GENERATION, kl=KLPenalty(KLPlace.reward))


@pytest.mark.parametrize(
    ("interfaces", "models", "message"),
    [
        (
            {"actor": PENALIZED, "ref": ReferenceInterface()},
            {"ref": SharedModel("actor")},
            r"models\.ref\.branch=whole: ref needs frozen weights, but would change with models\.actor",
        ),
        (
            {"actor": PENALIZED, "ref": ReferenceInterface()},
            {"ref": SharedModel("actor", branch="reference")},
            r"models\.ref\.branch=reference: models\.actor trains all of its weights",
        ),
        (
            {
                "actor": PPOActorInterface(GENERATION, reward=RewardShaping(baseline="greedy")),
                "baseline": GreedyInterface(GENERATION),
            },
            {"baseline": TransformersModel("m")},
            r"models\.baseline\.path='m': .*this copy is never updated.*SharedModel, of: actor\}'",
        ),
        (
            {"critic": PPOCriticInterface(), "actor": PPOActorInterface(GENERATION, critic="shared")},
            {"critic": TransformersModel("m", head=Value())},
            r"models\.critic\.path='m': this model is not trained",
        ),
    ],
)
def test_roles_that_must_share_weights_do_and_a_reference_does_not(tmp_path, interfaces, models, message):
    actor = TransformersModel("m", optimizer=TRAINED, head=Causal(ValueHead() if "critic" in models else None))
    parts = {"reward": CountToken()} | interfaces
    made = experiment(tmp_path, interfaces=parts, models={"actor": actor, **models}, evaluation=None)
    with pytest.raises(ConfigError, match=message):
        check_roles(made)


@pytest.mark.parametrize(
    ("schedule", "settings", "warned"),
    [
        (Schedule("linear", total=3), {}, None),
        (
            Schedule("linear", total=3),
            {"n_minibatches": 2, "epochs": 2},
            "total=3: the run has up to 12 optimizer_steps, .*total=12",
        ),
        (Schedule("linear", total=3, unit="train_step"), {"n_minibatches": 2}, None),
        (Schedule("cosine", total=2, unit="train_step"), {}, "total=2: the run has up to 3 train_steps"),
        (Schedule("cosine", total=2, min_ratio=0.1), {}, None),
        (Schedule("constant"), {"n_minibatches": 2}, None),
    ],
)
def test_a_learning_rate_that_reaches_0_before_the_end_warns(tmp_path, recwarn, schedule, settings, warned):
    model = TransformersModel(str(save_tiny(tmp_path / "m")), optimizer=OptimizerSpec(schedule=schedule))
    parts = {"actor": PPOActorInterface(GENERATION, **settings), "reward": CountToken()}
    check_roles(experiment(tmp_path, interfaces=parts, models={"actor": model}, evaluation=None))
    messages = [str(w.message) for w in recwarn if "schedule.total" in str(w.message)]
    assert len(messages) == (warned is not None)
    assert not warned or re.search(warned, messages[0])
