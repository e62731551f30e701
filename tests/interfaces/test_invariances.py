"""Run the conformance kit on all shipped algorithms and components, which are found by introspection."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from realign.api import MicroBatchSpec
from realign.interfaces import components as c
from realign.interfaces.dpo import DPOInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ilql import ILQLInterface
from realign.interfaces.kto import KTOInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.interfaces.reward_model import RewardModelInterface
from realign.testing import BigramEngine, check_train_step, random_batch, random_preferences
from realign.testing.train_step import train_once
from tests.grids import each_once, pairwise
from tests.interfaces.declared import (
    CENTERED,
    COMPONENTS,
    GROUPS,
    LIMITS,
    PPO_SETTINGS,
    SETTINGS,
    actor_inputs,
    cases,
    modules,
    settings,
    subclasses,
    trainers,
)

BASES = {
    "advantage": c.AdvantageEstimator,
    "objective": c.Objective,
    "correction": c.Correction,
    "aggregation": c.Aggregation,
}


OBJECTIVES = [x for kind in subclasses(c.Objective) for x in COMPONENTS[kind]]
ADVANTAGES = [x for kind in subclasses(c.AdvantageEstimator) for x in COMPONENTS[kind]]
CORRECTIONS = [None, c.ImportanceCorrection(LIMITS, c.RatioRange("sequence", 0.5, 2.0))]


@pytest.mark.parametrize(
    "kwargs",
    [
        *({"objective": x} for x in OBJECTIVES),
        {"kl": c.KLPenalty("loss", 0.1)},
        {"entropy": c.EntropyBonus(0.1)},
        {"critic": "shared"},
        {"ptx_coef": 0.1},
    ],
    ids=str,
)
def test_tokens_without_an_advantage_have_a_gradient_only_from_another_term(kwargs):
    interface, data = PPOActorInterface(**kwargs), random_batch()
    data = data.with_tokens(**dict.fromkeys(("advantages", "returns"), torch.zeros(len(data["input_ids"]))))
    after = train_once(interface, data, MicroBatchSpec()).parameters
    moved = any(not torch.equal(x, y) for x, y in zip(BigramEngine(seed=0).parameters, after, strict=True))
    assert moved == interface.adds_to_objective()


def each_component():
    """Yield each component in each of its settings, for both actors."""
    for actor, (place, base) in itertools.product((PPOActorInterface, GRPOActorInterface), BASES.items()):
        for kind in subclasses(base):
            for component in COMPONENTS[kind]:
                common = {"generation": GROUPS, "kl": c.KLPenalty("loss", 0.1), "adv_norm": CENTERED}
                yield actor, {place: component, **common}


@pytest.mark.parametrize(
    ("cls", "kwargs", "inputs"),
    # Each setting with one of the classes that inherit it and one set of inputs; the defaults with all.
    each_once(cases(), shared=lambda cls, kwargs, inputs: str(kwargs) if kwargs else None),
)
def test_trap_d13_every_interface_is_invariant(cls, kwargs, inputs):
    judged = "labels" in inputs
    whole_groups = judged or issubclass(cls, DPOInterface)
    check_train_step(cls(**kwargs), inputs, data=random_preferences() if judged else None, whole_groups=whole_groups)


@pytest.mark.parametrize(
    "cls", [DPOInterface, ILQLInterface, KTOInterface, RewardModelInterface], ids=lambda cls: cls.__name__
)
def test_no_training_setting_of_an_offline_method_escapes(cls):
    # Not here: settings of inference, and the aggregation, which `settings` adds.
    others = {"clip", "cut", "dense"} if cls is RewardModelInterface else {"aggregation"}
    names = {f.name for f in dataclasses.fields(cls) if f.init} - others
    changed = {name for kwargs in SETTINGS[cls.__name__] for name in kwargs if kwargs[name] != _default(cls, name)}
    assert changed == names, f"no setting of {cls.__name__} in SETTINGS changes {sorted(names - changed)}"


@pytest.mark.parametrize(
    ("actor", "advantage", "objective", "correction"),
    pairwise((PPOActorInterface, GRPOActorInterface), ADVANTAGES, OBJECTIVES, CORRECTIONS),
    ids=lambda x: x.__name__ if isinstance(x, type) else type(x).__name__,
)
def test_any_advantage_works_with_any_objective_and_correction(actor, advantage, objective, correction):
    chosen = {"advantage": advantage, "objective": objective, "correction": correction}
    interface = actor(**chosen, generation=GROUPS, adv_norm=CENTERED)
    check_train_step(interface, actor_inputs(interface)[0])


@pytest.mark.parametrize(("actor", "chosen"), each_once(each_component(), shared=lambda actor, chosen: str(chosen)))
def test_every_component_is_invariant(actor, chosen):
    interface = actor(**chosen)
    check_train_step(interface, actor_inputs(interface)[1])


@pytest.mark.parametrize("base", [*BASES.values(), c.Divergence], ids=lambda base: base.__name__)
def test_no_component_of_the_package_escapes(base):
    assert modules()  # imports all modules, so that all subclasses are known
    classes = subclasses(base)
    assert classes
    for cls in classes:
        assert {type(x) for x in COMPONENTS.get(cls, [])} == {cls}, f"list settings for {cls.__name__} in COMPONENTS"
        fields = {f.name for f in dataclasses.fields(cls) if f.init}
        changed = {name for x in COMPONENTS[cls] for name in fields if getattr(x, name) != _default(cls, name)}
        assert changed == fields, f"no setting of {cls.__name__} in COMPONENTS changes {sorted(fields - changed)}"


@pytest.mark.parametrize("place", ["kl", "entropy", "reward", "truncation", "early_stop", "adv_norm", "value"])
def test_no_setting_of_a_fixed_component_of_ppo_escapes(place):
    """Components without variants, whose settings PPO_SETTINGS lists."""
    components = [kwargs[place] for kwargs in PPO_SETTINGS if place in kwargs]
    (cls,) = {type(x) for x in components}
    names = {f.name for f in dataclasses.fields(cls) if f.init}
    changed = {name for x in components for name in names if getattr(x, name) != _default(cls, name)}
    assert changed == names, f"no setting of {cls.__name__} in PPO_SETTINGS changes {sorted(names - changed)}"


@pytest.mark.parametrize("cls", trainers(), ids=lambda cls: cls.__name__)
def test_every_interface_has_rows_of_one_line_in_the_launch_table(cls):
    for kwargs in settings(cls):
        assert not any("\n" in row for row in cls(**kwargs).describe(4).values())


def _default(cls, name):
    field = next(f for f in dataclasses.fields(cls) if f.name == name)
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
