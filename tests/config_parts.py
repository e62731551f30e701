"""Components for the tests of config and CLI, as a user would write them in a separate file, with an exact engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch

from realign.api import RPC, DataflowGraph, GenerationConfig, Model, ModelInterface, ModelSpec, Plan, SequenceSample
from realign.data import Dataset, DataSpec
from realign.errors import SettingsError
from realign.testing import BigramEngine

HERE = "tests.config_parts"


class Style(Enum):
    none = "none"
    batch = "batch"
    group = "group"


@dataclass
class Norm:
    mean: Style = Style.batch
    std: Style = Style.batch
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.eps <= 0:
            raise SettingsError(f"eps must be positive, found {self.eps}")


@dataclass(frozen=True)
class Frozen:
    depth: int = 1
    names: tuple[str, ...] = ("a",)


class Rule:
    """Abstract base class: fields of this type need a `_target_`."""


@dataclass
class Length(Rule):
    scale: float = 1.0


@dataclass
class Actor(ModelInterface):
    epochs: int = 1
    lr: float = 0.1
    on: bool = True
    label: str = "x"
    maybe: int | None = 3
    either: int | str = 1
    choice: Literal["low", "high"] = "low"
    folder: Path = Path("a")
    adv_norm: Norm = field(default_factory=lambda: Norm(mean=Style.group))
    frozen: Frozen = Frozen(depth=7)
    rule: Rule | None = None
    rules: list[Rule] = field(default_factory=list)
    betas: tuple[float, float] = (0.9, 0.99)
    weights: dict[str, float] = field(default_factory=dict)
    anything: Any = None
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    def generate(self, model, data, mb_spec):
        return model.engine.generate(data, self.generation, seed=model.call_seed("generate"))

    def train_step(self, model, data, mb_spec):
        return {}

    def describe(self, batch_prompts: int) -> dict[str, str]:
        return {"loss": "none"}

    def plan(self) -> Plan:
        g = self.generation
        return Plan(
            epochs=self.epochs,
            responses_per_prompt=g.n,
            longest_response=g.max_new_tokens,
            temperature=g.temperature,
            sampler=g.describe(),
            exact_sampling=not g.distortions(),
        )


class Forgotten(Actor):
    coef: float = 0.5


class Handmade(ModelInterface):
    def __init__(self, coef: float) -> None:
        self.coef = coef


@dataclass
class Needs(ModelInterface):
    coef: float


@dataclass
class CountThrees(ModelInterface):
    """Reward that counts the sampled tokens 3."""

    needs_engine: ClassVar[bool] = False
    temperature: float | None = None

    def plan(self) -> Plan:
        return Plan(temperature=self.temperature, temperature_setting="temperature")

    def inference(self, model, data, mb_spec):
        pairs = zip(data.sequences("input_ids"), data.sequences("prompt_mask"), strict=True)
        rewards = torch.tensor([float((ids[~given] == 3).sum()) for ids, given in pairs])
        return data.select(["input_ids"]).with_sequences(rewards=rewards).select(["rewards"])


class Digits:
    added_tokens_decoder = MappingProxyType({})

    def decode(self, ids, skip_special_tokens=True, **_):
        return " ".join(str(int(i)) for i in ids)

    def batch_decode(self, sequences, skip_special_tokens=True):
        return [self.decode(s) for s in sequences]


@dataclass
class Bigram(ModelSpec):
    lr: float = 0.5

    def load(self, name: str, *, seed: int) -> Model:
        return Model(name, BigramEngine(seed=seed, lr=self.lr), Digits(), seed)


@dataclass
class Prompts(DataSpec, Dataset):
    n: int = 8

    @property
    def keys(self):
        return ("prompt_ids", "row")

    def load(self, tokenizer: Any):
        return self

    def __len__(self) -> int:
        return self.n

    def sample(self, rows) -> SequenceSample:
        data = SequenceSample.from_sequences(
            [f"{row}@{epoch}" for epoch, row in rows], {"prompt_ids": [[[1, 2 + row % 5]] for _, row in rows]}
        )
        return data.with_metadata(row=[{"n": row} for _, row in rows])


def one_call(*, extra: bool = False, repeats: int = 1) -> DataflowGraph:
    if repeats < 1:
        raise SettingsError(f"repeats must be at least 1, found {repeats}")
    train = RPC("train", "actor", "train_step", ("input_ids", "extra") if extra else ("input_ids",))
    return DataflowGraph((train,), dataset_keys=("input_ids",))


def unannotated():
    raise AssertionError("must not be called")


def other_kind() -> int:
    raise AssertionError("must not be called")


EXPERIMENT = f"""\
# @package _global_
# A bigram model learns to say 3.
name: bigram
steps: 2
batch_prompts: 4
models:
  actor: {{_target_: {HERE}.Bigram}}
interfaces:
  actor:
    _target_: realign.interfaces.grpo.GRPOActorInterface
    generation: {{n: 4, max_new_tokens: 4, fixed_length: true}}
  reward: {{_target_: {HERE}.CountThrees}}
graph: {{_target_: realign.interfaces.grpo.dataflow}}
data: {{_target_: {HERE}.Prompts}}
"""


def write_experiment(folder: Path, name: str = "bigram", text: str = EXPERIMENT) -> Path:
    """Write a user's folder of experiments for `--config-dir`, and return it."""
    group = folder / "experiment"
    group.mkdir(parents=True, exist_ok=True)
    (group / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


GIVEN_REWARD = [
    "models.actor.path=m",
    "data.path=p.jsonl",
    "interfaces.reward.function=realign.rewards.arithmetic:exact_answer",
]
LEARNED_REWARD = ["models.actor.path=m", "models.reward.path=r", "data.path=p.jsonl"]
MUST_BE_GIVEN = {
    **dict.fromkeys(
        [
            "ppo",
            "deepspeed_chat",
            "openrlhf_ppo",
            "llama2_chat",
            "qwen_rlhf",
            "secrets_of_rlhf",
            "lm_human_preferences",
            "lm_human_preferences_cnndm",
            "lm_human_preferences_tldr",
        ],
        LEARNED_REWARD,
    ),
    **{
        f"lm_human_preferences_reward{task}": [
            "models.reward.path=m",
            "data.path=d.jsonl",
            "calibration.data.path=p.jsonl",
        ]
        for task in ("", "_cnndm", "_tldr")
    },
    **dict.fromkeys(
        ["trlx_ppo", "areal_decoupled", "areal_ppo", "online_dpo", "grpo", "raft", "remax"],
        GIVEN_REWARD,
    ),
    "instructgpt": [*LEARNED_REWARD[:2], "data.prompts.path=p.jsonl", "data.pretraining.path=t.jsonl"],
    "dpo": ["models.actor.path=m", "data.path=d.jsonl"],
    "ilql": ["models.actor.path=m", "data.path=d.jsonl"],
    "kto": ["models.actor.path=m", "data.path=d.jsonl"],
    "grpo_reasoning": ["models.actor.path=m", "data.path=p.jsonl", "evaluation.data.path=h.jsonl"],
    "grpo_agent": ["models.actor.path=m", "data.path=p.jsonl", "interfaces.agent.agent=mine.py:agent"],
    "gkd": ["models.actor.path=m", "models.teacher.path=t", "data.path=p.jsonl"],
    "self_distillation": ["models.actor.path=m", "data.path=p.jsonl"],
    "on_policy_distillation": ["models.actor.path=m", "models.teacher.path=t", "data.path=p.jsonl"],
    "grpo_environment": [
        "models.actor.path=m",
        "data.path=p.jsonl",
        "interfaces.agent.environment=mine.py:Mine",
    ],
    "reward_model": ["models.reward.path=m", "data.path=d.jsonl"],
    "sft": ["models.actor.path=m", "data.path=d.jsonl"],
}
"""Required values (`???`) of the templates for a user's models and data."""


PREFERENCE = ("cpo", "dpo_norm", "ipo", "orpo", "robust_dpo", "simpo")
"""Presets for actors that learn from pairs, as in experiment=dpo, tested in tests/interfaces/test_dpo.py."""


def bomb(levels: int) -> str:
    """Return a few lines that stand for 9^levels values."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"
