"""Test `realign import`: the command that reproduces the gradient of another tool's config."""

from __future__ import annotations

import collections
import contextlib
import inspect
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml

from benchmarks.referee import batches, ours
from benchmarks.referee.cells import CELLS, ROWS, Cell, overrides_of
from realign.cli import import_config
from realign.cli.commands import main
from realign.cli.import_config import RULES, experiment_text, translate_config, translate_source
from realign.cli.import_readers import Source, read_sources
from realign.config import build_experiment, compose
from realign.config.aliases import read_own_yaml
from realign.config.command_line import prepare
from realign.config.errors import ConfigError
from realign.data.hub import is_hub_name
from realign.data.row_sources import RowSource
from realign.engines.transformers_model import TransformersModel
from realign.safe_yaml import load_yaml
from tests.cli.peers import meaning, meaning_of_experiment
from tests.docs.pages import blocks
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer

TOOLS = sorted(path.stem for path in RULES.glob("*.yaml"))
PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
PUBLISHED = read_own_yaml(Path(__file__).with_name("published.yaml"))
ROWS_OF = read_own_yaml(Path(__file__).with_name("published_rows.yaml"))
BY_SOURCE = {config["source"]: config for config in PUBLISHED}
LOSSES = [
    pytest.param(row, tool, id=f"{tool} {row}")
    for (row, tool), cell in CELLS.items()
    if tool in TOOLS and tool != "areal" and isinstance(cell, Cell) and ROWS[row].kind == "policy"
]
GROUP_OF_FOUR = {
    "trl": {"num_generations": 4},
    "verl": {"actor_rollout_ref.rollout.n": 4},
    "openrlhf": {"rollout.n_samples_per_prompt": 4},
    "areal": {"gconfig.n_samples": 4, "train_dataset.batch_size": 8},
}
"""Responses per prompt. The tools' own defaults of 1 have no group to compare with, and AReaL's batch is one prompt."""
SINGLE = ("interfaces.actor.n_minibatches=1", "interfaces.actor.recompute=false")
"""The referee's batches have the log-probs of the start of one optimizer step."""


def words(imported: import_config.Imported) -> dict[str, str]:
    return dict(word.split("=", 1) for word in imported.overrides)


def assert_same_loss(kind: str, batch: Any, imported: Sequence[str], compared: Sequence[str]) -> None:
    """Compare loss and gradient under the overrides of a config with those that the referee compared."""
    loss, gradient = ours.run(kind, batch, imported)
    expected, expected_gradient = ours.run(kind, batch, compared)
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-5)


def assert_same_policy_loss(row: str, tool: str, settings: dict[str, Any]) -> None:
    """Compare the loss under a tool's settings with that of a cell of the referee."""
    imported = translate_config(tool, settings | GROUP_OF_FOUR[tool])
    assert not imported.refused
    compared = overrides_of(ROWS[row], CELLS[row, tool])
    assert_same_loss("policy", batches.batch(ROWS[row].batch, 0), (*imported.overrides, *SINGLE), compared)


@pytest.mark.parametrize(
    ("row", "tool", "settings"),
    [
        ("dpo", "trl-dpo", {"loss_type": "sigmoid"}),
        ("ipo", "trl-dpo", {"loss_type": ["ipo"], "label_smoothing": 0.1}),
        ("kto", "trl-kto", {"beta": 0.1}),
    ],
)
def test_an_imported_config_of_preferences_has_the_loss_that_the_referee_compared(row, tool, settings):
    batch = ours.with_mismatched(batches.batch("pairs", 0))
    imported = translate_config(tool, settings)
    assert imported.proof == {"peer": "trl", "kinds": {ROWS[row].kind: "pairs"}}
    assert bool(imported.refused) == ("label_smoothing" in settings)  # it has no effect there
    assert_same_loss(ROWS[row].kind, batch, imported.overrides, ROWS[row].preset)


AREAL = {
    "grpo": {"actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": "group"},
    "dr_grpo": {"actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": None},
    "ppo": {"critic.path": "m", "actor.kl_ctl": 0.05, "actor.gae_lambda": 0.95, "actor.adv_norm.mean_level": "batch"},
}
"""Configs of AReaL, whose names have sections, for cells of the referee."""


@pytest.mark.parametrize("row", AREAL)
def test_an_imported_config_of_areal_has_the_loss_that_the_referee_compared(row):
    assert_same_policy_loss(row, "areal", {"actor.kl_ctl": 0.0} | AREAL[row])


def test_a_section_has_its_own_defaults():
    translated = words(translate_config("areal", {"actor.adv_norm.eps": 1e-4} | GROUP_OF_FOUR["areal"]))
    assert translated["interfaces.actor.adv_norm"].startswith("{mean: batch, std: batch, ")
    assert translated["interfaces.actor.advantage.reward_norm"].startswith("{mean: none, std: none, ")


@pytest.mark.parametrize(("row", "tool"), LOSSES)
def test_an_imported_config_has_the_loss_that_the_referee_compared_with_the_tool(row, tool):
    with_model = {"reward.reward_model.enable": True} if row == "ppo" else {}  # the referee names one
    assert_same_policy_loss(row, tool, CELLS[row, tool].settings | with_model)


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a published config, which may be told by what differs from another one."""
    base = BY_SOURCE[config["like"]]["settings"] if "like" in config else {}
    return {name: x for name, x in base.items() if name not in config.get("without", ())} | config["settings"]


def kind_of(config: dict[str, Any]) -> str:
    """Return the kind of a published config, in the words of `meaning`."""
    first = config["kind"].split(",")[0].lower()
    return {"sft": "sft", "dpo": "dpo", "orpo": "orpo", "reward model": "reward"}.get(first, "rl")


FATES = ("command", "no equivalent", "by hand", "bookkeeping")


def row_of(config: dict[str, Any]) -> str:
    """Import a published config, and return its row in the table of the page."""
    given = settings_of(config)
    imported = translate_source(config["tool"], Source(dict(given), config["program"]))
    assert config["kind"] in imported.title
    ours = meaning_of_experiment(build_experiment(compose(prepare(imported.overrides))))
    theirs = meaning(config["tool"], kind_of(config), given)
    assert {name: x for name, x in ours.items() if name in theirs} == theirs
    assert set(imported.fates) == set(given)
    assert set(imported.fates.values()) <= {*FATES}
    assert not [line for line in imported.by_hand if "not known" in line]
    fates = collections.Counter(imported.fates.values())
    repository, _, file = config["source"].partition(": ")
    file = file.removeprefix("examples/").removeprefix("scripts/")
    tool = repository.split("/")[1].split("@")[0]
    kept = " + ".join(str(fates[fate]) for fate in FATES)
    also = ", ".join(stand_ins(config["tool"], words(imported))) or "-"
    return f"| {tool} `{file}` | {config['kind']} | {len(theirs)} | {len(given)} = {kept} | {also} |"


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda config: config["source"].split(": ")[1])
def test_a_published_config_has_its_kind_and_loss_and_no_value_is_lost(config):
    """`python -m tests.cli.test_import_config` writes the rows."""
    assert row_of(config) in PAGE.read_text(encoding="utf-8").splitlines()


REWARDS = """\
def verl(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)


def openrlhf(queries, prompts, labels=""):
    return [len(query) % 2 for query in queries]


def areal(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    return float(answer in completions)


def trl(completions, solution, **kwargs):
    return [len(completion) % 2 for completion in completions]
"""
"""Reward functions with the arguments that each tool passes."""


def stand_ins(tool: str, command: dict[str, str]) -> dict[str, list[str]]:
    """Return what a command needs besides models and data, with the overrides that do without it."""
    several = load_yaml(command.get("interfaces.reward.functions", "null")) or {}
    found = {
        "reward": [f"interfaces.reward.functions.{name}.function=rewards.py:{tool}" for name in several],
        "server": ["models.actor.sampler=in_process_sampling"] * ("models.actor.sampler" in command),
        "4 bits": ["models.actor.load_in_4bit=false"] * ("models.actor.load_in_4bit" in command),
    }
    if "interfaces.reward.function" in command and not several:
        found["reward"] = [f"interfaces.reward.function=rewards.py:{tool}"]
    return {name: overrides for name, overrides in found.items() if overrides}


def write_rows(source: RowSource, of: str, rows: int) -> str:
    """Write rows in the columns of a source, and return it with their place: a folder with two splits for a hub
    dataset."""
    kind = max((name for name in ROWS_OF if name in f"{source.path} of {of}"), key=len)
    folder, hub = Path("rows", kind.replace("/", "-")), is_hub_name(source.path)
    splits = (source.split or "train", "another")
    for file in [f"data/{split}-00000-of-00001.jsonl" for split in splits] if hub else ["rows.jsonl"]:
        (folder / file).parent.mkdir(exist_ok=True, parents=True)
        (folder / file).write_text(f"{json.dumps(ROWS_OF[kind])}\n" * rows)
    columns = ", ".join(f"{new}: {old}" for new, old in source.columns.items())
    place = folder if hub else folder / "rows.jsonl"
    return f"{{path: {place}, split: {source.split or 'null'}, columns: {{{columns}}} }}"


def check(config: dict[str, Any]) -> None:
    """Write a config as an experiment file in this folder, and run `realign check` of it with tiny models."""
    imported = translate_source(config["tool"], Source(settings_of(config), config["program"]))
    Path("experiment.yaml").write_text(experiment_text(imported), encoding="utf-8")
    experiment, command = build_experiment(compose(["./experiment.yaml"])), words(imported)
    overrides = [x for found in stand_ins(config["tool"], command).values() for x in found]
    rows = experiment.batch_prompts if experiment.dynamic_sampling else 8
    for role, model in experiment.models.items():
        if isinstance(model, TransformersModel):
            scores = role == "reward" and "actor" in experiment.models
            overrides.append(f"models.{role}.path={'score' if scores else 'tiny'}")
    for key, data in (
        ("data", experiment.data),
        ("evaluation.data", experiment.evaluation and experiment.evaluation.data),
    ):
        if f"{key}.path" in command:
            overrides.append(
                f"{key}.path=[{', '.join(write_rows(source, kind_of(config), rows) for source in data.sources)}]"
            )
            overrides += [f"{key}.{name}=null" for name in ("split", "subset") if f"{key}.{name}" in command]
    assert main(["check", "./experiment.yaml", *overrides, "output_dir=run"]) == 0


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A folder with a tiny model, a tiny reward model, and reward functions."""
    folder = tmp_path_factory.mktemp("machine")
    write_machine(folder)
    return folder


def write_machine(folder: Path) -> None:
    """Write them."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    for name, head in (("tiny", "causal"), ("score", "score")):
        model = tiny_model("llama", attention="eager", head=head, max_position_embeddings=65_536)
        if head == "causal":  # most tokens end a response, so that it is short
            model.generation_config.eos_token_id = list(range(2, 60))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "rewards.py").write_text(REWARDS)


QUICK = ("verl/grpo", "remax", "train_dapo", "train_ppo_ray", "train_sft.sh", "gsm8k_grpo", "grpo/config_demo", "qlora")
"""Parts of the names of configs that are checked without `slow`."""


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(x, marks=[] if any(name in x["source"] for name in QUICK) else pytest.mark.slow, id=x["source"])
        for x in PUBLISHED
    ],
)
def test_the_experiment_file_of_a_published_config_passes_its_check(config, machine, monkeypatch):
    monkeypatch.chdir(machine)
    check(config)


def test_numbers_of_the_config_give_the_optimizer_steps_and_the_schedule():
    verl = {"data.train_batch_size": 1024, "actor_rollout_ref.actor.ppo_mini_batch_size": 256, "rows": 10_240}
    verl |= {"trainer.total_epochs": 3, "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1}
    translated = words(translate_config("verl", {"algorithm.adv_estimator": "grpo", **verl} | GROUP_OF_FOUR["verl"]))
    counts = ("batch_prompts", "interfaces.actor.n_minibatches", "steps")
    assert [translated[key] for key in counts] == ["1024", "4", "30"]
    assert translated["models.actor.optimizer.schedule.warmup"] == "3"
    trl = {"num_generations": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trl |= {"steps_per_generation": 8, "num_processes": 4, "max_steps": 40, "lr_scheduler_type": "cosine"}
    translated = words(translate_config("trl", trl))
    assert [translated[key] for key in counts] == ["16", "4", "10"]
    assert translated["models.actor.optimizer.schedule.total"] == "40"
    openrlhf = {"rollout.batch_size": 128, "rollout.n_samples_per_prompt": 8, "train.batch_size": 256}
    assert words(translate_config("openrlhf", openrlhf))["interfaces.actor.n_minibatches"] == "4"


@pytest.mark.parametrize(
    "settings",
    [
        {"is_correction_enable": True},
        {"is_correction_enable": True, "is_correction_type": "icepop", "is_correction_threshold": [0.2, 3.0]},
        {"is_correction_enable": True, "is_correction_type": "seq-mask-tis"},
        {"is_correction_level": "token", "is_correction_mode": "clip"},
        {"is_correction_level": "token", "is_correction_threshold": [2.0]},
        {"is_correction_level": "seq", "is_correction_threshold": [0.9, 1.1]},
        {"is_correction_level": False},  # `off` in YAML
        {"is_correction_level": "token", "policy_loss_type": "gspo"},
    ],
    ids=str,
)
def test_a_correction_of_openrlhf_is_the_one_of_its_loss(settings):
    given = {"rollout.n_samples_per_prompt": 4, "algo.advantage.estimator": "group_norm"}
    given |= {f"{'actor' if x == 'policy_loss_type' else 'algo.advantage'}.{x}": y for x, y in settings.items()}
    theirs = meaning(
        "openrlhf", "rl", given | {"algo.advantage.is_correction_level": settings.get("is_correction_level") or "off"}
    )
    single = {name: x[0] if x == [2.0] else x for name, x in given.items()}  # as a command line is read
    for read in (given, single):
        imported = translate_config("openrlhf", read)
        ours = meaning_of_experiment(build_experiment(compose(prepare(imported.overrides))))
        assert {name: ours[name] for name in ("correction", "ratio to", "objective")} == {
            name: theirs[name] for name in ("correction", "ratio to", "objective")
        }


def test_a_value_that_changes_the_run_is_no_bookkeeping():
    verl = {"algorithm.adv_estimator": "gae", "data.seed": 7, "critic.ppo_mini_batch_size": 512, "critic.ppo_epochs": 2}
    verl |= {"actor_rollout_ref.actor.shuffle": True, "actor_rollout_ref.actor.qat.enable": False}
    imported = translate_config("verl", verl)
    translated = words(imported)
    assert translated["seed"] == "7"
    assert [translated[f"interfaces.critic.{name}"] for name in ("n_minibatches", "epochs")] == ["2", "2"]
    assert imported.refused == ["actor_rollout_ref.actor.shuffle=true is not available."]
    assert imported.fates["actor_rollout_ref.actor.qat.enable"] == "bookkeeping"
    areal = GROUP_OF_FOUR["areal"] | {"ref.path": "other", "actor.prox_logp_method": "loglinear"}
    imported = translate_config("areal", areal)
    assert words(imported)["models.ref.path"] == "other"
    assert imported.refused == ["actor.prox_logp_method=loglinear is not available."]
    trl = translate_config("trl-sft", {"packing": True, "eos_token": "<|im_end|>", "group_by_length": True})
    assert [line.partition(":")[0] for line in trl.by_hand[-3:-1]] == ["eos_token=<|im_end|>", "packing"]
    assert trl.refused == ["group_by_length=true is not available."]


def test_a_group_of_one_is_read_as_areal_does():
    group = {"gconfig.n_samples": 1, "actor.reward_norm.mean_level": "group", "train_dataset.batch_size": 8}
    with pytest.raises(ConfigError, match="subtracts each reward from itself"):
        translate_config("areal", group)
    alone = words(translate_config("areal", group | {"actor.reward_norm.mean_leave1out": True}))
    assert alone["interfaces.actor.advantage.reward_norm"] == "{mean: none, std: batch}"


def test_a_group_of_one_has_no_baseline_in_verl():
    imported = translate_config("verl", {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 1})
    actor = build_experiment(compose(prepare(imported.overrides))).interfaces["actor"]
    assert (actor.adv_norm.mean.name, actor.adv_norm.std.name, actor.advantage.min_group_size) == ("none", "none", 1)
    assert imported.fates["actor_rollout_ref.rollout.n"] == "command"


def test_a_mixture_of_openrlhf_has_a_source_for_each_data_set():
    given = {"prompt_data": "a/b,rows.jsonl", "prompt_data_probs": "0.3,0.7", "label_key": "answer"}
    command = words(translate_config("openrlhf", given | GROUP_OF_FOUR["openrlhf"]))
    first, second = build_experiment(compose(prepare([f"{k}={x}" for k, x in command.items()]))).data.sources
    assert [(first.path, first.split, first.weight), (second.path, second.split, second.weight)] == [
        ("a/b", "train", 0.3),
        ("rows.jsonl", None, 0.7),
    ]
    assert first.columns == second.columns == {"label": "answer"}


def test_a_variable_of_the_shell_is_no_value_by_any_name():
    given = {"custom_reward_function.path": "$(pwd)/reward.py", "algorithm.adv_estimator": "grpo"}
    imported = translate_config("verl", given | GROUP_OF_FOUR["verl"])
    assert imported.by_hand[0] == "custom_reward_function.path: $(pwd)/reward.py has to run first"
    assert not [word for word in imported.overrides if "pwd" in word]
    openrlhf = translate_config("openrlhf", {"pretrain": "$MODEL", "prompt_data": "a/b"} | GROUP_OF_FOUR["openrlhf"])
    assert words(openrlhf)["models.actor.path"] == "MODEL"


def test_a_value_is_no_placeholder_and_placeholders_are_told():
    imported = translate_config("trl", {"dataset": "a/b", "num_generations": 4})
    assert words(imported)["data.path"] == "a/b"
    placeholders = "models.actor.path=MODEL, interfaces.reward.function=reward.py:score"
    assert imported.by_hand[-1] == f"{placeholders}: yours to fill in, since the config doesn't say it"
    scored = translate_config("trl", {"reward_model_name_or_path": "r", "num_generations": 4})
    assert "interfaces.reward.function" not in words(scored)


def test_the_first_of_several_programs_is_read_and_the_others_are_told(tmp_path):
    line = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n="
    (tmp_path / "run.sh").write_text(f"{line}4\n{line}8\n")
    chosen = import_config._chosen("verl", read_sources([str(tmp_path / "run.sh")]))
    assert chosen.settings["actor_rollout_ref.rollout.n"] == 4
    assert chosen.notes[0].startswith("this is the first of 2 programs")


def test_optimizer_steps_that_split_groups_become_a_divisor_and_are_told():
    trl = {"num_generations": 8, "per_device_train_batch_size": 4, "steps_per_generation": 4, "num_processes": 1}
    openrlhf = {"rollout_batch_size": 8, "n_samples_per_prompt": 3, "train_batch_size": 8, "reward_pretrain": "r"}
    openrlhf |= {"advantage_estimator": "group_norm", "use_kl_loss": True, "use_kl_estimator_k3": True}
    for tool, given, steps in (("trl", trl, 4), ("openrlhf", openrlhf, 3)):
        imported = translate_config(tool, given)
        assert words(imported)["interfaces.actor.n_minibatches"] == "2"
        assert [line for line in imported.by_hand if f"{steps} optimizer steps per batch would split" in line]
    assert words(imported)["interfaces.actor.kl.estimator"] == "k3"
    uneven = translate_config("trl", trl | {"num_generations": 7})
    assert [line for line in uneven.by_hand if "16 responses per batch are no multiple of num_generations=7" in line]


def test_an_allocation_of_areal_says_its_servers():
    given = {"allocation_mode": "sglang:d4t2+fsdp:d8"} | GROUP_OF_FOUR["areal"]
    imported = translate_config("areal", given)
    keys = ("sampler", "sampler.servers", "sampler.arguments")
    assert [words(imported)[f"models.actor.{key}"] for key in keys] == ["sglang", "4", "--tensor-parallel-size 2"]
    assert "fsdp:d8: start the command with `torchrun --nproc-per-node 8 -m realign`." in imported.by_hand


def test_defaults_of_the_tool_that_differ_are_named():
    imported = translate_config("verl", {"algorithm.adv_estimator": "grpo"} | GROUP_OF_FOUR["verl"])
    assert "interfaces.actor.objective.dual=3" in imported.assumed
    assert "interfaces.actor.adv_norm.std=group" not in imported.assumed  # the config says so


@pytest.mark.parametrize(
    ("tool", "given", "message"),
    [
        ("trl", {"loss_type": "vespo"}, "does not have the loss loss_type=vespo"),
        ("trl-dpo", {"loss_type": "apo_zero"}, "does not have the loss loss_type=apo_zero"),
        ("verl", {"algorithm.adv_estimator": "grpo_passk"}, "does not have the advantages of algorithm.adv_estimator"),
        ("verl", {"distillation.enabled": True, "data.train_files": "x"}, "Start from experiment=on_policy"),
        ("openrlhf", {"train.agent_func_path": "a.py", "rollout.batch_size": 8}, "agent functions"),
        ("areal", {"actor.m2_threshold": 0.1, "gconfig.n_samples": 4}, "second-moment mask"),
        ("trl", {"learning_rate": 1e-6}, "nothing in this config says what it trains"),
        ("trl-pro", {"beta": 1}, "no kind 'pro'"),
        ("trl", {"distributed_type": "FSDP", "num_processes": 8}, "this is a config of accelerate"),
        ("areal", {"env_vars.NCCL_NET": "IB"}, "AReaL has none of these settings"),
        (
            "trl",
            dict.fromkeys(AREAL["ppo"], 1),
            "4 of these settings are AReaL's, and 0 TRL's: use `realign import areal`",
        ),
    ],
)
def test_what_realign_lacks_is_refused_and_nothing_else_is_filled_in(tool, given, message):
    with pytest.raises(ConfigError, match=message):
        translate_config(tool, given)


def test_the_experiment_file_composes_to_the_command(tmp_path):
    config = BY_SOURCE[next(source for source in BY_SOURCE if "gsm8k_grpo.yaml" in source)]
    imported = translate_source("areal", Source(settings_of(config), config["program"]))
    (tmp_path / "mine.yaml").write_text(experiment_text(imported))
    from_file, from_words = (
        build_experiment(compose(words)) for words in ([str(tmp_path / "mine.yaml")], imported.overrides)
    )
    assert from_file.interfaces == from_words.interfaces
    assert from_file.models == from_words.models
    assert from_file.rollout == from_words.rollout


@pytest.mark.parametrize("file", ["grpo_config.yaml", "gsm8k_grpo.yaml"])
def test_the_examples_of_the_page_print_what_the_page_shows(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(import_config, "REFEREE", tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    config, *others = blocks(text[text.index(f"<!-- import: {file} -->") :])
    published = next((x for x in PUBLISHED if x["source"].endswith(f"/{file}")), None)
    shown = others[0] if published is None else config
    (tmp_path / file).write_text(config.code if published is None else yaml.safe_dump(settings_of(published)))
    command, *expected = shown.code.splitlines()
    assert main(command.removeprefix("$ realign ").split()) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("Proof: not computed. In a checkout")
    expected = expected[:-1] if published is None else expected  # its proof has run with the tool
    for line, line_shown in zip(expected, printed[: len(expected)], strict=True):
        assert line_shown.startswith(line.removesuffix("...")), line
    assert len(expected) in (len(printed) - 1, len(printed) - 2)


def test_flags_of_openrlhf_are_read_with_several_values_and_by_their_old_names():
    flags = ["--advantage_estimator", "group_norm", "--eps_clip_low_high", "0.2", "0.3", "--init_kl_coef=0"]
    flags += ["--pretrain", "a/b"]
    flags += ["--n_samples_per_prompt", "4"]
    translated = words(translate_source("openrlhf", read_sources(flags)[0]))
    assert translated["experiment"] == "grpo"
    assert translated["interfaces.actor.objective.high"] == "0.3"
    assert translated["interfaces.actor.kl.place"] == "none"
    assert translated["models.actor.path"] == "a/b"


def test_what_has_no_equivalent_is_named():
    imported = translate_config("trl", {"loss_type": "grpo", "top_entropy_quantile": 0.5, "mine": 1})
    assert imported.refused == ["top_entropy_quantile=0.5 is not available: all tokens train."]
    assert "mine: not known to realign" in imported.by_hand
    assert imported.fates["top_entropy_quantile"] == "no equivalent"


def test_a_value_out_of_range_is_an_error():
    with pytest.raises(ConfigError, match=r"objective\.high=-0\.8: must be at least 0"):
        translate_config("trl", {"loss_type": "cispo"})


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("${oc.env:HOME}/model", "${oc.env:HOME}/model is an interpolation, which is not resolved"),
        (["a", "${x}"], "['a', '${x}'] is an interpolation, which is not resolved"),
        ("m" * 5_000, "the value has 5,000 characters"),
        ([0] * 5_000, "the value has 15,000 characters"),
        ([[[[[1]]]]], "lists are nested more than 4 times"),
    ],
    ids=["interpolation", "list", "text", "elements", "nested"],
)
def test_a_value_that_is_not_read_is_left_to_the_user_and_never_resolved(value, why, monkeypatch):
    monkeypatch.setenv("HOME", "/secret")
    imported = translate_config("trl", {"model_name_or_path": value, "loss_type": "grpo"})
    assert f"model_name_or_path: {why}" in imported.by_hand
    assert "/secret" not in str(imported)
    assert "models.actor.path=MODEL" in imported.overrides


def test_an_integer_beyond_the_floats_is_an_error_or_a_value():
    huge = 10**3000 - 1
    assert translate_config("trl", {"max_steps": huge, "num_generations": 8}).fates["max_steps"] == "command"
    with pytest.raises(ConfigError, match="expected float"):
        translate_config("trl", {"temperature": huge, "num_generations": 8})


REPEATED = zip("abcdefg", "bcdefgh", strict=True)
BOMB = "a: &a [1,1]\n" + "".join(f"{new}: &{new} [*{old}{f',*{old}' * 9}]\n" for old, new in REPEATED)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "expected a mapping of settings to values, found list"),
        ("beta: !!python/object/apply:os.system [ls]\n", "the file cannot be read"),
        (BOMB, "repeat too many values"),
        ('run_name: "a\\e[2Jb"\n', "run_name: the value has control characters"),
        ("'a b$(ls)': 1\n", "is no name of a setting"),
        ("\x00\x01", "the file cannot be read"),
        ("".join(f"k{i}: 1\n" for i in range(2_001)), "2,001 settings; at most 2,000"),
        ("a: [" + "1," * 60_000 + "1]\n", "more than 100,000 characters"),
    ],
    ids=["list", "tag", "aliases", "control", "name", "binary", "size", "length"],
)
def test_a_file_that_is_no_config_is_an_error_line(tmp_path, capsys, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert main(["import", "trl", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) <= 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import", "realign import trl|verl|openrlhf|areal"),
        ("import vrel a.yaml", "did you mean 'verl'"),
        ("import trl", "no settings"),
        ("import trl nothing.yaml", "nothing.yaml: the file cannot be read"),
        ("import verl a=1 b", "'b': expected name=value or --name value"),
    ],
)
def test_a_wrong_command_line_is_an_error(line, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    assert message.lower() in capsys.readouterr().err.lower()


def test_values_with_spaces_and_quotes_reach_the_command_as_text(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(import_config, "REFEREE", tmp_path)
    assert main(["import", "trl-sft", "model_name_or_path=my models/it's; rm -rf ~"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"'models\.actor\.path='\"'\"'my models/it", printed)


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> float:
    """Return a reward by verl's signature."""
    assert (data_source, extra_info) == ("openai/gsm8k", {"split": "train", "index": int(ground_truth)})
    return float(ground_truth in solution_str)


@pytest.fixture
def tiny_run(tmp_path, monkeypatch):
    """A folder with a tiny chat model and the reward functions of two tools."""
    save_tiny(tmp_path / "tiny")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "tiny")
    verl = inspect.getsource(score).replace("def score", "def compute_score")
    (tmp_path / "reward.py").write_text(f"from __future__ import annotations\n{verl}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


ONE_WORKER = ["interfaces.reward.workers=1"]
"""Several only take longer to start for a few rewards."""


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [step for step in map(json.loads, lines) if step["step"]]


def test_a_published_script_of_verl_trains_with_its_parquet_and_reward(tiny_run, capsys):
    given = settings_of(PUBLISHED[0])
    lines = [f"    {name}='{json.dumps(value)}'" for name, value in given.items() if "$" not in str(value)]
    (tiny_run / "run.sh").write_text("python3 -m verl.trainer.main_ppo \\\n" + " \\\n".join(lines) + "\n")
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{i} + 0 ="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(8)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tiny_run / "train.parquet")
    smaller = "data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=2 data.max_response_length=3"
    smaller += " data.train_files=train.parquet data.val_files=null actor_rollout_ref.model.path=tiny"
    smaller += (
        " actor_rollout_ref.rollout.name=hf reward.custom_reward_function.path=reward.py rows=8 trainer.total_epochs=1"
    )
    assert main(["import", "verl", "run.sh", *smaller.split(), "--out", "experiment.yaml"]) == 0
    assert main(["./experiment.yaml", *ONE_WORKER, "output_dir=run"]) == 0, capsys.readouterr().err
    made = steps_of(tiny_run / "run")
    assert len(made) == 2  # 8 rows in batches of 4
    assert all(0 <= step["reward"] <= 1 for step in made)


SCRIPT = """\
from datasets import load_dataset
from trl import GRPOTrainer

dataset = load_dataset("json", data_files="train.jsonl", split="train")


def many_digits(completions, **kwargs):
    return [sum(map(str.isdigit, completion[0]["content"])) / 3 for completion in completions]


if __name__ == "__main__":
    trainer = GRPOTrainer(model="tiny", reward_funcs=many_digits, train_dataset=dataset)
    trainer.train()
"""
"""A script in the form of TRL's quick start: a trainer without a config."""


def test_a_script_of_trl_trains_with_its_reward(tiny_run, monkeypatch, capsys):
    # Its functions are imported from the script, which names TRL: a user of it has it, the tests don't. The processes
    # of the reward find the file, and this one must not keep it.
    (tiny_run / "trl.py").write_text("GRPOTrainer = None\n")
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(GRPOTrainer=None))
    (tiny_run / "train_grpo.py").write_text(SCRIPT)
    rows = [{"prompt": [{"role": "user", "content": f"{i} + 0 ="}]} for i in range(8)]
    (tiny_run / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    smaller = "max_completion_length=3 num_generations=4 max_steps=2 num_processes=1"
    assert main(["import", "trl", "train_grpo.py", *smaller.split(), "--out", "experiment.yaml"]) == 0
    assert main(["./experiment.yaml", *ONE_WORKER, "output_dir=run"]) == 0, capsys.readouterr().err
    made = steps_of(tiny_run / "run")
    assert len(made) == 2
    assert all(0 <= step["reward"] <= 1 for step in made)


def main_of_page() -> None:
    """Write the table of the page, after a check of all configs."""
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_machine(Path(folder))
        for config in PUBLISHED:
            check(config)
    start, end = (text.index(f"<!-- {mark} -->") for mark in ("published", "end of published"))
    rows = ["| config | read as | loss | settings | stand-ins |", "|---|---|---|---|---|", *map(row_of, PUBLISHED)]
    PAGE.write_text(f"{text[:start]}<!-- published -->\n{chr(10).join(rows)}\n{text[end:]}", encoding="utf-8")


if __name__ == "__main__":
    main_of_page()
