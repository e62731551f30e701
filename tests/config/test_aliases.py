"""Test the names of other tools: each key exists, and each name is replaced or explained."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest

from realign.cli import commands as cli
from realign.cli.arguments import with_overrides_for_flags
from realign.config import composition
from realign.config.aliases import describe, index, tables, translate
from realign.config.errors import ConfigError
from realign.config.experiment import ExperimentConfig
from realign.config.files import GROUPS
from realign.config.help import section
from tests.docs.pages import blocks

GRPO = "experiment=grpo"
PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("migration.md", "concepts/from-realhf.md")]
ROWS = [row for table in tables().values() for row in table["rows"]]
OWN = {field.name for field in dataclasses.fields(ExperimentConfig)}
CONFIGS = [
    [GRPO],
    ["experiment=grpo_arithmetic"],
    ["experiment=ppo"],
    ["experiment=dpo"],
    ["experiment=kto"],
    ["experiment=sft"],
    ["experiment=reward_model"],
    ["experiment=areal_decoupled"],
    [GRPO, "algorithm=sapo"],
    [GRPO, "interfaces.actor.advantage=gae"],
    [GRPO, "interfaces.actor.aggregation=constant", "interfaces.actor.correction.rejection={}"],
    [GRPO, "models.actor.trains=lora", "models.actor.sampler=vllm"],
    [GRPO, "+models.ref={path: m}", "runtime=ray", "+evaluation.generation={}"],
    [GRPO, "interfaces.actor.advantage.reward_norm={}", "interfaces.actor.advantage=gae"],
]
"""Configs that together have all keys that the table names."""
COMPOSE = composition.compose_layers


@pytest.fixture(autouse=True)
def _compose_once(monkeypatch):
    monkeypatch.setattr(composition, "compose_layers", lambda words, *_: compose_once(tuple(words)))


@cache
def compose_once(words: tuple[str, ...]) -> composition.Composed:
    return COMPOSE(list(words))


def exists(key: str) -> bool:
    """Return whether a key exists in one of `CONFIGS`."""
    for words in CONFIGS:
        try:
            return section(key, words).key == key
        except ConfigError:
            continue
    return False


def keys_in(text: str) -> set[str]:
    """Return the config keys that a text names in code font."""
    words = [word.partition("=")[0].lstrip("+") for code in re.findall(r"`([^`]+)`", text) for word in code.split()]
    return {word for word in words if "." in word and word.partition(".")[0] in OWN and "ROLE" not in word}


def test_no_name_of_another_tool_is_a_key():
    flat = {name for name in index() if "." not in name}
    assert not flat & OWN
    assert not flat & set(GROUPS)


def test_every_row_has_keys_or_overrides_or_an_answer():
    for row in ROWS:
        assert (bool(row.keys) + bool(row.overrides) + bool(row.answer)) == 1, row
        assert not row.overrides or all("=" in name for name in row.names), row
        assert row.text()[-1] != " "


def test_every_key_of_the_table_exists():
    named = set().union(*(keys_in(row.text()) for row in ROWS)) - {"trackers.wandb", "trackers.tb"}
    named -= {"trackers.wandb.project", "sync.ref"}  # the user names them
    assert [key for key in sorted(named) if not exists(key)] == []


def test_every_name_is_understood_or_answered_on_the_command_line():
    """A name is replaced in one of these experiments, or the error begins with it and says what to set."""
    experiments = [[name] for name in (GRPO, "experiment=ppo", "experiment=dpo", "experiment=kto", "experiment=sft")]
    experiments += [["experiment=reward_model"], ["experiment=grpo_arithmetic", "interfaces.actor.kl.place=reward"]]
    for name, entries in index().items():
        for value, row in entries:
            if not row.typed:
                continue
            word = f"{name}={'1' if value is None else value}"
            if row.answer:
                answer = outcome([GRPO], word)
                assert answer.startswith(f"error: {name}"), answer
                assert "unknown key" not in answer
            else:
                outcomes = (outcome(words, word) for words in experiments)
                assert any(not answer.startswith("error") for answer in outcomes), word


def outcome(words: list[str], word: str) -> str:
    """Return what a word is read as, or the message about it."""
    try:
        translated, notes, _ = translate([*words, word])
    except ConfigError as error:
        return f"error: {error}"
    assert len(notes) == 1, word
    return " ".join(translated[len(words) :])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_name_of_the_pages_is_in_the_table(page):
    """The tables are generated; this covers the commands of other tools, and names in the running text."""
    text = page.read_text(encoding="utf-8")
    typed = []
    for block in blocks(text):
        if block.language == "text" and "$ realign" not in block.code:
            words = block.code.replace("\\\n", " ").split()
            typed += [word for word in with_overrides_for_flags(words) if "=" in word or word.startswith("--")]
    own = {"--config"}
    assert [word for word in typed if word.partition("=")[0].partition(" ")[0] not in own and not known(word)] == []
    assert typed or page.stem == "from-realhf"


def known(word: str) -> bool:
    name = word.partition("=")[0].lstrip("-+")
    return bool(describe(name)) or name.partition(".")[0] in OWN


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("num_generations", "interfaces.actor.generation.n"),
        ("kl_loss_coef", "actor_rollout_ref.actor.kl_loss_coef (verl): interfaces.actor.kl.coef"),
        ("group_adv_norm", "interfaces.actor.adv_norm.mean=group"),
        ("lr", "models.actor.optimizer.lr"),
        ("kl", "interfaces.actor.kl"),
        ("adv_norm", "interfaces.actor.adv_norm"),
        ("trainer", "trainer.total_training_steps (verl): steps"),
        ("max-steps", "max_steps (TRL): steps"),
        ("MFCDef", "MFCDef (realhf): RPC"),
    ],
)
def test_help_finds_a_name_of_another_tool(name, text, capsys):
    assert cli.main(["help", name]) == 0
    assert text in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([GRPO, "lr=1e-5"], "models.actor.optimizer.lr=1e-5"),
        ([GRPO, "learning_rate=1e-5,1e-6"], "models.actor.optimizer.lr=1e-5,1e-6"),
        ([GRPO, "seed=0,1", "lr=1e-5"], "models.actor.optimizer.lr=1e-5"),
        ([GRPO, "max_steps=5"], "steps=5"),
        ([GRPO, "max_new_tokens=9"], "interfaces.actor.generation.max_new_tokens=9"),
        ([GRPO, "num_generations=4"], "interfaces.actor.generation.n=4"),
        ([GRPO, "interfaces.actor.generation.num_generations=4"], "interfaces.actor.generation.n=4"),
        ([GRPO, "kl_coef=0.1"], "interfaces.actor.kl.coef=0.1"),
        (["experiment=dpo", "beta=0.1"], "interfaces.actor.beta=0.1"),
        ([GRPO, "model=org/name"], "models.actor.path=org/name"),
        ([GRPO, "dataset=x.jsonl"], "data.path=x.jsonl"),
        ([GRPO, "eval.every_steps=5"], "evaluation.every_steps=5"),
        ([GRPO, "+ppo_epochs=2"], "+interfaces.actor.epochs=2"),
        ([GRPO, "actor_rollout_ref.actor.kl_loss_coef=0.01"], "interfaces.actor.kl.coef=0.01"),
        ([GRPO, "data.train_files=x.parquet"], "data.path=x.parquet"),
        ([GRPO, "algorithm.norm_adv_by_std_in_grpo=False"], "interfaces.actor.adv_norm.std=none"),
        ([GRPO, "kl_loss_coef=0.01"], "interfaces.actor.kl.coef=0.01"),
        (["experiment=ppo", "ppo.kl_ctl=0.1"], "interfaces.actor.kl.coef=0.1"),
        (["experiment=areal_ppo", "lr=1e-5"], "models.actor.optimizer.lr=1e-5"),
        (["experiment=grpo_agent", "num_generations=4"], "interfaces.actor.generation.n=4"),
        ([GRPO, "beta=0.0"], "interfaces.actor.kl.coef=0.0"),
        ([GRPO, "trainer.total_training_steps=7"], "steps=7"),
    ],
)
def test_a_name_with_one_key_is_replaced_with_a_note(words, expected):
    translated, notes, _ = translate(words)
    given = next(word for word, new in zip(words, translated, strict=True) if word != new)
    assert expected in translated
    assert notes == [f"{given} was read as {expected}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([GRPO, "epochs=3"], "epochs: realign counts training in steps: set steps to epochs x rows / batch_prompts"),
        ([GRPO, "batch_size=3"], "batch_size: set batch_prompts, the number of prompts per step"),
        (
            [GRPO, "report_to=wandb"],
            "report_to (TRL): every run writes metrics.jsonl. Trackers are components: set trackers.wandb=wandb",
        ),
        ([GRPO, "use_peft=true"], "use_peft (TRL): for adapters, set models.actor.trains=lora"),
        ([GRPO, "reward_funcs=x"], "interfaces.reward.functions for several, a mapping of names"),
        ([GRPO, "gradient_accumulation_steps=3"], "Lower it to save memory; the result does not change"),
        (
            ["experiment=ppo", "lr=1"],
            "lr may mean models.actor.optimizer.lr or models.critic.optimizer.lr. Set the one",
        ),
        (["experiment=grpo_arithmetic", "max_new_tokens=9"], "or evaluation.generation.max_new_tokens. Set the one"),
        (["experiment=sft", "kl_coef=0.1"], "kl_coef: no role of this experiment has the key interfaces.*.kl.coef"),
        ([GRPO, "algorithm.adv_estimator=grpo"], "adv_estimator=grpo (verl): start from experiment=grpo"),
        ([GRPO, "algorithm.adv_estimator=nope"], "the value nope is not known here. grpo: start from experiment=grpo"),
        ([GRPO, "algorithm.foo=1"], "algorithm=NAME chooses a file and has no keys below it. `realign help algorithm`"),
        ([GRPO, "trainer.foo=1"], "unknown key 'trainer.foo'. `realign help trainer` lists the names of verl"),
        ([GRPO, "kl_ctl=0.1"], "kl_ctl is interfaces.actor.kl.coef with interfaces.actor.kl.place=reward, but"),
        (["experiment=ppo", "beta=0.1"], "beta is interfaces.actor.kl.coef with interfaces.actor.kl.place=loss, but"),
        (["experiment=ppo", "max_steps=9"], "max_steps is steps with interfaces.actor.n_minibatches=1, but"),
        ([GRPO, "use_decoupled_loss=true"], "start from experiment=areal_decoupled"),
        ([GRPO, "recompute_logprob=1", "allocation_mode=d4"], "allocation_mode (AReaL): `torchrun --nproc-per-node 4"),
        ([GRPO, "max_head_offpolicyness=4"], "set rollout=async and rollout.max_staleness to the same number"),
        ([GRPO, "epochs=3", "batch_size=8"], "(PPO epochs). Also: batch_size: set batch_prompts"),
        (["num_generations=3"], "num_generations: start from an experiment, such as experiment=grpo num_generations=3"),
    ],
)
def test_other_names_are_errors_that_name_the_keys(words, message):
    with pytest.raises(ConfigError) as caught:
        translate(words)
    assert message in str(caught.value)


def test_a_penalty_of_zero_needs_no_penalty():
    assert translate(["experiment=grpo_arithmetic", "beta=0"])[0][1:] == ["interfaces.actor.kl.coef=0"]


def test_a_key_of_a_users_own_class_is_not_replaced():
    own = ["experiment=grpo", f"data._target_={__name__}.OwnData", "data.train_files=x"]
    assert translate(own)[:2] == (own, [])


@dataclasses.dataclass
class OwnData:
    train_files: str = ""


@pytest.mark.parametrize(
    "word", ["models.actr.optimizer.lr=1", "models.ref.optimizer.lr=1", "models.actr.optimizer.learning_rate=1"]
)
def test_a_wrong_path_is_reported_as_such_and_not_read_as_a_key_of_another_role(word):
    assert translate([GRPO, word]).overrides == [GRPO, word]


def test_a_name_below_another_role_is_not_the_actors():
    with pytest.raises(ConfigError, match="no role of this experiment has the key"):
        translate([GRPO, "interfaces.reward.generation.num_generations=4"])


def test_a_field_of_a_users_own_objective_is_not_replaced():
    own = [GRPO, "interfaces.actor.objective=mine.py:Mine", "interfaces.actor.objective.epsilon=1"]
    assert translate(own).overrides == own


def test_flags_of_other_tools_are_overrides():
    given = with_overrides_for_flags(["--algo.kl.use_loss", "--actor.adam.lr", "5e-7", "--data.prompt_dataset", "x"])
    assert given == ["algo.kl.use_loss=true", "actor.adam.lr=5e-7", "data.prompt_dataset=x"]
    assert translate([GRPO, *given])[0][1:] == [
        "interfaces.actor.kl.place=loss",
        "models.actor.optimizer.lr=5e-7",
        "data.path=x",
    ]
