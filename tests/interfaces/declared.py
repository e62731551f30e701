"""All interfaces and components of the package, and settings for each."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import pkgutil
from enum import Enum

import realign.interfaces
from realign.api import GenerationConfig, ModelInterface, rl_graph
from realign.api.interface import implements
from realign.functional import ImportanceLevel, KLEstimator, Scope
from realign.interfaces import components as c
from realign.interfaces.components.value_loss import ValueLoss
from realign.interfaces.critic import ValueNormalization, ValueScale
from realign.interfaces.dpo import DPOLoss
from realign.interfaces.policy import PolicyInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.interfaces.reward_model import RewardLoss, ScoreAt

NORMALIZATIONS = [
    {"adv_norm": c.Normalization(mean, std, leave_one_out=loo)}
    for mean, std, loo in itertools.product(Scope, Scope, (False, True))
    if not (loo and mean is Scope.none)
]
LIMITS = c.RatioRange(cap=1.1)
CENTERED = c.Normalization(Scope.group, Scope.none)
# Tested settings of each component class. A test fails if a class is missing here.
COMPONENTS: dict[type, list] = {
    c.Clip: [c.Clip(), c.Clip(0.1, 0.3, dual=3.0)],
    c.Gspo: [c.Gspo(), c.Gspo(0.1, 0.1, dual=1.5)],
    c.Cispo: [c.Cispo(), c.Cispo(0.2, 0.4)],
    c.Sapo: [c.Sapo(), c.Sapo(0.5, 2.0)],
    c.Dppo: [c.Dppo(), c.Dppo(0.01, 0.02, "kl")],
    c.Gmpo: [c.Gmpo(), c.Gmpo(None, 0.1)],
    c.Reinforce: [c.Reinforce()],
    c.ProximalKL: [c.ProximalKL(0.5), c.ProximalKL(target=0.01)],
    c.GAE: [c.GAE(), c.GAE(0.9, 0.5, reward_norm=CENTERED, whiten_rewards=True, bootstrap=True)],
    c.NStep: [c.NStep(0.9, 2, reward_norm=CENTERED, whiten_rewards=True, bootstrap=True)],
    c.GroupRelative: [c.GroupRelative(), c.GroupRelative(1, length_weighted=True, rescale_degenerate=True)],
    c.Gdpo: [c.Gdpo(weights={"a": 1.0}), c.Gdpo(1, {"a": 1.0, "b": -0.5}, CENTERED, length_weighted=True)],
    c.TurnReturns: [c.TurnReturns(), c.TurnReturns(1, 0.5, "prompt")],
    c.MaxRL: [c.MaxRL(), c.MaxRL(1)],
    c.TeacherKL: [c.TeacherKL(), c.TeacherKL(0.5, 0.9)],
    c.ForwardKL: [c.ForwardKL()],
    c.ReverseKL: [c.ReverseKL()],
    c.JSD: [c.JSD(), c.JSD(0.2)],
    c.ImportanceCorrection: [
        c.ImportanceCorrection(),
        *(c.ImportanceCorrection(c.RatioRange(level, 0.9, 1.1)) for level in ImportanceLevel),
        *(c.ImportanceCorrection(rejection=c.RatioRange(level, 0.9, 1.1)) for level in ImportanceLevel),
        c.ImportanceCorrection(LIMITS, LIMITS, keep_in_divisor=True),
    ],
    c.TokenMean: [c.TokenMean()],
    c.SeqMeanTokenMean: [c.SeqMeanTokenMean()],
    c.SeqMeanTokenSum: [c.SeqMeanTokenSum()],
    c.Constant: [c.Constant(8.0)],
}


GROUPS = GenerationConfig(n=4)
POLICY_SETTINGS: list[dict] = [
    *NORMALIZATIONS,
    {"adv_norm": c.Normalization(unbiased=True, eps=1e-2, eps_inside_sqrt=True)},
    {"epochs": 2, "n_minibatches": 2},
    {"entropy": c.EntropyBonus(0.1)},
    {"entropy": c.EntropyBonus(0.1, 2.0, 0.01, 0.105), "epochs": 2},
    *({"kl": c.KLPenalty("loss", 0.1, e)} for e in KLEstimator if e is not KLEstimator.k1),
    *({"kl": c.KLPenalty("reward", 0.1, e)} for e in KLEstimator),
    *({"kl": c.KLPenalty("loss", 0.1, e, importance_weighted=True)} for e in KLEstimator),
    {"kl": c.KLPenalty("loss", 0.1, full_vocabulary=True)},
    {"kl": c.KLPenalty("loss", 0.1, full_vocabulary=True, target=0.5, horizon=100)},
    {"kl": c.KLPenalty("reward", 0.1, target=0.5, horizon=100)},
    {"reward": c.RewardShaping(bias=0.5, gain=2.0, clip=1.5, scale="running")},
    {"reward": c.RewardShaping(scale="ref", center=True)},
    *(
        {"truncation": c.Truncation(reward, penalty)}
        for reward, penalty in [("zero", None), ("add", -0.5), ("set", -1.0)]
    ),
    {"truncation": c.Truncation(mask=True)},
    {
        "truncation": c.Truncation(overlong_buffer=3, overlong_penalty=0.5),
        "generation": GenerationConfig(n=4, max_new_tokens=8),
    },
    {"min_response_tokens": 2},
    {"train_end_token": False, "generation": GenerationConfig(n=4, stop_token_ids=[2, 5])},
    {"keep_best": 2, "generation": GROUPS},
    {"recompute": True},
    {"early_stop": c.EarlyStop(kl=1e-6), "epochs": 2},
    {"early_stop": c.EarlyStop(ratio=5.0), "epochs": 2},
    {"credit_per_minibatch": True, "n_minibatches": 2},
    {
        "correction": c.ImportanceCorrection(rejection=LIMITS),
        "entropy": c.EntropyBonus(0.1),
        "kl": c.KLPenalty("loss", 0.1),
    },
    {
        "correction": c.ImportanceCorrection(LIMITS, c.RatioRange("geometric", 0.9), keep_in_divisor=True),
        "kl": c.KLPenalty("loss", 0.1, importance_weighted=True, target=0.5, horizon=100),
        "epochs": 2,
        "n_minibatches": 2,
    },
]
PPO_SETTINGS: list[dict] = [
    *POLICY_SETTINGS,
    {"kl": c.KLPenalty("loss", 0.1, full_vocabulary=True, target=0.5, horizon=100), "ptx_coef": 0.5},
    {"ptx_coef": 0.5, "n_minibatches": 2},
    {"correction": c.ImportanceCorrection(rejection=LIMITS), "ptx_coef": 0.5, "n_minibatches": 2},
    {"reward": c.RewardShaping(baseline="greedy")},
    {"objective": c.ProximalKL(target=0.01), "epochs": 2, "n_minibatches": 2, "ptx_coef": 0.5},
    {"critic": "own"},
    {"critic": "shared", "value": c.ValueObjective(coef=0.1), "epochs": 2},
    {
        "critic": "shared",
        "value": c.ValueObjective(clip=None, kind=ValueLoss.huber, huber_delta=0.5),
        "credit_per_minibatch": True,
    },
    {"critic": "shared", "correction": c.ImportanceCorrection(rejection=LIMITS), "credit_per_minibatch": True},
]
# Tested settings of each interface besides the defaults, by class name. Subclasses inherit the settings of their
# parent.
SETTINGS: dict[str, list[dict]] = {
    "DecoupledPPOActorInterface": [{"epochs": 2, "n_minibatches": 2}, {"critic": "own"}, {"correction": None}],
    "DPOInterface": [
        {"n_minibatches": 2},
        {"kind": DPOLoss.ipo, "beta": 0.3},
        {"label_smoothing": 0.2, "temperature": 0.7},
        {"kind": DPOLoss.robust, "label_smoothing": 0.2, "target_margin": 0.5},
        {"kind": DPOLoss.odds_ratio, "reference_free": True, "length_normalized": True, "sft_coef": 1.0},
        {"length_normalized": True, "sft_coef": 0.5},
        {"reference_free": True, "length_normalized": True, "beta": 2.0, "target_margin": 1.0},
    ],
    "GKDInterface": [
        *({"divergence": d} for d in (c.ForwardKL(), c.ReverseKL(), c.JSD(), c.JSD(0.2))),
        {"epochs": 2, "n_minibatches": 2, "on_policy_fraction": 0.5},
        {"generation": GenerationConfig(temperature=0.7)},
    ],
    "GRPOActorInterface": POLICY_SETTINGS,
    "ILQLInterface": [
        {"epochs": 2, "n_minibatches": 2},
        {"gamma": 0.5, "tau": 0.9, "cql_coef": 0.5, "awac_coef": 0.3},
        {"awac_beta": 2.0, "awac_max_weight": 1.5},
    ],
    "KTOInterface": [
        {"n_minibatches": 2},
        {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.5, "temperature": 0.7},
    ],
    "OnlineDPOInterface": [
        {"n_minibatches": 2},
        {"kind": DPOLoss.ipo, "generation": GROUPS},
        {"reference_free": True, "target_margin": 0.5, "sft_coef": 0.5},
    ],
    "PPOActorInterface": PPO_SETTINGS,
    "PolicyInterface": [],  # its settings are tested in PPO and GRPO
    "PPOCriticInterface": [
        {"epochs": 2, "n_minibatches": 2},
        {"objective": c.ValueObjective(clip=None)},
        {"objective": c.ValueObjective(kind=ValueLoss.huber, huber_delta=0.5)},
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
        {"center_coef": 0.1},
        {"score_at": ScoreAt.before_end},
        {"score_at": ScoreAt.before_end, "stop_token_ids": [2, 5]},
        *({"kind": kind} for kind in RewardLoss),
        {"kind": RewardLoss.scalar_rating, "per_prompt_weighting": True},
    ],
    "SFTInterface": [{"n_minibatches": 2}],
}


def modules():
    packages = pkgutil.walk_packages(realign.interfaces.__path__, "realign.interfaces.")
    return [importlib.import_module(m.name) for m in packages]


def trainers() -> list[type[ModelInterface]]:
    classes = {
        cls
        for module in modules()
        for cls in vars(module).values()
        if inspect.isclass(cls)
        and issubclass(cls, ModelInterface)
        and cls is not ModelInterface
        and implements(cls, "train_step")
    }
    return sorted(classes, key=lambda cls: cls.__name__)


def graphs(dataflow):
    """Yield the graph without flags, and with each value of each single flag."""
    choices = {}
    for name, parameter in inspect.signature(dataflow).parameters.items():
        kind = type(parameter.default)
        assert kind is bool or issubclass(kind, Enum), f"flag {name} of {dataflow.__module__}: say what its values are"
        choices[name] = (False, True) if kind is bool else tuple(kind)
    for flags in ({}, *({name: value} for name, values in choices.items() for value in values)):
        yield dataflow(**flags)


def interface_names(rpc):
    ours = {graph: interface for interface, graph in rpc.rename.items()}
    return tuple(ours.get(key, key) for key in rpc.inputs)


def actor_inputs(interface: PolicyInterface) -> list[tuple[str, ...]]:
    """Return input sets of train_step: the keys its settings need, and all known keys, without and with advantages."""
    (train,) = (rpc for rpc in rl_graph({"actor": interface}).rpcs if rpc.name == "actor_train")
    known, uses = interface_names(train), interface.keys("train_step").uses
    least, credited = interface.keys("train_step").needs, {"advantages", "returns"}
    full = dict.fromkeys([*known, *least, *sorted(uses - credited)])
    keys = [tuple(least), tuple(full)]
    if not interface.credit_per_minibatch and interface.advantage.gives_returns:
        keys.append(tuple(dict.fromkeys([*full, *sorted(credited)])))
    return keys


def critic_inputs() -> list[tuple[str, ...]]:
    graph = rl_graph({"actor": PPOActorInterface(critic="own")})
    return [interface_names(rpc) for rpc in graph.rpcs if rpc.name == "critic_train"]


def input_sets(interface: ModelInterface) -> list[tuple[str, ...]]:
    """Return the input sets of the train_step RPCs in the class's own file, by the interface's names of the keys."""
    if isinstance(interface, PolicyInterface):
        return actor_inputs(interface)
    module = importlib.import_module(type(interface).__module__)
    if not hasattr(module, "dataflow"):
        return critic_inputs()
    if "interfaces" in inspect.signature(module.dataflow).parameters:
        built = [module.dataflow({"actor": interface, "reward": interface})]
    else:
        built = list(graphs(module.dataflow))
    sets = {interface_names(rpc) for graph in built for rpc in graph.rpcs if rpc.method == "train_step"}
    assert sets, f"{module.__name__}.dataflow declares no train_step for {type(interface).__name__}"
    return sorted(sets)


def settings(cls: type[ModelInterface]) -> list[dict]:
    listed = next((SETTINGS[k.__name__] for k in cls.__mro__ if k.__name__ in SETTINGS), None)
    assert listed is not None, f"list settings for {cls.__name__} in tests/interfaces/test_invariances.py"
    aggregations = []
    if "aggregation" in {f.name for f in dataclasses.fields(cls)}:
        aggregations = [{"aggregation": a} for kind in subclasses(c.Aggregation) for a in COMPONENTS[kind]]
    return [{}, *aggregations, *listed]


def cases():
    """Yield each class with its settings, for each set of inputs."""
    for cls in trainers():
        for kwargs in settings(cls):
            for inputs in input_sets(cls(**kwargs)):
                yield cls, kwargs, inputs


def subclasses(base: type) -> list[type]:
    """Return all concrete subclasses of `base` in the package."""
    classes = {base}
    while more := {sub for cls in classes for sub in cls.__subclasses__()} - classes:
        classes |= more
    ours = [cls for cls in classes if cls.__module__.startswith("realign.") and not inspect.isabstract(cls)]
    return sorted(ours, key=lambda cls: cls.__name__)
