"""Test that `keys` and `plan` of the interfaces agree with what their methods do. The runtime relies on both."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from realign.api import (
    GenerationConfig,
    Keys,
    MicroBatchSpec,
    Model,
    ModelInterface,
    Panel,
    SequenceSample,
    stat_values,
)
from realign.api.interface import METHODS, implements
from realign.api.router_experts import ROUTER_EXPERTS
from realign.api.sample import RESPONSE_INDEX
from realign.interfaces.components import GAE, Critic, ImportanceCorrection, KLPenalty, RatioRange, Truncation
from realign.interfaces.components.response_cut import ResponseCut
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.decoupled_ppo import DecoupledPPOActorInterface
from realign.interfaces.dpo import DPOInterface, DPOLoss
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
from realign.testing.batches import random_heads
from tests.interfaces.declared import modules, settings
from tests.tiny import tiny_tokenizer

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
    assert call(interface, "generate", PROMPTS).keys == keys.writes | {RESPONSE_INDEX}  # goes with `input_ids`


@pytest.mark.parametrize("interface", SAMPLING, ids=name)
def test_a_plan_states_how_many_responses_generate_returns_and_their_length(interface):
    out, plan = call(interface, "generate", PROMPTS), interface.plan()
    assert out.lengths["input_ids"].counts.tolist() == [plan.responses_per_prompt] * len(PROMPTS)
    assert {int((~mask).sum()) for mask in out.sequences("prompt_mask")} == {plan.longest_response} == {LIMIT}


@pytest.mark.parametrize("cls", [RAFTActorInterface, RFTActorInterface])
@pytest.mark.parametrize("changed", [{"top_k": 3}, {"top_p": 0.5}, {"greedy": True, "n": 1}], ids=str)
def test_a_plan_says_that_distorted_sampling_is_not_exact(cls, changed):
    assert not cls(generation=GenerationConfig(**changed)).plan().exact_sampling


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
    keys_of = {method: interface.keys(method) for method in METHODS}
    own = {m for m in METHODS if getattr(type(interface), m) is not getattr(ModelInterface, m)}
    assert {method for method, keys in keys_of.items() if keys == Keys()} == set(METHODS) - own


OWN = f"{__name__}:"
CUT = ResponseCut(token_ids=[7])
REPLAY = replace(SAMPLER, router_replay=True)
FURTHER: dict[str, list[dict[str, Any]]] = {
    "AgentInterface": [{"agent": f"{OWN}ask", "generation": SAMPLER, "max_sequence_tokens": 40}],
    "EnvironmentInterface": [{"environment": f"{OWN}Opening", "generation": SAMPLER, "max_episode_tokens": 40}],
    "GKDInterface": [{"on_policy_fraction": 0.5}],
    "PPOActorInterface": [{"generation": REPLAY}, {"generation": REPLAY, "critic": "shared", "advantage": GAE()}],
    "ReferenceInterface": [{"hidden_states": True}],
    "RewardModelInterface": [{"dense": True}, {"cut": CUT}],
    "RuleRewardInterface": [
        {"function": f"{OWN}length", "workers": 0},
        {"function": f"{OWN}lengths", "workers": 0, "dense": True},
        {"function": f"{OWN}length", "workers": 0, "cut": CUT},
    ],
}
"""Settings of methods other than train_step; those of train_step are in `SETTINGS`."""
NEEDS_FIELDS = {"AgentInterface", "EnvironmentInterface", "RuleRewardInterface"}
"""Interfaces without defaults."""
EXCEPTIONS = {
    ("AgentInterface", "generate"): {"prompt_ids"},  # an agent gets the row
    ("PPOActorInterface", "credit"): {"input_ids", "logprobs"},  # only lengths; only with KL in the reward or a teacher
    ("PPOActorInterface", "train_step"): {"rewards", "values", "returns"},  # with critic=own, advantages contain them
    ("RAFTActorInterface", "train_step"): {"prompt_mask"},  # the graph is that of RFT, which reads it
}
"""Keys of a declaration whose values do not matter in all settings."""


def tokenizer():
    made = tiny_tokenizer()
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return made


def length(prompt, response, row):
    return len(prompt) + 2.0 * len(response) + sum(map(ord, prompt + response)) / 1e3 + float(row["answer"])


def lengths(prompt, response, row, tokens):
    return [length(prompt, response, row)] * len(tokens)


class Opening:
    """An environment of one turn whose first observation is in the row."""

    def reset(self, row, *, seed):
        return row["answer"], {}

    def step(self, response):
        return "", 1.0, True, False, {}


async def ask(base_url, api_key, row):
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["answer"]}])
    return 1.0


class ReplayingEngine(BigramEngine):
    """A bigram table whose logits and values depend on the recorded experts, as those of a mixture of experts."""

    def output(self, mb):
        out = super().output(mb)
        if ROUTER_EXPERTS not in mb:
            return out
        scale = 1 + mb[ROUTER_EXPERTS].double().mean() / 10
        return replace(out, logits_VV=scale * out.logits_VV, values_V=scale * out.values_V)


def interfaces() -> list[type[ModelInterface]]:
    """Return all interfaces of the package."""
    classes = {x for module in modules() for x in vars(module).values() if inspect.isclass(x)}
    ours = {
        cls for cls in classes if issubclass(cls, ModelInterface) and cls.__module__.startswith("realign.interfaces.")
    }
    return sorted(ours, key=lambda cls: cls.__name__)


def declarations() -> Iterator[tuple[type[ModelInterface], dict[str, Any], str]]:
    """Yield settings for each declaration of needed keys: of each interface, of each method that it implements."""
    seen = set()
    for cls in interfaces():
        own = [] if cls.__name__ in NEEDS_FIELDS else settings(cls) if implements(cls, "train_step") else [{}]
        further = next((FURTHER[kind.__name__] for kind in cls.__mro__ if kind.__name__ in FURTHER), [])
        for kwargs, method in itertools.product(own + further, METHODS):
            if implements(cls, method) and (method != "credit" or kwargs.get("critic") == "own"):
                declared = cls, method, frozenset(cls(**kwargs).keys(method).needs.items())
                if declared not in seen:
                    seen.add(declared)
                    yield cls, kwargs, method


def full_batch(interface: ModelInterface, method: str) -> SequenceSample:
    """Return a batch with every key, without NaN."""
    if method == "generate":
        ids = {
            "prompt_ids": [[[5, 4]], [[6]], [[7, 7, 7]]],
            "data_input_ids": [[[1, 4, 5, 6]], [[2, 3]], [[7, 7, 7, 1]]],
        }
        data = SequenceSample.from_sequences("abc", ids)
        given = [[[True, True, False, False]], [[True, False]], [[True, True, True, False]]]
        masks = {"data_prompt_mask": given, "data_loss_mask": [[[not x for x in own] for own in one] for one in given]}
        return data.with_data(masks, like="data_input_ids").with_metadata(row=[{"answer": str(i)} for i in range(3)])
    data = batch(interface) if method == "train_step" else random_batch(3)
    generator = torch.Generator().manual_seed(0)
    experts = torch.randint(0, 4, (len(data["input_ids"]), 2), generator=generator, dtype=torch.int16)
    data = data.with_tokens(**{ROUTER_EXPERTS: experts})
    return data.with_sequences(rewards=data["rewards"].nan_to_num(0.5)) if "rewards" in data else data


def changed(data: SequenceSample, key: str) -> SequenceSample:
    """Return the batch with other values of a key."""
    if key in data.metadata:
        return data.with_metadata(**{key: [{"answer": str(int(row["answer"]) + 5)} for row in data.metadata[key]]})
    x, generator = data[key], torch.Generator().manual_seed(1)
    some = torch.rand(x.shape, generator=generator) < 0.5
    if x.dtype == torch.bool:
        other = x ^ some
    elif x.dtype.is_floating_point:
        other = 0.7 - x + torch.rand(x.shape, generator=generator, dtype=x.dtype)
    else:
        other = (x + some.to(x.dtype) + 1) % 11
    return data.with_data({key: other}, lengths=data.lengths[key])


def outcome(interface: ModelInterface, method: str, data: SequenceSample) -> Mapping[str, Any]:
    """Return what a method computes: the values of a sample, or the weights and the metrics of a train_step."""
    engine = ReplayingEngine(vocabulary=97 if method == "generate" else 11)
    engine.use_heads(random_heads())
    try:
        out = getattr(interface, method)(Model("actor", engine, tokenizer(), seed=3), data, MicroBatchSpec())
    finally:
        interface.close()
    if method == "train_step":
        weights = {f"weights {i}": x.tolist() for i, x in enumerate(engine.parameters)}
        return weights | {k: v for k, v in stat_values(out).items() if not math.isnan(v)}
    return {key: out[key].double().nan_to_num(-99.0).tolist() for key in out.data}


@pytest.mark.parametrize(
    ("cls", "kwargs", "method"),
    [pytest.param(*case, id=f"{case[0].__name__}-{case[2]}-{i}") for i, case in enumerate(declarations())],
)
def test_every_key_that_a_method_needs_changes_its_result(cls, kwargs, method):
    needs = cls(**kwargs).keys(method).needs
    data = full_batch(cls(**kwargs), method).select(needs)
    whole = outcome(cls(**kwargs), method, data)
    unread = {key for key in needs if outcome(cls(**kwargs), method, changed(data, key)) == whole}
    assert unread <= set().union(*(EXCEPTIONS.get((kind.__name__, method), set()) for kind in cls.__mro__))


def test_a_constant_declaration_is_a_class_attribute_and_a_method_of_a_user_overrides_it():
    class Constant(ModelInterface):
        KEYS: ClassVar = {"inference": Keys({"input_ids": ""})}
        OUTPUTS = frozenset({"scores"})
        HEADLINE = ("score",)
        PANELS = (Panel("score", {"score": "mean"}),)

    class Computed(Constant):
        def outputs(self):
            return super().outputs() | {"values"}

    plain, constant, computed = ModelInterface(), Constant(), Computed()
    assert (plain.keys("inference"), plain.outputs(), plain.headline(), plain.panels()) == (Keys(), frozenset(), (), ())
    assert (constant.keys("inference"), constant.keys("generate")) == (Keys({"input_ids": ""}), Keys())
    assert (constant.outputs(), constant.headline(), constant.panels()) == ({"scores"}, ("score",), Constant.PANELS)
    assert computed.outputs() == {"scores", "values"}
