"""Test that `keys` and `plan` of the interfaces agree with what their methods do. The runtime relies on both."""

from __future__ import annotations

import pytest

from realign.api import GenerationConfig, Keys, MicroBatchSpec, Model, ModelInterface, SequenceSample, stat_values
from realign.api.interface import METHODS
from realign.functional import DPOLoss
from realign.interfaces.components import Critic, ImportanceCorrection, KLPenalty, RatioRange, Truncation
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.decoupled_ppo import DecoupledPPOActorInterface
from realign.interfaces.dpo import DPOInterface
from realign.interfaces.environment import EnvironmentInterface
from realign.interfaces.greedy import GreedyInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ilql import ILQLInterface
from realign.interfaces.kto import KTOInterface, KTOReferenceInterface
from realign.interfaces.online_dpo import OnlineDPOInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.interfaces.raft import RAFTActorInterface
from realign.interfaces.reference import ReferenceInterface
from realign.interfaces.reward_model import RewardLoss, RewardModelInterface
from realign.interfaces.rft import RFTActorInterface
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.interfaces.sft import SFTInterface
from realign.testing import BigramEngine, random_batch, random_preferences

N, LIMIT = 4, 5
SAMPLER = GenerationConfig(n=N, max_new_tokens=LIMIT, fixed_length=True)
PROMPTS = SequenceSample.from_sequences("abc", {"prompt_ids": [[[1, 4]], [[2]], [[7, 7, 7]]]})

SAMPLING = [
    PPOActorInterface(SAMPLER),
    GRPOActorInterface(SAMPLER),
    RAFTActorInterface(generation=SAMPLER),
    RFTActorInterface(generation=SAMPLER),
    OnlineDPOInterface(generation=SAMPLER),
    GreedyInterface(SAMPLER),
]
SCORING = [
    PPOActorInterface(SAMPLER),
    PPOCriticInterface(),
    ReferenceInterface(),
    KTOReferenceInterface(),
    RewardModelInterface(),
    RewardModelInterface(dense=True),
]
OFF_POLICY = ImportanceCorrection(rejection=RatioRange(cap=1.1))
STEPS = {"epochs": 3, "n_minibatches": 2}
TRAINING = [
    PPOActorInterface(SAMPLER, **STEPS),
    PPOActorInterface(SAMPLER, recompute=True, kl=KLPenalty("loss"), truncation=Truncation("zero"), **STEPS),
    PPOActorInterface(SAMPLER, critic=Critic.shared, ptx_coef=1.0, **STEPS),
    GRPOActorInterface(SAMPLER, **STEPS),
    DecoupledPPOActorInterface(SAMPLER, correction=OFF_POLICY, **STEPS),
    PPOCriticInterface(**STEPS),
    RAFTActorInterface(generation=SAMPLER, **STEPS),
    RFTActorInterface(generation=SAMPLER, n_improve_steps=2, start_percentile=0.0, end_percentile=0.0, **STEPS),
    SFTInterface(n_minibatches=2),
    DPOInterface(n_minibatches=2),
    DPOInterface(kind=DPOLoss.ipo, n_minibatches=2),
    DPOInterface(reference_free=True, n_minibatches=2),
    ILQLInterface(**STEPS),
    KTOInterface(n_minibatches=2),
    OnlineDPOInterface(n_minibatches=2),
    *(RewardModelInterface(kind, n_minibatches=2) for kind in RewardLoss),
    RewardModelInterface(use_margin=True, n_minibatches=2),
]
WITH_LABELS = (DPOInterface, KTOInterface, RewardModelInterface)
OPTIONAL = {"RAFTActorInterface": {"prompt_mask"}, "PPOActorInterface": {"prox_logprobs", "truncated"}}
"""Keys without which a method runs with another result. The runtime checks that they are present."""


def name(interface: ModelInterface) -> str:
    return type(interface).__name__


def model() -> Model:
    return Model("role", BigramEngine(lr=0.01), seed=3)


def batch(interface: ModelInterface) -> SequenceSample:
    judged = isinstance(interface, WITH_LABELS) and not isinstance(interface, OnlineDPOInterface)
    return random_preferences(3) if judged else random_batch(3)


def call(interface: ModelInterface, method: str, data: SequenceSample):
    return getattr(interface, method)(model(), data, MicroBatchSpec())


@pytest.mark.parametrize("interface", SAMPLING, ids=name)
def test_generate_needs_prompts_and_returns_the_keys_it_declares(interface):
    keys = interface.keys("generate")
    assert dict(keys.needs) == {"prompt_ids": ""}
    assert call(interface, "generate", PROMPTS).keys == keys.writes


@pytest.mark.parametrize("interface", SAMPLING, ids=name)
def test_a_plan_states_how_many_responses_generate_returns_and_their_length(interface):
    out, plan = call(interface, "generate", PROMPTS), interface.plan()
    assert out.lengths["input_ids"].counts.tolist() == [plan.responses_per_prompt] * len(PROMPTS)
    assert {int((~mask).sum()) for mask in out.sequences("prompt_mask")} == {plan.longest_response} == {LIMIT}


@pytest.mark.parametrize("interface", SAMPLING[:-1], ids=name)
def test_a_plan_contains_the_sampling_settings_of_an_actor(interface):
    plan = interface.plan()
    assert plan.generation is interface.generation
    assert plan.sampler == interface.generation.describe()
    assert plan.exact_sampling


@pytest.mark.parametrize("cls", [RAFTActorInterface, RFTActorInterface])
@pytest.mark.parametrize("changed", [{"top_k": 3}, {"top_p": 0.5}, {"greedy": True, "n": 1}], ids=str)
def test_a_plan_says_that_distorted_sampling_is_not_exact(cls, changed):
    assert not cls(generation=GenerationConfig(**changed)).plan().exact_sampling


def test_greedy_sampling_is_never_exact():
    plan = GreedyInterface(SAMPLER).plan()
    assert (plan.sampler, plan.exact_sampling) == ("greedy", False)


@pytest.mark.parametrize("interface", SCORING, ids=name)
def test_inference_runs_with_the_keys_it_needs_and_returns_the_keys_it_declares(interface):
    keys = interface.keys("inference")
    assert call(interface, "inference", random_batch(3).select(keys.needs)).keys == keys.writes


@pytest.mark.parametrize("interface", TRAINING, ids=name)
def test_training_runs_with_the_keys_it_needs_and_takes_the_planned_optimizer_steps(interface):
    plan, data = interface.plan(), batch(interface)
    stats = stat_values(call(interface, "train_step", data.select(interface.keys("train_step").needs)))
    assert stats["optimizer_steps"] == plan.optimizer_steps > 1


@pytest.mark.parametrize(
    ("interface", "method"),
    [*((x, "inference") for x in SCORING), *((x, "train_step") for x in TRAINING)],
    ids=lambda x: x if isinstance(x, str) else name(x),
)
def test_a_method_fails_without_any_key_that_it_needs(interface, method):
    needs = set(interface.keys(method).needs)
    assert needs
    for key in sorted(needs - OPTIONAL.get(name(interface), set())):
        with pytest.raises((KeyError, ValueError), match=key):
            call(interface, method, batch(interface).select(needs - {key}))


@pytest.mark.parametrize(
    "interface",
    [
        SFTInterface(),
        DPOInterface(),
        ILQLInterface(),
        KTOInterface(),
        KTOReferenceInterface(),
        OnlineDPOInterface(),
        RewardModelInterface(use_margin=True, dense=True),
        PPOCriticInterface(),
        ReferenceInterface(),
        GreedyInterface(),
        RuleRewardInterface("module:function"),
        EnvironmentInterface("module:Class"),
    ],
    ids=name,
)
def test_an_interface_declares_no_keys_for_methods_that_it_does_not_implement(interface):
    found = {method: interface.keys(method) for method in METHODS}
    own = {m for m in METHODS if getattr(type(interface), m) is not getattr(ModelInterface, m)}
    assert {method for method, keys in found.items() if keys == Keys()} == set(METHODS) - own
