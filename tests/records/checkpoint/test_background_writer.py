from __future__ import annotations

import errno
import os
import threading
import warnings

import pytest

from realign.own_files import OwnFiles
from realign.records.checkpoint import folder
from realign.records.checkpoint.folder import CheckpointWriter, HashedFile, list_checkpoints, newest, write_checkpoint
from tests.records.checkpoint.trees import is_tree, names, refuse, tree, written


def test_leftovers_go_at_the_next_start_and_the_next_write_and_nothing_else(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    folder = tmp_path / "checkpoints"
    written(folder, 1)

    def leave():
        (OwnFiles(folder).scratch("step_000002") / "state.json").write_text("{")

    (folder / ".step_000003.link").symlink_to(outside)
    for name in (".git", ".step_000003.0123abcd"):  # not in the list of the folder
        (folder / name).mkdir()
    stays = [".git", ".step_000003.0123abcd", ".step_000003.link", "step_000001"]
    leave()
    CheckpointWriter(folder, keep=2)
    assert names(folder) == stays
    leave()
    written(folder, 4)
    assert names(folder) == [*stays, "step_000004"]
    assert names(outside) == ["precious"]


def test_the_last_ones_stay(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=2)
    for step in range(1, 6):
        assert writer.write(step, tree(step)) >= 0
    writer.close()
    assert names(tmp_path) == ["step_000004", "step_000005"]
    assert all(is_tree(c.read(), c.step) for c in list_checkpoints(tmp_path))
    assert writer.take_failures() == []


def test_the_best_one_stays_until_another_is(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=1)
    for step, best, stay in ((1, None, [1]), (2, 2, [2]), (3, 2, [2, 3]), (4, 2, [2, 4]), (5, 4, [4, 5])):
        writer.write(step, tree(step), best=best)
        writer.close()
        assert names(tmp_path) == [f"step_{n:06d}" for n in stay]


def test_a_run_that_went_back_keeps_its_own_checkpoints(tmp_path):
    written(tmp_path, 10, 20)
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.write(12, tree(12))
    writer.close()
    assert names(tmp_path) == ["step_000012"]


def test_what_training_does_meanwhile_does_not_reach_the_file(tmp_path, monkeypatch):
    going = threading.Event()
    write = folder.write_packed

    def waits(*args):
        assert going.wait(60)
        return write(*args)

    monkeypatch.setattr(folder, "write_packed", waits)
    live = tree(1)
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.write(1, live)
    live["moments"][0] += 1
    live["state"][1].append("later")
    going.set()
    writer.close()
    assert is_tree(newest(tmp_path, refuse)[1], 1)


def test_what_cannot_be_kept_is_refused_before_training_goes_on(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=1)
    with pytest.raises(ValueError, match="a/b: type object cannot be saved"):
        writer.write(1, {"a": {"b": object()}})
    with pytest.raises(ValueError, match="a/b: type object cannot be saved"):
        write_checkpoint(tmp_path, 1, {"a": {"b": object()}})
    assert names(tmp_path) == []


class Full:
    """Disk operation that fails with a full disk from the `at`-th call on."""

    def __init__(self, function, at):
        self.function, self.at, self.calls = function, at, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls >= self.at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.function(*args)


@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("call", ["fsync", "write"])
def test_a_full_disk_leaves_the_old_checkpoint_and_says_so(tmp_path, monkeypatch, call, at):
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.write(1, tree(1))
    writer.close()
    with monkeypatch.context() as patch:
        if call == "fsync":
            patch.setattr(os, "fsync", Full(os.fsync, at))
        else:
            full = Full(HashedFile.write, min(at, 4))
            patch.setattr(HashedFile, "write", lambda *args: full(*args))
        writer.write(2, tree(2))
        writer.close()
    [message] = writer.take_failures()
    assert message.startswith("Checkpoint at step 2 failed (")
    assert "No space left on device" in message
    assert writer.take_failures() == []
    if (call, at) == ("fsync", 5):  # the last call: the folder has its name, which may not be on disk
        assert names(tmp_path) == ["step_000001", "step_000002"]
    else:
        assert message.endswith("Last good checkpoint: step 1.")
        assert names(tmp_path) == ["step_000001"]
    assert is_tree(list_checkpoints(tmp_path)[0].read(), 1)
    writer.write(3, tree(3))
    writer.close()
    assert writer.take_failures() == []
    assert names(tmp_path) == ["step_000003"]


def test_an_old_checkpoint_that_cannot_be_removed_is_no_failed_write(tmp_path, monkeypatch):
    written(tmp_path, 1)
    writer = CheckpointWriter(tmp_path, keep=1)

    def stuck(own, *names):
        raise PermissionError(errno.EACCES, "Permission denied", names[0])

    monkeypatch.setattr(OwnFiles, "remove", stuck)
    writer.write(2, tree(2))
    writer.close()
    assert "no longer needed could not be removed" in writer.take_failures()[0]
    assert is_tree(newest(tmp_path, refuse)[1], 2)


@pytest.mark.parametrize("step", [1, 2])
def test_a_checkpoint_with_a_file_of_somebody_else_gets_another_name(tmp_path, step):
    """So `resume=auto` doesn't find it, and nothing is lost."""
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.write(1, tree(1))
    writer.close()
    (tmp_path / "step_000001" / "notes.txt").write_text("mine")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        writer.write(step, tree(2))
        writer.close()
    [message] = writer.take_failures() or [str(warning.message) for warning in told]
    assert "notes.txt was not written by" in message
    assert "was moved to" in message
    assert names(tmp_path) == sorted(["step_000001.1", f"step_{step:06d}"])
    assert (tmp_path / "step_000001.1" / "notes.txt").read_text() == "mine"
    assert is_tree(newest(tmp_path, refuse)[1], 2)
