from __future__ import annotations

import json
import re
import shlex

import pytest

from extras.planner.tests.models import words_for, write_model
from realign.cli import commands as cli
from realign.cli.arguments import read_arguments
from realign.cli.completion import completions
from realign.config import compose
from realign.config.experiment import build_experiment


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Return overrides of an experiment in an empty current folder, with a wide console."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write_model(tmp_path / "model")
    return words_for("model", "batch_prompts=4", "interfaces.actor.generation.max_new_tokens=16")


def commands_of(out: str) -> list[list[str]]:
    return [shlex.split(line) for line in re.findall(r"^\d+  (.*)", out, re.MULTILINE)]


def test_the_printed_commands_run_the_placements(words, capsys):
    assert cli.main(["plan", *words, "plan.devices=2", "plan.device=cpu", "plan.max_staleness=1", "plan.show=9"]) == 0
    out = capsys.readouterr().out
    assert "Devices: 2 x cpu on 1 node" in out
    assert "prompts of 256 tokens, responses of 8 on average and at most 16" in out
    assert "Costs: data sheets and assumptions." in out
    commands = commands_of(out)
    assert len(commands) >= 4
    assert {command[0] for command in commands} == {"realign", "torchrun"}
    for command in commands:
        given = command[command.index("realign") + 1 :]
        assert build_experiment(compose(read_arguments(given).words)).batch_prompts == 4


def test_placements_that_do_not_fit_are_marked_and_follow_the_others(words, capsys):
    options = ["plan.devices=1", "plan.device=h100", "plan.memory_gb=0.00001"]
    assert cli.main(["plan", *words, *options]) == 0
    out = capsys.readouterr().out
    assert "of which 0 fit the memory" in out
    (row,) = [line for line in out.splitlines() if line.startswith(" 1 ")]
    assert row.rstrip().endswith("no")


def test_runs_calibrate_the_seconds(words, tmp_path, capsys):
    row = {"step": 1, "rollout_tokens": 256.0, "response_tokens": 8.0, "tokens": 640.0, "step_s": 70.0}
    row |= {"time/actor_gen_s": 30.0, "time/reward_inf_s": 0.0}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    options = ["plan.devices=1", "plan.device=cpu", "plan.runs=run", "plan.max_staleness=0", "plan.length_sigma=0"]
    assert cli.main(["plan", *words, *options]) == 0
    out = capsys.readouterr().out
    assert "prompts of 12 tokens, responses of 8 on average" in out
    assert "Costs: measured in run" in out
    (row,) = [line for line in out.splitlines() if line.startswith(" 1 ")]
    assert "sync" in row
    assert float(row.split()[6]) == pytest.approx(70, rel=0.02)


def test_what_no_config_expresses_is_printed(words, capsys):
    assert cli.main(["plan", *words, "plan.devices=1"]) == 0
    assert "No config expresses these placements: rollout workers" in capsys.readouterr().out


def test_a_wrong_option_is_an_error_in_one_line(words, capsys):
    assert cli.main(["plan", *words, "plan.device=tpu"]) == 2
    assert "plan.device: unknown choice 'tpu'" in capsys.readouterr().err
    assert cli.main(["plan", *words, "plan.runs=nowhere"]) == 2
    assert "plan.runs=nowhere: the folder contains no metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("realign plan experiment=grpo plan.dev", ["plan.device=", "plan.devices="]),
        ("realign plan plan.device=h", ["plan.device=h100", "plan.device=h200"]),
    ],
)
def test_options_are_completed(line, expected):
    assert completions(line) == expected
