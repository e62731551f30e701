"""Test the help for keys: every field has a text, and types, defaults, ranges and choices are those of the classes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from realign.cli import commands as cli
from realign.cli.arguments import COMMANDS
from realign.config.composition import compose_raw
from realign.config.errors import ConfigError
from realign.config.experiment import REPORT, ExperimentConfig
from realign.config.files import file_values, list_experiments
from realign.config.help import Entry, Section, key_help, section
from realign.config.places import ROOTS
from tests.config_parts import write_experiment


def entry(page: Section, name: str) -> Entry:
    return next(one for one in page.entries if one.key.rpartition(".")[2] == name)


def test_the_root_lists_every_key_of_the_schema():
    keys = [one.key for one in section("").entries]
    assert keys == [name for name in ExperimentConfig.__dataclass_fields__ if name not in REPORT]
    assert set(ROOTS) < set(keys)


def test_a_number_has_its_type_default_range_and_what_the_experiment_sets():
    coef = section("interfaces.actor.kl.coef", ["experiment=grpo"]).own
    assert coef is not None
    assert (coef.type, coef.default, coef.valid, coef.given) == ("float", "0.05", "at least 0 and finite", "0.001")
    assert coef.text.startswith("Weight of the penalty, in reward (or loss) per nat")


def test_choices_have_their_meaning():
    kl = section("interfaces.actor.kl", ["experiment=grpo"])
    assert list(entry(kl, "place").choices) == ["none", "reward", "loss"]
    objective = section("interfaces.actor.objective").own
    assert objective is not None
    texts = objective.choices
    assert texts.keys() >= {"clip", "gspo", "cispo", "sapo", "gmpo", "reinforce", "proximal_kl"}
    assert "arXiv:2507.18071" in texts["gspo"]


def test_fields_are_those_of_the_class_that_overrides_select():
    words = ["experiment=grpo", "interfaces.actor.objective=sapo"]
    assert [one.key for one in section("interfaces.actor.objective", words).entries] == [
        "interfaces.actor.objective.tau_pos",
        "interfaces.actor.objective.tau_neg",
    ]


def test_own_experiments_are_described(tmp_path):
    conf = write_experiment(tmp_path / "conf")
    page = section("models.actor", ["experiment=bigram"], conf)
    assert (page.name, page.experiment) == ("Bigram", "bigram")
    assert entry(page, "lr").default == "0.5"


@pytest.mark.parametrize(
    ("key", "words", "message"),
    [
        ("stepss", [], "unknown key 'stepss'; did you mean 'steps'?"),
        ("kl", [], "unknown key 'kl'; did you mean interfaces.actor.kl"),
        ("interfaces.actor.klx", [], "unknown key 'interfaces.actor.klx'; did you mean 'kl'?"),
        ("interfaces.critic", ["experiment=grpo"], "the experiment has interfaces: actor, reward"),
        ("microbatch.x", [], "unknown key 'microbatch.x'"),
        ("steps.x", [], "unknown key 'steps.x'"),
        ("interfaces.actor", ["experiment=grp"], "unknown experiment 'grp'; did you mean 'grpo'?"),
    ],
)
def test_a_key_that_does_not_exist_is_an_error_that_names_the_nearest(key, words, message):
    with pytest.raises(ConfigError) as caught:
        section(key, words)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", list_experiments())
def test_the_values_of_the_files_are_those_that_are_composed(name):
    composed, read = compose_raw([f"experiment={name}"]), file_values([f"experiment={name}"])
    assert all(composed[key] == value for key, value in read.items() if key in ROOTS or not isinstance(value, dict))
    assert all(key in read or not composed[key] for key in ROOTS)


@pytest.mark.parametrize("words", [["help", "steps"], ["help", "interfaces.actor.kl"], ["help", "objective"]])
def test_help_imports_neither_torch_nor_hydra(words):
    code = (
        "import sys; from realign.cli.commands import main; "
        f"assert main({words}) == 0; assert not {{'torch', 'hydra', 'transformers'}} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_component_shows_its_class_text_and_fields():
    out = key_help(["experiment=grpo", "interfaces.actor.kl"])
    assert out.startswith("interfaces.actor.kl  (KLPenalty, experiment=grpo)\n")
    assert re.search(r"^  place   none \| reward \| loss   default none   set to loss$", out, re.M)
    assert re.search(r"^  coef   float, at least 0 and finite   default 0\.05   set to 0\.001$", out, re.M)
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    "arguments",
    [
        ("help", "interfaces.actor.kl"),
        ("--help", "interfaces.actor.kl"),
        ("help", "experiment=ppo", "interfaces.actor.kl"),
        ("experiment=grpo", "interfaces.actor.kl", "--help"),
        ("help", "interfaces.actor.kl."),
    ],
)
def test_every_way_to_ask_answers(arguments, capsys):
    assert cli.main(list(arguments)) == 0
    assert capsys.readouterr().out.startswith("interfaces.actor.kl  (KLPenalty, ")


def test_help_of_an_experiment_shows_what_it_sets(capsys):
    assert cli.main(["experiment=ppo", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Config keys  (experiment=ppo)\n")
    assert re.search(r"^  steps   int, at least 1   set to 100$", out, re.M)
    assert cli.main(["help"]) == 0
    assert re.search(r"^  steps   int, at least 1   must be set$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_short_help(command, capsys):
    assert cli.main([command, "--help"]) == 0
    of_option = capsys.readouterr().out
    if command == "help":
        return
    assert cli.main(["help", command]) == 0
    assert capsys.readouterr().out == of_option
    lines = of_option.splitlines()
    assert lines[0].startswith("realign <overrides>" if command == "train" else f"realign {command}")
    assert max(map(len, lines)) <= 80
    assert "Exit codes" not in of_option
