"""Test the text of `realign help`."""

from __future__ import annotations

import re

import pytest

from realign.cli import commands as cli
from realign.cli.key_help import key_help


def test_a_component_shows_its_class_text_and_fields():
    out = key_help(["experiment=grpo", "interfaces.actor.kl"])
    assert out.startswith("interfaces.actor.kl  (KLPenalty, experiment=grpo)\n")
    assert re.search(r"^  place   none \| reward \| loss   default none   set to loss$", out, re.M)
    assert re.search(r"^  coef   float, at least 0 and finite   default 0\.05   set to 0\.001$", out, re.M)
    assert max(map(len, out.splitlines())) <= 100


def test_a_value_shows_type_default_range_and_choices():
    out = key_help(["interfaces.actor.kl.estimator"])
    assert re.search(r"^  type     word \| null$", out, re.M)
    assert re.search(r"^  default  null$", out, re.M)
    assert "\n    k1  " in out
    out = key_help(["steps"])
    assert "default  none; the key must be set" in out
    assert "valid    at least 1" in out


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


def test_a_key_that_does_not_exist_is_one_line(capsys):
    assert cli.main(["help", "interfaces.actor.klx"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: unknown key 'interfaces.actor.klx'; did you mean 'kl'?")
