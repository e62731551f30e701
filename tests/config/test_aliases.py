"""Test the names of other tools: each key exists, and each name is replaced or explained."""

from __future__ import annotations

import dataclasses

import pytest

from realign.config.aliases import ALIASES, translate
from realign.config.errors import ConfigError
from realign.config.folders import GROUPS
from realign.config.help import section
from realign.config.schema import ExperimentConfig

ROLES = {"interfaces": "actor", "models": "actor"}
GRPO = "experiment=grpo"


def example(pattern: str) -> str:
    root, _, rest = pattern.partition(".*")
    return pattern if not rest else f"{root}.{ROLES[root]}{rest}"


def test_no_name_of_another_tool_is_a_key():
    assert not ALIASES.keys() & {field.name for field in dataclasses.fields(ExperimentConfig)}
    assert not ALIASES.keys() & set(GROUPS)


@pytest.mark.parametrize("key", sorted({key for alias in ALIASES.values() for key in alias.keys}))
def test_every_key_of_the_table_exists(key):
    experiment = "experiment=dpo" if key == "interfaces.*.beta" else "experiment=grpo_arithmetic"
    assert section(example(key), [experiment]).key == example(key)


def test_every_name_has_keys_or_an_answer_that_names_existing_keys():
    for alias in ALIASES.values():
        assert bool(alias.keys) != bool(alias.answer)
        for word in alias.answer.replace(",", " ").replace(":", " ").split():
            if "." in word.rstrip(".") and word[0].islower():
                assert section(word.rstrip("."), [GRPO]).key == word.rstrip(".")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([GRPO, "lr=1e-5"], "models.actor.optimizer.lr=1e-5"),
        ([GRPO, "learning_rate=1e-5,1e-6"], "models.actor.optimizer.lr=1e-5,1e-6"),
        ([GRPO, "seed=0,1", "lr=1e-5"], "models.actor.optimizer.lr=1e-5"),
        ([GRPO, "max_steps=5"], "steps=5"),
        ([GRPO, "max_new_tokens=9"], "interfaces.actor.generation.max_new_tokens=9"),
        ([GRPO, "num_generations=4"], "interfaces.actor.generation.n=4"),
        ([GRPO, "kl_coef=0.1"], "interfaces.actor.kl.coef=0.1"),
        (["experiment=dpo", "beta=0.1"], "interfaces.actor.beta=0.1"),
        ([GRPO, "model=org/name"], "models.actor.path=org/name"),
        ([GRPO, "dataset=x.jsonl"], "data.path=x.jsonl"),
        ([GRPO, "eval.every_steps=5"], "evaluation.every_steps=5"),
        ([GRPO, "+ppo_epochs=2"], "+interfaces.actor.epochs=2"),
    ],
)
def test_a_name_with_one_key_is_replaced_with_a_note(words, expected):
    found, notes = translate(words)
    given = next(word for word, new in zip(words, found, strict=True) if word != new)
    assert expected in found
    assert notes == [f"{given} was read as {expected}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([GRPO, "epochs=3"], "epochs: realign counts training in steps: set steps to epochs x rows / batch_prompts"),
        ([GRPO, "batch_size=3"], "batch_size: set batch_prompts, the number of prompts per step"),
        ([GRPO, "report_to=wandb"], "set `trackers.wandb._target_=realign.runtime.WandB"),
        ([GRPO, "use_peft=true"], "use_peft: for adapters, set `models.actor.trains=lora`"),
        ([GRPO, "reward_funcs=x"], "interfaces.reward.functions for several with weights"),
        ([GRPO, "gradient_accumulation_steps=3"], "Lower it to save memory; the result does not change"),
        (
            ["experiment=ppo", "lr=1"],
            "lr may mean models.actor.optimizer.lr or models.critic.optimizer.lr. Set the one",
        ),
        (["experiment=grpo_arithmetic", "max_new_tokens=9"], "or evaluation.generation.max_new_tokens. Set the one"),
        (["experiment=grpo_arithmetic", "beta=0.1"], "no effect with interfaces.actor.kl.place=none. Set"),
        (["experiment=sft", "kl_coef=0.1"], "kl_coef: no role of this experiment has the key interfaces.*.kl.coef"),
    ],
)
def test_other_names_are_errors_that_name_the_keys(words, message):
    with pytest.raises(ConfigError) as caught:
        translate(words)
    assert message in str(caught.value)


def test_keys_of_realign_stay_as_they_are():
    words = [GRPO, "steps=5", "models.actor.optimizer.lr=1", "~data.limit", "experiment=x"]
    assert translate(words) == (words, [])
