"""Test the output folder of a run, and its lock."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from realign.errors import ConfigError, TransientError
from realign.runtime import output_folder as exclusive
from realign.runtime import run
from realign.runtime.output_folder import alone_in, check_output_folder, clear_output_folder
from tests.toys import experiment


def test_an_earlier_run_is_not_overwritten_unasked(tmp_path):
    run(experiment(tmp_path))
    with pytest.raises(ConfigError, match="contains an earlier run"):
        run(experiment(tmp_path))
    (tmp_path / "run" / "step_000002").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    run(experiment(tmp_path, overwrite=True))
    # files of the earlier run are not mistaken for those of this run
    assert not (tmp_path / "run" / "step_000002").exists()
    assert (tmp_path / "run" / "notes.txt").exists()


@pytest.mark.parametrize(
    ("resume", "checkpoint", "message"),
    [
        (None, False, r"contains an earlier run\. Choose another folder, or set overwrite=true\.$"),
        (
            None,
            True,
            r"contains an earlier run\. Continue that run with resume=auto, choose another folder, or set",
        ),
        ("auto", False, r"contains an earlier run without a checkpoint, and resume=auto would replace its models\."),
        (
            "elsewhere",
            True,
            r"contains an earlier run, and resume='elsewhere' starts a new one\. Choose another folder\.$",
        ),
    ],
)
def test_a_folder_with_an_earlier_run_is_an_error_that_says_what_to_do(tmp_path, resume, checkpoint, message):
    made = experiment(tmp_path, resume=resume)
    save_model(made.output_dir / "final" / "actor")
    (made.output_dir / "metrics.jsonl").write_text("{}\n")
    if checkpoint:
        (made.output_dir / "checkpoints" / "step_000001").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=rf"^output_dir='.*': the folder {message}" if resume != "elsewhere" else message
    ):
        check_output_folder(made)
    check_output_folder(experiment(tmp_path, resume=resume, overwrite=True))


def save_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


def test_the_empty_folder_of_a_failed_save_holds_no_models_that_a_resume_would_replace(tmp_path):
    made = experiment(tmp_path, resume="auto")
    (made.output_dir / "final" / "actor").mkdir(parents=True)
    (made.output_dir / "metrics.jsonl").write_text("{}\n")
    check_output_folder(made)
    (made.output_dir / "final" / "actor").rmdir()
    check_output_folder(made)
    save_model(made.output_dir / "final" / "critic")
    with pytest.raises(ConfigError, match="would replace its models"):
        check_output_folder(made)


def test_clearing_a_folder_removes_the_files_of_a_run_and_no_others(tmp_path):
    used = tmp_path / "start" / "0123456789abcdef"
    for name in ("final", "step_000002", "checkpoints", "mine", used, "start/0123456789abcdee", "start/mine"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("metrics.jsonl", "curves.png", "notes.txt"):
        (tmp_path / name).write_text("x")
    clear_output_folder(tmp_path, [str(used)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "notes.txt", "start"]
    assert sorted(path.name for path in (tmp_path / "start").iterdir()) == [used.name, "mine"]


HOLDER = """
import sys, time
from pathlib import Path
from realign.runtime.output_folder import alone_in
with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(1000)
"""


def test_a_folder_is_locked_by_one_run_and_free_afterward(tmp_path):
    with alone_in(tmp_path), alone_in(tmp_path.parent):
        for _ in range(2):
            with (
                pytest.raises(TransientError, match=f"output_dir={tmp_path}: another run"),
                alone_in(tmp_path),
            ):
                pass
    with pytest.raises(ZeroDivisionError), alone_in(tmp_path):
        1 / 0  # noqa: B018
    with alone_in(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_killed_process_releases_its_lock(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(exclusive.__file__).parents[3])}
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(TransientError, match="another run is active"), alone_in(tmp_path):
            pass
        holder.kill()
    with alone_in(tmp_path):
        pass


def test_a_disk_without_locks_is_used_without_a_lock(tmp_path, monkeypatch):
    def none(number, how):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", none)
    with alone_in(tmp_path):
        pass


@pytest.mark.parametrize("changes", [{"resume": "auto"}, {"overwrite": True}, {}], ids=str)
def test_a_second_run_does_not_touch_the_records_of_the_first(tmp_path, changes):
    first = experiment(tmp_path, steps=1)
    first.output_dir.mkdir()
    with alone_in(first.output_dir):
        (first.output_dir / "samples.jsonl").write_text("precious\n")
        with pytest.raises(TransientError, match="another run is active"):
            run(experiment(tmp_path, steps=1, **changes))
    assert (first.output_dir / "samples.jsonl").read_text() == "precious\n"
    run(experiment(tmp_path, steps=1, **changes))


def test_a_run_locks_its_folder_from_start_to_end(tmp_path):
    held = []

    class Watcher:
        def log(self, step, metrics):
            with pytest.raises(TransientError, match="another run is active"), alone_in(tmp_path / "run"):
                pass
            held.append(step)

        def close(self):
            pass

    run(experiment(tmp_path, steps=2), trackers=[Watcher()])
    assert held == [0, 1, 2]
    with alone_in(tmp_path / "run"):
        pass
