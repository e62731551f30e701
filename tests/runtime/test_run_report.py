"""Test when the summary is shown, and which commands it suggests."""

from __future__ import annotations

import io
import json
import math
import os
import signal

import pytest
from rich.console import Console

from realign.api import Callback, CallbackResult
from realign.engines.distributed.ranks import Ranks, command_words
from realign.runtime import Interrupted, run
from realign.runtime.run_report import parent_of
from tests.toys import experiment

COMMAND = ["experiment=toy", "steps=3", "overwrite=true", "output_dir=a b", "resume=auto"]


def shown(tmp_path, *, fails=None, **changes) -> tuple[str, dict]:
    """Return the output of a run, and its summary.json."""
    out = io.StringIO()
    console = Console(file=out, width=140)
    if fails is None:
        run(experiment(tmp_path, **changes), console=console, command=COMMAND)
    else:
        with pytest.raises(fails):
            run(experiment(tmp_path, **changes), console=console, command=COMMAND)
    return out.getvalue(), json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))


def test_a_completed_run_shows_its_results_and_how_to_train_on(tmp_path):
    text, summary = shown(tmp_path)
    assert "toy: 3 of 3 steps in " in text
    assert summary["files"].keys() == {
        "models",
        "checkpoints",
        "samples",
        "held-out samples",
        "metrics",
        "log",
        "curves",
    }
    assert summary["next_commands"] == {
        "look at curves and samples": f"realign view {tmp_path / 'run'}",
        "chat with the model": f"realign chat {tmp_path / 'run' / 'final' / 'actor'}",
        "train for more steps": "realign experiment=toy 'output_dir=a b' resume=auto steps=6",
        "check another setting": "realign check experiment=toy steps=3 KEY=VALUE",
    }
    assert (tmp_path / "run" / "curves.png").is_file()


def test_under_torchrun_the_commands_start_its_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("realign.engines.distributed.ranks.current", lambda: Ranks(0, 4))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    _, summary = shown(tmp_path)
    on = "torchrun --nproc-per-node 4 -m realign"
    assert summary["next_commands"]["train for more steps"].startswith(f"{on} experiment=toy 'output_dir=a b' resume")
    assert summary["next_commands"]["check another setting"].startswith("realign check ")
    (attempt,) = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"]
    assert attempt["command"][:5] == on.split()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert command_words()[:3] == ["torchrun", "--nnodes", "2"]
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert command_words() == ["realign"]  # another launcher


def test_a_stopped_run_shows_how_to_continue_without_its_callback(tmp_path):
    class Stops(Callback):
        def on_step(self, event):
            return CallbackResult(stop="enough")

    text, summary = shown(tmp_path, callbacks={"stop": Stops()})
    assert "toy: stopped after 1 of 3 steps in " in text
    assert "callbacks.stop: enough" in text
    assert summary["next_commands"]["continue"].endswith("resume=auto callbacks.stop=null")


def test_an_interrupted_run_shows_how_to_resume(tmp_path):
    class Interrupts(Callback):
        def on_step(self, event):
            if event.step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    text, summary = shown(tmp_path, fails=Interrupted, callbacks={"stop": Interrupts()})
    assert "toy: interrupted after 2 of 3 steps in " in text
    assert summary["next_commands"] == {
        "look at curves and samples": f"realign view {tmp_path / 'run'}",
        "continue": "realign experiment=toy steps=3 'output_dir=a b' resume=auto",
        "check another setting": "realign check experiment=toy steps=3 KEY=VALUE",
    }
    assert "models" not in summary["files"]


def test_a_failed_run_shows_nothing_and_keeps_its_status(tmp_path):
    class Fails(Callback):
        def on_step(self, event):
            raise ValueError("a bug")

    text, summary = shown(tmp_path, fails=ValueError, callbacks={"stop": Fails()})
    assert "steps in" not in text
    assert (summary["status"], summary["reason"], summary["step"]) == ("failed", "a bug", 0)


def test_a_run_from_python_suggests_no_command_line(tmp_path):
    out = run(experiment(tmp_path)).output_dir
    assert json.loads((out / "summary.json").read_text())["next_commands"].keys() == {
        "look at curves and samples",
        "chat with the model",
    }


def test_a_resumed_run_keeps_its_id_and_a_new_run_in_its_folder_gets_another(tmp_path):
    ids = []
    for changes in ({}, {"steps": 4, "resume": "auto"}, {"overwrite": True}):
        run(experiment(tmp_path, **changes), console=Console(file=io.StringIO()))
        ids.append(json.loads((tmp_path / "run" / "run.json").read_text())["id"])
    assert ids[0] == ids[1] != ids[2]


def test_a_moved_parent_is_found_by_its_id_and_another_run_in_its_place_is_not_taken_for_it(tmp_path):
    def write(name, **info):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "run.json").write_text(json.dumps(info))
        return tmp_path / name

    fork = write("fork", id="2", parent={"run": "/gone/a", "id": "1", "step": 3})
    assert parent_of(fork) == (tmp_path / "a", 3)  # nothing to find: a message names this folder
    write("a", id="7", parent=None)
    renamed = write("renamed", id="1", parent=None)
    assert parent_of(fork) == (renamed, 3)
    write("fork", id="2", parent={"run": "/gone/a", "step": 3})  # of an earlier version
    assert parent_of(fork) == (tmp_path / "a", 3)
    for step in (math.inf, math.nan, None, "x"):
        assert parent_of(write("odd", parent={"run": "a", "step": step})) is None
