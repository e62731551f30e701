"""Searches over settings: `realign --trials N`."""

from __future__ import annotations

import json
import re
import sys

import pytest
import yaml

from realign.cli import commands as cli
from tests.config_parts import write_experiment

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


def test_without_optuna_the_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert cli.main([*WORDS, METRIC, "--trials", "2", "seed=1,2"]) == 2
    assert "--trials needs optuna. Run pip install 'realign-rl[search]'." in capsys.readouterr().err


def test_an_interval_without_trials_is_an_error_that_names_the_option(capsys):
    assert cli.main(["-m", *WORDS, "interfaces.actor.epochs=interval(1,3)"]) == 2
    assert "--trials N searches an interval" in capsys.readouterr().err
