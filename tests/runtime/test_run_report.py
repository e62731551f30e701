"""Test when the summary is shown, and which commands it suggests."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import subprocess

import pytest
from rich.console import Console

from realign.api import Callback, CallbackResult
from realign.ranks import Ranks, command_words
from realign.runtime import Interrupted, run
from realign.runtime.run_report import git_state, parent_of
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
    monkeypatch.setattr("realign.ranks.current", lambda: Ranks(0, 4))
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


@pytest.mark.parametrize("step", ["1e999", "-1e999", "NaN", "null", '"x"', "[]", "9" * 5000])
def test_a_parent_without_a_step_is_none(tmp_path, step):
    (tmp_path / "run.json").write_text(f'{{"parent": {{"run": "x", "step": {step}}}}}')
    assert parent_of(tmp_path) is None


A, B = "a" * 40, "b" * 40


def repository(folder, **files):
    """Write files of `.git`; a double underscore in a name is a slash."""
    for name, text in {"HEAD": "ref: refs/heads/main\n", **files}.items():
        path = folder / ".git" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return git_state(folder)


def test_the_commit_is_that_of_the_branch(tmp_path):
    assert git_state(tmp_path) is None
    assert repository(tmp_path) is None  # no commit yet
    packed = f"# pack-refs\n{B} refs/heads/other\n{A} refs/heads/main\n^{B}\n"
    assert repository(tmp_path, **{"packed-refs": packed}) == {"commit": A, "branch": "main"}
    assert repository(tmp_path, refs__heads__main=f"{B}\n") == {"commit": B, "branch": "main"}
    assert repository(tmp_path, HEAD=f"{A}\n") == {"commit": A, "branch": "HEAD"}
    (tmp_path / "below").mkdir()
    assert git_state(tmp_path / "below") == {"commit": A, "branch": "HEAD"}


def test_git_is_not_run_and_neither_are_its_programs(tmp_path, monkeypatch):
    """A filter of the repository runs in `git status` when a file is touched."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / "bin" / "git").chmod(0o755)
    config = f'[filter "x"]\n\tclean = touch {tmp_path}/ran\n[core]\n\tfsmonitor = touch {tmp_path}/ran\n'
    (tmp_path / ".gitattributes").write_text("* filter=x\n")
    assert repository(tmp_path, HEAD=A, config=config) == {"commit": A, "branch": "HEAD"}
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="compares with git")
def test_the_commit_is_that_which_git_says(tmp_path):
    def git(*words, folder=tmp_path):
        set_up = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "init.defaultBranch=main"]
        done = subprocess.run(["git", *set_up, *words], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.split()

    git("init")
    git("commit", "--allow-empty", "-m", "one")
    git("worktree", "add", "-b", "topic/a", "tree")
    git("commit", "--allow-empty", "-m", "two", folder=tmp_path / "tree")
    for packed in (False, True):
        for folder in (tmp_path, tmp_path / "tree"):
            commit, branch = git("rev-parse", "HEAD", "--abbrev-ref", "HEAD", folder=folder)
            assert git_state(folder) == {"commit": commit, "branch": branch}, packed
        git("pack-refs", "--all")
