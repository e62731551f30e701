"""Record files are continued from the bytes that a checkpoint counts; other content is reported."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from pathlib import Path

import pytest

from realign.errors import ConfigError
from realign.runtime import CheckpointSpec, run
from realign.runtime.checkpoint.folder import list_checkpoints
from realign.runtime.metrics.json_lines import JsonLines
from tests.engines.files.test_folders import OTHERS
from tests.runtime.test_step import experiment

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


@pytest.mark.parametrize("bit", [0, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", [0.0, pytest.param(0.3, marks=pytest.mark.slow), 0.999])
@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_byte_is_reported_and_the_run_continues(tmp_path, name, where, bit):
    out = done(tmp_path)
    path = out / f"{name}.jsonl"
    flip(path, int(where * path.stat().st_size), bit)
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


@pytest.mark.parametrize("kind", OTHERS)
def test_the_records_of_another_run_are_regular_files(tmp_path, kind):
    out = done(tmp_path)
    (out / "samples.jsonl").unlink()
    (out / "there").write_text("secret" * 9999)
    OTHERS[kind](out / "samples.jsonl")
    with pytest.raises(ConfigError, match=r"samples\.jsonl' is not a regular file"):
        resumed(tmp_path, resume=str(out), output_dir=tmp_path / "branch")


def test_a_pipe_that_appears_during_the_run_blocks_nothing(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = JsonLines(path)
    lines.write({"a": 1})
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(UserWarning, match="cannot be written after byte 9 .*not a regular file"):
        lines.write({"a": 2})
    path.unlink()
    with pytest.warns(UserWarning, match="can be written again"):
        lines.write({"a": 3})
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [2, 3]
    assert lines.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    lines.close()


def test_the_hash_is_that_of_the_complete_lines_after_a_write_that_failed(tmp_path, monkeypatch):
    lines = JsonLines(tmp_path / "lines.jsonl")
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
