from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
import warnings

import pytest

from realign.runtime.metrics import json_lines
from realign.runtime.metrics.json_lines import JsonLines


def test_lines_are_json_and_written_at_once(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    lines.log(1, {"a": 1.5, "b": math.nan})
    record = json.loads(path.read_text())  # before close, so a killed run keeps its metrics
    assert record.pop("seconds") >= 0
    assert record == {"step": 1, "a": 1.5, "b": None}
    lines.close()


@pytest.fixture
def full(monkeypatch):
    """Simulate a disk with `room` more bytes. `room` is a list of one number; None means unlimited."""
    room: list[int | None] = [None]

    class Disk(io.FileIO):
        def write(self, data):
            if room[0] is None:
                return super().write(data)
            if room[0] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = super().write(bytes(data)[: room[0]])
            room[0] -= written
            return written

    plain = os.fdopen

    def opened(number, mode="r", *arguments, **more):
        return Disk(number, mode) if mode == "ab" else plain(number, mode, *arguments, **more)

    monkeypatch.setattr(os, "fdopen", opened)
    return room


def test_a_full_disk_ends_no_run_tears_no_line_and_loses_none_once_there_is_space(tmp_path, full):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"step": 1})
    full[0] = 5  # half a line
    with pytest.warns(UserWarning, match=r"m\.jsonl cannot be written after byte 12 \(No space left on device\)"):
        lines.write({"step": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned only once
        full[0] = 3
        lines.write({"step": 3})
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n'
    assert lines.size == len('{"step": 1}\n')
    full[0] = None
    with pytest.warns(UserWarning, match=r"can be written again\. No line is missing"):
        lines.write({"step": 4})
    lines.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


def test_lines_that_wait_are_written_when_a_checkpoint_asks_for_the_size(tmp_path, full):
    lines = JsonLines(tmp_path / "m.jsonl")
    full[0] = 0
    with pytest.warns(UserWarning, match="cannot be written"):
        lines.write({"step": 1})
    assert lines.sync() == 0
    full[0] = None
    with pytest.warns(UserWarning, match="can be written again"):
        assert lines.sync() == len('{"step": 1}\n')
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n'
    lines.close()


def test_lines_that_never_found_space_are_counted_at_the_end(tmp_path, full, monkeypatch):
    monkeypatch.setattr(json_lines, "_MOST_WAITING", 2)
    lines = JsonLines(tmp_path / "m.jsonl")
    full[0] = 0
    with pytest.warns(UserWarning, match=r"cannot be written"):
        lines.write({"step": 0})
    for step in range(1, 5):
        lines.write({"step": step})
    with pytest.warns(UserWarning, match=r"m\.jsonl: 5 lines could not be written\. They are lost"):
        lines.close()
    assert (tmp_path / "m.jsonl").read_bytes() == b""


def test_a_torn_line_that_could_not_be_taken_back_at_once_is_taken_back_later(tmp_path, full, monkeypatch):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"step": 1})
    full[0] = 5
    with monkeypatch.context() as patch:
        patch.setattr(type(lines._file), "truncate", lambda self, size: (_ for _ in ()).throw(OSError("busy")))
        with pytest.warns(UserWarning, match="cannot be written"):
            lines.write({"step": 2})
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n{"ste'
    assert lines.size == len('{"step": 1}\n')
    full[0] = None
    with pytest.warns(UserWarning, match="can be written again"):
        lines.write({"step": 3})
    lines.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_file_that_vanishes_is_begun_anew_at_its_path(tmp_path, how):
    folder = tmp_path / "run"
    folder.mkdir()
    lines = JsonLines(folder / "m.jsonl")
    lines.write({"step": 1})
    if how == "moved":
        folder.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(folder)
    with pytest.warns(UserWarning, match=r"m\.jsonl was removed or moved during the run\. A new file starts"):
        lines.write({"step": 2})
    lines.write({"step": 3})
    lines.close()
    assert (folder / "m.jsonl").read_text() == '{"step": 2}\n{"step": 3}\n'
    if how == "moved":
        assert (tmp_path / "elsewhere" / "m.jsonl").read_text() == '{"step": 1}\n'


def test_an_earlier_file_is_kept_as_far_as_asked(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    lines = JsonLines(path, keep_bytes=12)
    lines.write({"step": 9})
    lines.close()
    assert path.read_text() == '{"step": 1}\n{"step": 9}\n'
    JsonLines(path, keep_bytes=10**6).close()
    assert path.read_text() == '{"step": 1}\n{"step": 9}\n'
    JsonLines(path).close()
    assert path.read_bytes() == b""


def test_half_a_surrogate_pair_is_written_as_json_escapes_it(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"response": "a\ud800b"})
    lines.close()
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"response": "a\ud800b"}
