"""The components compute what the actor classes of version 0.1 (`tests/frozen`) computed, over all their settings."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec
from realign.functional import KLEstimator as NewEstimator
from realign.interfaces import components as c
from realign.interfaces.decoupled_ppo import DecoupledPPOActorInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.testing import random_batch, train_once
from tests.frozen import functional as old_f
from tests.frozen.critic import ValueObjective as OldValue
from tests.frozen.decoupled_ppo import DecoupledPPOActorInterface as OldDecoupled
from tests.frozen.decoupled_ppo import Denominator
from tests.frozen.decoupled_ppo import RatioRange as OldRange
from tests.frozen.grpo import GRPOActorInterface as OldGRPO
from tests.frozen.ppo import EarlyStop, KLPenalty, KLPlace
from tests.frozen.ppo import PPOActorInterface as OldPPO
from tests.frozen.shaping import RewardScale, RewardShaping, TruncatedReward, Truncation

NEW = {OldPPO: PPOActorInterface, OldGRPO: GRPOActorInterface, OldDecoupled: DecoupledPPOActorInterface}
SCORED = ("input_ids", "loss_mask", "logprobs", "truncated", "rewards")
OPTIONAL = ("dense_rewards", "ref_logprobs", "prox_logprobs")
VALUES = ("values", "bootstrap_values")
TEXT = ("ptx_input_ids", "ptx_loss_mask")
RENAMED = {"behaviour": "behavior"}


def normalizations(level):
    return [
        {"adv_norm": old_f.Normalization(mean, std, leave_one_out=loo, level=level)}
        for mean, std, loo in itertools.product(old_f.Scope, old_f.Scope, (False, True))
        if not (loo and mean is old_f.Scope.none)
    ]


AGGREGATIONS = [{"aggregation": a} for a in old_f.Aggregation if a is not old_f.Aggregation.constant]
AGGREGATIONS.append({"aggregation": old_f.Aggregation.constant, "aggregation_constant": 8.0})
COMMON = [
    {},
    *AGGREGATIONS,
    *normalizations(old_f.Level.token),
    {"epochs": 2, "n_minibatches": 2},
    {"dual_clip": 3.0, "clip_low": 0.1, "clip_high": 0.3},
    {"entropy_coef": 0.1},
    *({"kl": KLPenalty(KLPlace.loss, 0.1, e)} for e in old_f.KLEstimator if e is not old_f.KLEstimator.k1),
    *({"kl": KLPenalty(KLPlace.reward, 0.1, e)} for e in old_f.KLEstimator),
    {"kl": KLPenalty(KLPlace.reward, 0.1, target=0.5, horizon=100)},
    *({"objective": objective} for objective in old_f.PolicyObjective),
    *({"objective": objective, "epochs": 3} for objective in old_f.PolicyObjective),
    *({"objective": o, "clip_low": None, "clip_high": 0.4} for o in map(old_f.PolicyObjective, ("cispo", "gmpo"))),
    {"reward": RewardShaping(bias=0.5, gain=2.0, clip=1.5, scale=RewardScale.running)},
    {"reward": RewardShaping(scale=RewardScale.ref, center=True)},
    {"truncation": Truncation(reward=TruncatedReward.zero)},
    {"truncation": Truncation(reward=TruncatedReward.add, penalty=-0.5)},
    {"truncation": Truncation(reward=TruncatedReward.set, penalty=-1.0)},
    {"truncation": Truncation(mask=True)},
    {"truncation": Truncation(overlong_buffer=3), "generation": GenerationConfig(n=4, max_new_tokens=8)},
    {"min_response_tokens": 2},
    {"keep_best": 1, "generation": GenerationConfig(n=4)},
    {"ptx_coef": 0.5, "n_minibatches": 2},
    {"early_stop": EarlyStop(kl=1e-6), "epochs": 2},
    {"early_stop": EarlyStop(ratio=5.0), "epochs": 2},
    {"credit_per_minibatch": True, "n_minibatches": 2},
]
GROUP = old_f.Normalization(old_f.Scope.group, old_f.Scope.none)
VALUE = OldValue(coef=0.1)
PPO_ONLY = [
    {"gamma": 0.9, "lam": 0.5},
    {"reward": RewardShaping(whiten=True)},
    {"reward_norm": GROUP, "generation": GenerationConfig(n=4)},
    {"truncation": Truncation(bootstrap=True)},
    {"value": VALUE, "epochs": 2},
    {"value": OldValue(clip=None, kind=old_f.ValueLoss.huber, huber_delta=0.5), "credit_per_minibatch": True},
    {"credit_per_minibatch": True, "n_minibatches": 2, "reward": RewardShaping(whiten=True), "value": VALUE},
]
LEVELS = list(old_f.ImportanceLevel)
CAPPED = OldRange(cap=1.1)
DECOUPLED = [
    {},
    {"epochs": 2, "n_minibatches": 2},
    *({"behaviour_weight": OldRange(level, 0.9, 1.1)} for level in LEVELS),
    *({"rejection": OldRange(level, 0.9, 1.1)} for level in LEVELS),
    {"rejection": CAPPED, "denominator": Denominator.all, "dual_clip": 3.0},
    {"rejection": CAPPED, "denominator": Denominator.all, "aggregation": old_f.Aggregation.seq_mean_token_mean},
    {"rejection": CAPPED, "entropy_coef": 0.1, "kl": KLPenalty(KLPlace.loss, 0.1, old_f.KLEstimator.k3)},
    {"rejection": CAPPED, "reward_norm": GROUP, "generation": GenerationConfig(n=4)},
    {"rejection": CAPPED, "value": VALUE, "credit_per_minibatch": True},
    {"rejection": CAPPED, "ptx_coef": 0.5, "n_minibatches": 2},
    *({"objective": o, "behaviour_weight": CAPPED, "epochs": 2} for o in old_f.PolicyObjective),
]
SETTINGS = {
    OldPPO: [*COMMON, *PPO_ONLY],
    OldGRPO: [*COMMON, *normalizations(old_f.Level.sequence), {"rescale_degenerate": True}],
    OldDecoupled: DECOUPLED,
}


def objective_of(old):
    clip = {"low": old.clip_low, "high": old.clip_high}
    dual = {"dual": old.dual_clip}
    makes = {
        "clip": lambda: c.Clip(**clip, **dual),
        "gspo": lambda: c.Gspo(**clip, **dual),
        "cispo": lambda: c.Cispo(**clip),
        "gmpo": lambda: c.Gmpo(**clip),
        "sapo": lambda: c.Sapo(old.tau_pos, old.tau_neg),
        "reinforce": c.Reinforce,
    }
    return makes[str(old.objective)]()


def fields_of(value, *without):
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.name not in without}


def norm_of(old):
    return c.Normalization(
        **{name: str(x) if name in ("mean", "std") else x for name, x in fields_of(old, "level").items()}
    )


def aggregation_of(old):
    classes = {
        "token_mean": c.TokenMean,
        "seq_mean_token_mean": c.SeqMeanTokenMean,
        "seq_mean_token_sum": c.SeqMeanTokenSum,
    }
    mode = str(old.aggregation)
    return c.Constant(old.aggregation_constant) if mode == "constant" else classes[mode]()


def translated(old):
    """The same settings in components."""
    names = [
        "generation",
        "epochs",
        "n_minibatches",
        "entropy_coef",
        "credit_per_minibatch",
        "min_response_tokens",
        "keep_best",
        "ptx_coef",
        "critic_warmup_steps",
    ]
    settings = {name: getattr(old, name) for name in names}
    kl = fields_of(old.kl)
    settings |= {
        "reward": c.RewardShaping(**{**fields_of(old.reward, "whiten"), "scale": str(old.reward.scale)}),
        "truncation": c.Truncation(**{**fields_of(old.truncation, "bootstrap"), "reward": str(old.truncation.reward)}),
        "kl": c.KLPenalty(**{**kl, "place": str(kl["place"]), "estimator": NewEstimator(kl["estimator"].value)}),
        "early_stop": c.EarlyStop(**fields_of(old.early_stop)),
        "objective": objective_of(old),
        "aggregation": aggregation_of(old),
        "adv_norm": norm_of(old.adv_norm),
    }
    if old.value is not None:
        value = {**fields_of(old.value), "kind": str(old.value.kind)}
        settings |= {"critic": "shared", "value": c.ValueObjective(**value)}
    if isinstance(old, OldGRPO):
        weighted = old.adv_norm.level is old_f.Level.token
        settings["advantage"] = c.GroupRelative(old.min_group_size, weighted, old.rescale_degenerate)
    else:
        settings["advantage"] = c.GAE(
            old.gamma, old.lam, norm_of(old.reward_norm), old.reward.whiten, old.truncation.bootstrap
        )
    if isinstance(old, OldDecoupled):
        weight, rejection = (
            c.RatioRange(**{**fields_of(r), "level": str(r.level)}) for r in (old.behaviour_weight, old.rejection)
        )
        kept = rejection if old.rejection.bounded else None
        settings["correction"] = c.ImportanceCorrection(weight, kept, old.denominator is Denominator.all)
    return NEW[type(old)](**settings)


def key_sets(cls, kwargs):
    """The keys that training reads: as few as the settings need, and all of them; also with advantages."""
    needs = [*SCORED]
    if "kl" in kwargs:
        needs.append("ref_logprobs")
    if cls is OldDecoupled:
        needs += ["prox_logprobs", "versions"]
    grouped = cls is OldGRPO
    truncation = kwargs.get("truncation")
    bootstrapped = truncation is not None and truncation.bootstrap
    needs += VALUES if "value" in kwargs or bootstrapped else ()
    needs += TEXT if "ptx_coef" in kwargs else ()
    yield tuple(dict.fromkeys(needs))
    full = [*needs, *OPTIONAL, *(() if grouped else VALUES)]
    yield tuple(dict.fromkeys(full))
    if not grouped and "value" not in kwargs and "credit_per_minibatch" not in kwargs:
        yield tuple(dict.fromkeys([*full, "advantages", "returns"]))


def cases():
    for cls, listed in SETTINGS.items():
        for kwargs in listed:
            for keys in key_sets(cls, kwargs):
                yield cls, kwargs, keys


def is_exact(cls, kwargs):
    """A correction, and KL in the reward of group advantages, multiply in another order."""
    kl = kwargs.get("kl")
    in_reward = kl is not None and kl.place is KLPlace.reward
    return cls is not OldDecoupled and not (cls is OldGRPO and in_reward)


def new_name(name):
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize(
    ("cls", "kwargs", "keys"),
    [pytest.param(*case, id=f"{case[0].__name__}-{i}") for i, case in enumerate(cases())],
)
def test_weights_and_metrics_are_those_of_the_old_classes(cls, kwargs, keys):
    data = random_batch(0).select(keys)
    old = cls(**kwargs)
    new = translated(old)
    exact = is_exact(cls, kwargs)
    rejecting = "denominator" in kwargs  # metrics then covered rejected tokens, and the mean was over all tokens
    for spec in (MicroBatchSpec(), MicroBatchSpec(n_microbatches=2)):
        a, b = train_once(old, data, spec), train_once(new, data, spec)
        for x, y in zip(a.parameters, b.parameters, strict=True):
            assert torch.equal(x, y) if exact else torch.allclose(x, y, rtol=1e-6, atol=1e-12)
        before = {new_name(name): value for name, value in a.metrics.items()}
        assert before.keys() == b.metrics.keys()
        for name, value in {} if rejecting else before.items():
            expected = value if exact else pytest.approx(value, rel=1e-6, abs=1e-12, nan_ok=True)
            assert b.metrics[name] == expected or (value != value and b.metrics[name] != b.metrics[name]), name


def test_the_comparison_covers_the_cases_of_the_sketch():
    assert 2 * len(list(cases())) >= 640
