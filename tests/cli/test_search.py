"""Searches over settings: `realign --trials N`."""

from __future__ import annotations

import json
import re
import sys

import pytest
import yaml

from realign.cli import commands as cli
from tests.config_parts import EXPERIMENT, write_experiment

WORDS = ["--config-dir=conf", "experiment=bigram", "steps=2", "hydra.sweep.dir=all"]
METRIC = "save_best=reward"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    write_experiment(tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def values(folder, number):
    return yaml.safe_load((folder / "all" / str(number) / "config.yaml").read_text())


@pytest.mark.slow  # `make test-slow` installs optuna
def test_seed_b21_a_search_tries_values_of_intervals_and_lists_and_names_the_best_run(here, capsys):
    pytest.importorskip("optuna", reason="needs the extra search")
    searched = [
        "interfaces.actor.epochs=int(interval(1,3))",
        "models.actor.lr=tag(log,interval(0.01,10.0))",
        "batch_prompts=4,8",
    ]
    assert cli.main([*WORDS, METRIC, "--trials", "6", "seed=3", *searched]) == 0
    runs = [values(here, number) for number in range(6)]
    assert {run["interfaces"]["actor"]["epochs"] for run in runs} <= {1, 2, 3}
    assert all(0.01 <= run["models"]["actor"]["lr"] <= 10 for run in runs)
    assert {run["batch_prompts"] for run in runs} <= {4, 8}
    assert len({run["models"]["actor"]["lr"] for run in runs}) == 6
    best = []
    for number in range(6):
        metrics = json.loads((here / "all" / str(number) / "summary.json").read_text())["metrics"]
        best += [metric["best"] for metric in metrics if metric["name"] == "reward"]
    printed = capsys.readouterr().out
    named = re.search(rf"best run: (\d), reward {max(best):.4g}, with interfaces\.actor\.epochs=\d", printed)
    assert best[int(named[1])] == max(best)
    assert "6 runs in all: reward" in printed
    first = [run["models"]["actor"]["lr"] for run in runs]
    assert (
        cli.main([*WORDS, METRIC, "--trials", "6", "seed=3", *searched, "hydra.sweep.dir=again", "overwrite=true"]) == 0
    )
    again = [yaml.safe_load((here / "again" / str(i) / "config.yaml").read_text()) for i in range(6)]
    assert [run["models"]["actor"]["lr"] for run in again] == first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trials", "2", METRIC], "no key to search. Give one several values: KEY=a,b or 'KEY=interval(a,b)'"),
        (["--trials", "2", "seed=1,2"], "which runs are better? Set save_best"),
        (["--trials", "0", METRIC, "seed=1,2"], "--trials 0: must be at least 1"),
        (["--trials", "2", METRIC, "batch_prompts=glob(*)"], "glob(*): --trials searches lists"),
    ],
)
def test_a_search_that_cannot_start_says_what_to_set(words, message, capsys):
    pytest.importorskip("optuna", reason="needs the extra search")
    assert cli.main([*WORDS, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_key_without_a_value_in_the_experiment_can_be_searched(here, capsys):
    pytest.importorskip("optuna", reason="needs the extra search")
    write_experiment(here / "conf", text=EXPERIMENT.replace("batch_prompts: 4", "batch_prompts: ???"))
    assert cli.main([*WORDS, METRIC, "--trials", "2", "batch_prompts=4,8"]) == 0, capsys.readouterr().err
    assert {values(here, number)["batch_prompts"] for number in range(2)} <= {4, 8}


@pytest.mark.slow
def test_parameters_of_the_experiments_file_are_searched_too(here, capsys):
    pytest.importorskip("optuna", reason="needs the extra search")
    params = "{batch_prompts: '4,8', 'interfaces.actor.epochs': 'int(interval(2,4))', seed: 5, steps: 3}"
    write_experiment(here / "conf", text=f"{EXPERIMENT}hydra: {{sweeper: {{params: {params}}}}}\n")
    assert cli.main([*WORDS, METRIC, "--trials", "3"]) == 0, capsys.readouterr().err
    for number in range(3):
        run = values(here, number)
        assert run["batch_prompts"] in (4, 8)
        assert run["interfaces"]["actor"]["epochs"] in (2, 3, 4)
        assert (run["seed"], run["steps"]) == (5, 2)  # the command line has precedence


def test_without_optuna_the_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert cli.main([*WORDS, METRIC, "--trials", "2", "seed=1,2"]) == 2
    assert "--trials needs optuna. Run pip install 'realign-rl[search]'." in capsys.readouterr().err


def test_an_interval_without_trials_is_an_error_that_names_the_option(capsys):
    assert cli.main(["-m", *WORDS, "interfaces.actor.epochs=interval(1,3)"]) == 2
    assert "--trials N searches an interval" in capsys.readouterr().err
