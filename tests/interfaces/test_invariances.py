"""Every algorithm that ships, found by looking, keeps the invariances of DESIGN section 4; none can escape."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import pkgutil

import pytest

import realign.interfaces
from realign.api import ModelInterface
from realign.api.model import implements
from realign.functional import Aggregation, DPOLoss, KLEstimator, Level, Normalization, Scope
from realign.interfaces.ppo import KLPenalty, KLPlace
from realign.interfaces.reward_model import RewardLoss
from realign.testing import check_train_step, random_preferences

# Settings beyond the defaults under which an interface is checked, by class name; a subclass inherits its parent's.
PPO_SETTINGS = [
    {"epochs": 2, "n_minibatches": 2},
    {"dual_clip": 3.0, "clip_low": 0.1, "clip_high": 0.3},
    {"entropy_coef": 0.1},
    *({"kl": KLPenalty(KLPlace.loss, 0.1, e)} for e in KLEstimator if e is not KLEstimator.k1),
    *({"kl": KLPenalty(KLPlace.reward, 0.1, e)} for e in KLEstimator),
    {"kl": KLPenalty(KLPlace.reward, 0.1, target=0.5, horizon=100)},
    *(
        {"adv_norm": Normalization(mean, std, leave_one_out=loo, level=level)}
        for mean, std, loo, level in itertools.product(Scope, Scope, (False, True), Level)
        if not (loo and mean is Scope.none)
    ),
]
SETTINGS: dict[str, list[dict]] = {
    "DPOInterface": [
        {"n_minibatches": 2},
        {"kind": DPOLoss.ipo, "beta": 0.3},
        {"label_smoothing": 0.2, "temperature": 0.7},
        {"length_normalized": True, "sft_coef": 0.5},
    ],
    "GRPOActorInterface": PPO_SETTINGS,
    "PPOActorInterface": [*PPO_SETTINGS, {"gamma": 0.9, "lam": 0.5}],
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


def graphs(module):
    flags = [name for name, p in inspect.signature(module.dataflow).parameters.items() if isinstance(p.default, bool)]
    for values in itertools.product((False, True), repeat=len(flags)):
        yield module.dataflow(**dict(zip(flags, values, strict=True)))


def input_sets(cls: type[ModelInterface]) -> list[tuple[str, ...]]:
    """What the train_step RPCs of the class's own file read; the role's name stands in the class's name."""
    module = importlib.import_module(cls.__module__)
    rpcs = [r for graph in graphs(module) for r in graph.rpcs if r.method == "train_step"]
    mine = [r for r in rpcs if r.model in cls.__name__.lower()] or rpcs
    assert mine, f"{cls.__module__}.dataflow declares no train_step for {cls.__name__}"
    return sorted({r.inputs for r in mine})


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
    """Every setting on the richest inputs that suit it, and the defaults on every set of inputs."""
    for cls in trainers():
        input_list = sorted(input_sets(cls), key=len)
        for kwargs in settings(cls):
            for inputs in input_list if not kwargs else input_list[-1:]:
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
