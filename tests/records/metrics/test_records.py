"""Test the record files of a run, and how a resumed run continues them."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import shutil
import warnings
from pathlib import Path

import pytest

from realign.errors import ConfigError
from realign.records.checkpoint.folder import list_checkpoints
from realign.records.metrics.records import JsonLinesWriter
from realign.runtime import CheckpointSpec, run
from tests.disk import OTHERS
from tests.toys import experiment


def test_lines_are_json_and_written_at_once(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = JsonLinesWriter(path)
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
    lines = JsonLinesWriter(tmp_path / "m.jsonl")
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
    lines = JsonLinesWriter(tmp_path / "m.jsonl")
    full[0] = 0
    with pytest.warns(UserWarning, match="cannot be written"):
        lines.write({"step": 1})
    assert lines.sync() == 0
    full[0] = None
    with pytest.warns(UserWarning, match="can be written again"):
        assert lines.sync() == len('{"step": 1}\n')
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n'
    lines.close()


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_file_that_vanishes_is_begun_anew_at_its_path(tmp_path, how):
    folder = tmp_path / "run"
    folder.mkdir()
    lines = JsonLinesWriter(folder / "m.jsonl")
    lines.write({"step": 1})
    if how == "moved":
        folder.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(folder)
    with pytest.warns(UserWarning, match=r"m\.jsonl was removed or moved during the run"):
        lines.write({"step": 2})
    lines.write({"step": 3})
    lines.close()
    assert (folder / "m.jsonl").read_text() == '{"step": 2}\n{"step": 3}\n'
    if how == "moved":
        assert (tmp_path / "elsewhere" / "m.jsonl").read_text() == '{"step": 1}\n'


def test_an_earlier_file_is_kept_as_far_as_asked(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    lines = JsonLinesWriter(path, keep_bytes=12)
    lines.write({"step": 9})
    lines.close()
    assert path.read_text() == '{"step": 1}\n{"step": 9}\n'
    JsonLinesWriter(path, keep_bytes=10**6).close()
    assert path.read_text() == '{"step": 1}\n{"step": 9}\n'
    JsonLinesWriter(path).close()
    assert path.read_bytes() == b""


NAMES = ("metrics", "samples", "eval_samples")
EVERY = CheckpointSpec(every_steps=1, keep=9)


def done(tmp_path: Path) -> Path:
    return run(experiment(tmp_path, steps=3, checkpoint=EVERY, sample_prompts=4)).output_dir


def resumed(tmp_path: Path, **changes) -> Path:
    settings = {"steps": 4, "checkpoint": EVERY, "sample_prompts": 4, "resume": "auto"} | changes
    return run(experiment(tmp_path, **settings)).output_dir


def flip(path: Path, place: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_a_checkpoint_contains_the_hash_of_each_record_file(tmp_path):
    out = done(tmp_path)
    resumed(tmp_path)
    for checkpoint in list_checkpoints(out / "checkpoints"):
        records = checkpoint.read()["records"]
        for name in NAMES:
            kept = (out / f"{name}.jsonl").read_bytes()[: records["sizes"][name]]
            assert records["sha256"][name] == hashlib.sha256(kept).hexdigest()


@pytest.mark.parametrize("where", [0.0, 0.999])
@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_byte_is_reported_and_the_run_continues(tmp_path, name, where):
    out = done(tmp_path)
    path = out / f"{name}.jsonl"
    flip(path, int(where * path.stat().st_size), bit=0)
    with pytest.warns(
        UserWarning, match=rf"{name}\.jsonl was changed after the checkpoint of step 3 \(sha256 mismatch"
    ):
        resumed(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is reported once
        if name != "metrics":
            resumed(tmp_path, steps=5)


def test_a_byte_after_those_that_the_checkpoint_counts_is_truncated_without_a_report(tmp_path):
    out = done(tmp_path)
    with (out / "samples.jsonl").open("a") as file:
        file.write("torn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed(tmp_path)
    assert all(json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines())


def test_the_records_of_another_run_are_compared_before_they_are_copied(tmp_path):
    out = done(tmp_path)
    flip(out / "samples.jsonl", 5, 0)
    with pytest.warns(UserWarning, match=r"run/samples\.jsonl was changed after the checkpoint of step 3"):
        resumed(tmp_path, resume=str(out), output_dir=tmp_path / "branch")


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_record_file_ends_the_run_at_once(tmp_path, name, kind):
    out = tmp_path / "run"
    out.mkdir()
    (tmp_path / "there").write_text("secret")
    OTHERS[kind](out / f"{name}.jsonl")
    with pytest.raises(ConfigError, match=rf"{name}\.jsonl' is (not a regular file|a link to)"):
        run(experiment(tmp_path, steps=1))


def test_the_hash_is_that_of_the_complete_lines_after_a_write_that_failed(tmp_path, monkeypatch):
    lines = JsonLinesWriter(tmp_path / "lines.jsonl")
    lines.write({"a": 1})

    class Torn:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def write(self, data):
            self._file.write(data[:3])
            raise OSError("full")

    file = lines._file
    lines._file = Torn(file)
    with pytest.warns(UserWarning, match="cannot be written"):
        lines.write({"a": 2})
    lines._file = file
    with pytest.warns(UserWarning, match="can be written again"):
        lines.write({"a": 3})
    lines.sync()
    assert lines.sha256 == hashlib.sha256((tmp_path / "lines.jsonl").read_bytes()).hexdigest()
    assert (tmp_path / "lines.jsonl").read_text().count("\n") == 3
    lines.close()
