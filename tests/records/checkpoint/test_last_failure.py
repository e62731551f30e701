from __future__ import annotations

import errno
import json
import os
from datetime import datetime, timedelta

import pytest

from realign.errors import ConfigError, RunError
from realign.own_files import FILES, OwnFiles
from realign.records.checkpoint.last_failure import NAME, last_failure, record_end, recorder
from tests.disk import OTHERS


def checkpointed(run, step):
    (run / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)


def test_failures_at_the_same_step_are_counted_and_progress_starts_the_count_again(tmp_path):
    assert [record_end(tmp_path, 75, "disk full").count for _ in range(3)] == [1, 2, 3]
    checkpointed(tmp_path, 10)
    failure = record_end(tmp_path, 75, "disk full")
    assert (failure.step, failure.count) == (10, 1)
    assert record_end(tmp_path, 75, "disk full").count == 2


def test_only_the_first_failure_of_an_attempt_is_recorded(tmp_path):
    """Several ranks may record the end of one attempt, for example if the machine of the launcher failed."""
    first = record_end(tmp_path, 2, "out of memory", "a1")
    assert record_end(tmp_path, 75, "lost rank 1", "a1") == last_failure(tmp_path) == first
    assert record_end(tmp_path, 2, "out of memory", "a2").count == 2


def test_a_configuration_error_is_not_recorded(tmp_path):
    record = recorder(tmp_path, "a1")
    record(ConfigError("unknown key"), 2)
    assert last_failure(tmp_path) is None
    record(RunError("out of memory"), 2)
    assert last_failure(tmp_path).message == "out of memory"


def test_the_file_contains_step_time_exit_code_message_count_and_attempt(tmp_path):
    checkpointed(tmp_path, 3)
    checkpointed(tmp_path, 5)
    failure = record_end(tmp_path, 75, 'the judge at "http://x" does not answer: \ud800', "a1")
    assert last_failure(tmp_path) == failure
    written = json.loads((tmp_path / NAME).read_text())
    assert datetime.fromisoformat(written.pop("time")).utcoffset() == timedelta(0)
    message = 'the judge at "http://x" does not answer: \ud800'
    assert written == {"step": 5, "exit_code": 75, "message": message, "count": 1, "attempt": "a1"}
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [FILES, NAME]


def test_success_removes_the_file_and_a_signal_leaves_it(tmp_path):
    failure = record_end(tmp_path, 75, "disk full")
    for code in (130, 143):
        assert record_end(tmp_path, code, "stopped after step 3") is None
    assert last_failure(tmp_path) == failure
    assert record_end(tmp_path, 0) is None
    assert last_failure(tmp_path) is None
    assert record_end(tmp_path, 0) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 3}', '{"step": "x"}', "[" * 100000])
def test_a_damaged_file_counts_as_none(tmp_path, text):
    OwnFiles(tmp_path).claim(NAME)
    (tmp_path / NAME).write_text(text)
    assert last_failure(tmp_path) is None
    assert record_end(tmp_path, 75, "disk full").count == 1


def test_a_full_disk_gives_a_warning_and_keeps_the_earlier_record(tmp_path, monkeypatch):
    failure = record_end(tmp_path, 75, "disk full")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match=r"last_failure\.json could not be written .*No space left"):
        assert record_end(tmp_path, 75, "disk full") is None
    assert last_failure(tmp_path) == failure
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILES, NAME]


@pytest.mark.parametrize("kind", OTHERS)
def test_what_no_run_wrote_in_place_of_the_file_stays(tmp_path, kind):
    (tmp_path / "there").write_text("precious")
    os.mkfifo(tmp_path / "queue")
    OTHERS[kind](tmp_path / NAME)
    with pytest.warns(UserWarning, match="could not be written"):
        assert record_end(tmp_path, 75, "disk full") is None
    assert record_end(tmp_path, 0) is None
    assert os.path.lexists(tmp_path / NAME)
    assert (tmp_path / "there").read_text() == "precious"
