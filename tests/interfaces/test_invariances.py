"""Every algorithm that ships, found by looking, is blind to cut, order and masked slots; none can escape."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import pkgutil
from enum import Enum

import pytest
from realign.interfaces.shaping import RewardScale, RewardShaping, TruncatedReward, Truncation

import realign.interfaces
from realign.api import GenerationConfig, ModelInterface
from realign.api.interface import implements
from realign.functional import (
    Aggregation,
    DPOLoss,
    ImportanceLevel,
    KLEstimator,
    Level,
    Normalization,
    PolicyObjective,
    Scope,
    ValueLoss,
)
from realign.interfaces import ppo
from realign.interfaces.critic import ValueNormalization, ValueObjective, ValueScale
from realign.interfaces.decoupled_ppo import Denominator, RatioRange
from realign.interfaces.ppo import EarlyStop, KLPenalty, KLPlace
from realign.interfaces.reward_model import RewardLoss
from realign.testing import check_train_step, random_preferences

# Settings beyond the defaults under which an interface is checked, by class name; a subclass inherits its parent's.
NORMALIZATIONS = {
    level: [
        {"adv_norm": Normalization(mean, std, leave_one_out=loo, level=level)}
        for mean, std, loo in itertools.product(Scope, Scope, (False, True))
        if not (loo and mean is Scope.none)
    ]
    for level in Level
}
PPO_SETTINGS = [
    *NORMALIZATIONS[Level.token],
    {"epochs": 2, "n_minibatches": 2},
    {"dual_clip": 3.0, "clip_low": 0.1, "clip_high": 0.3},
    {"entropy_coef": 0.1},
    *({"kl": KLPenalty(KLPlace.loss, 0.1, e)} for e in KLEstimator if e is not KLEstimator.k1),
    *({"kl": KLPenalty(KLPlace.reward, 0.1, e)} for e in KLEstimator),
    {"kl": KLPenalty(KLPlace.reward, 0.1, target=0.5, horizon=100)},
    *({"objective": objective} for objective in PolicyObjective),
    *({"objective": o, "clip_low": None, "clip_high": 0.4} for o in (PolicyObjective.cispo, PolicyObjective.gmpo)),
    {"reward": RewardShaping(bias=0.5, gain=2.0, clip=1.5, scale=RewardScale.running)},
    {"reward": RewardShaping(scale=RewardScale.ref)},
    *(
        {"truncation": Truncation(reward=reward, penalty=penalty)}
        for reward, penalty in [
            (TruncatedReward.zero, None),
            (TruncatedReward.add, -0.5),
            (TruncatedReward.set, -1.0),
        ]
    ),
    {"truncation": Truncation(mask=True)},
    {"truncation": Truncation(overlong_buffer=3), "generation": GenerationConfig(n=4, max_new_tokens=8)},
    {"min_response_tokens": 2},
    {"keep_best": 1, "generation": GenerationConfig(n=4)},
    {"ptx_coef": 0.5, "n_minibatches": 2},
    {"early_stop": EarlyStop(kl=1e-6), "epochs": 2},
    {"early_stop": EarlyStop(ratio=5.0), "epochs": 2},
    {"credit_per_minibatch": True, "n_minibatches": 2},
]
GRPO_ONLY = NORMALIZATIONS[Level.sequence]
PPO_ONLY = [
    {"gamma": 0.9, "lam": 0.5},
    {"reward": RewardShaping(whiten=True)},
    {"reward_norm": Normalization(Scope.group, Scope.none), "generation": GenerationConfig(n=4)},
    {"truncation": Truncation(bootstrap=True)},
    {"value": ValueObjective(coef=0.1), "epochs": 2},
    {"value": ValueObjective(clip=None, kind=ValueLoss.huber, huber_delta=0.5), "credit_per_minibatch": True},
]
IN_GROUPS = Normalization(Scope.group, Scope.group)
SETTINGS: dict[str, list[dict]] = {
    "DecoupledPPOActorInterface": [
        {"epochs": 2, "n_minibatches": 2},
        *({"behaviour_weight": RatioRange(level, 0.9, 1.1)} for level in ImportanceLevel),
        *({"rejection": RatioRange(level, 0.9, 1.1)} for level in ImportanceLevel),
        {"rejection": RatioRange(cap=1.1), "denominator": Denominator.all, "dual_clip": 3.0},
        {"rejection": RatioRange(cap=1.1), "entropy_coef": 0.1, "kl": KLPenalty(KLPlace.loss, 0.1, KLEstimator.k3)},
        {
            "rejection": RatioRange(cap=1.1),
            "reward_norm": IN_GROUPS,
            "adv_norm": Normalization(Scope.none, Scope.none),
            "generation": GenerationConfig(n=4),
        },
        {"rejection": RatioRange(cap=1.1), "value": ValueObjective(coef=0.1), "credit_per_minibatch": True},
        {"rejection": RatioRange(cap=1.1), "ptx_coef": 0.5, "n_minibatches": 2},
        *({"objective": o, "behaviour_weight": RatioRange(cap=1.1)} for o in PolicyObjective),
    ],
    "DPOInterface": [
        {"n_minibatches": 2},
        {"kind": DPOLoss.ipo, "beta": 0.3},
        {"label_smoothing": 0.2, "temperature": 0.7},
        {"length_normalized": True, "sft_coef": 0.5},
    ],
    "GRPOActorInterface": [*PPO_SETTINGS, *GRPO_ONLY, {"rescale_degenerate": True}],
    "PPOActorInterface": [*PPO_SETTINGS, *PPO_ONLY],
    "PPOCriticInterface": [
        {"epochs": 2, "n_minibatches": 2},
        {"objective": ValueObjective(clip=None)},
        {"objective": ValueObjective(kind=ValueLoss.huber, huber_delta=0.5)},
        *({"normalization": ValueNormalization(scale)} for scale in ValueScale),
    ],
    "RAFTActorInterface": [
        {"epochs": 2, "n_minibatches": 2},
        {"keep_best": 2, "skip_equal_rewards": True},
        {"keep_best": None, "keep_share": 0.4, "min_reward": 0.5},
    ],
    "RFTActorInterface": [
        {"epochs": 2, "n_minibatches": 2},
        {"n_improve_steps": 2, "start_percentile": 0.0, "min_reward": 0.5},
    ],
    "RewardModelInterface": [
        {"n_minibatches": 2},
        {"use_margin": True, "per_prompt_weighting": True},
        {"from_divergence": True, "use_margin": True},
        *({"kind": kind} for kind in RewardLoss),
        {"kind": RewardLoss.scalar_rating, "per_prompt_weighting": True},
    ],
    "SFTInterface": [{"n_minibatches": 2}],
}


def modules():
    return [
        importlib.import_module(f"realign.interfaces.{m.name}")
        for m in pkgutil.iter_modules(realign.interfaces.__path__)
    ]


def trainers() -> list[type[ModelInterface]]:
    found = {
        cls
        for module in modules()
        for cls in vars(module).values()
        if inspect.isclass(cls)
        and issubclass(cls, ModelInterface)
        and cls is not ModelInterface
        and implements(cls, "train_step")
    }
    return sorted(found, key=lambda cls: cls.__name__)


def graphs(dataflow):
    """The graph without flags, with each value of each flag alone, and with all of them at their last value."""
    choices = {}
    for name, parameter in inspect.signature(dataflow).parameters.items():
        kind = type(parameter.default)
        assert kind is bool or issubclass(kind, Enum), f"flag {name} of {dataflow.__module__}: say what its values are"
        choices[name] = (False, True) if kind is bool else tuple(kind)
    alone = [{name: value} for name, values in choices.items() for value in values]
    together = [{name: values[-1 - back] for name, values in choices.items()} for back in (0, 1)]
    mixed = [{**together[0], name: value} for name, values in choices.items() if len(values) > 2 for value in values]
    for flags in ({}, *alone, together[0], *mixed):
        yield dataflow(**flags)


def input_sets(cls: type[ModelInterface]) -> list[tuple[str, ...]]:
    """What the train_step RPCs of the class's own file read, by the interface's names of the keys.

    The role's name stands in the class's name. The critic is wired by the graph of PPO.
    """
    dataflow = getattr(importlib.import_module(cls.__module__), "dataflow", ppo.dataflow)
    rpcs = [r for graph in graphs(dataflow) for r in graph.rpcs if r.method == "train_step"]
    mine = [r for r in rpcs if r.model in cls.__name__.lower()] or rpcs
    assert mine, f"{dataflow.__module__}.dataflow declares no train_step for {cls.__name__}"
    return sorted({tuple(interface_names(r)) for r in mine})


def interface_names(rpc):
    ours = {graph: interface for interface, graph in rpc.rename.items()}
    return (ours.get(key, key) for key in rpc.inputs)


def settings(cls: type[ModelInterface]) -> list[dict]:
    listed = next((SETTINGS[c.__name__] for c in cls.__mro__ if c.__name__ in SETTINGS), None)
    assert listed is not None, f"list settings for {cls.__name__} in tests/interfaces/test_invariances.py"
    aggregations = []
    if "aggregation" in {f.name for f in dataclasses.fields(cls)}:
        aggregations = [{"aggregation": a} for a in Aggregation if a is not Aggregation.constant]
        if "aggregation_constant" in {f.name for f in dataclasses.fields(cls)}:
            aggregations.append({"aggregation": Aggregation.constant, "aggregation_constant": 8.0})
    return [{}, *aggregations, *listed]


def cases():
    """The defaults on every set of inputs, and every setting on the richest ones: with credit assigned and without."""
    for cls in trainers():
        input_list = sorted(input_sets(cls), key=len)
        credited = [inputs for inputs in input_list if "advantages" in inputs]
        crediting = [inputs for inputs in input_list if "advantages" not in inputs]
        for kwargs in settings(cls):
            per_minibatch = kwargs.get("credit_per_minibatch")  # then no call of the graph may assign it
            richest = [*crediting[-1:], *([] if per_minibatch else credited[-1:])]
            for inputs in input_list if not kwargs else richest:
                yield cls, kwargs, inputs


@pytest.mark.parametrize(
    ("cls", "kwargs", "inputs"),
    [pytest.param(*case, id=f"{case[0].__name__}-{i}") for i, case in enumerate(cases())],
)
def test_trap_d13_every_interface_is_invariant(cls, kwargs, inputs):
    judged = "labels" in inputs
    check_train_step(cls(**kwargs), inputs, data=random_preferences() if judged else None, whole_groups=judged)


def test_every_file_declares_its_graph_and_its_train_steps_are_found():
    names = {cls.__name__ for cls in trainers()}
    assert {"SFTInterface", "PPOActorInterface", "GRPOActorInterface"} <= names
    assert {"DPOInterface", "RewardModelInterface"} <= names
    with_train = [m for m in modules() if hasattr(m, "dataflow")]
    assert {m.__name__.rsplit(".")[-1] for m in with_train} >= {"sft", "ppo", "grpo", "dpo", "reward_model"}
