"""Test that checkpoint folders are written atomically and verified when they are read."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from realign.records.checkpoint import folder as folder_module
from realign.records.checkpoint.folder import (
    CorruptCheckpoint,
    list_checkpoints,
    newest,
    render_manifest,
    write_checkpoint,
)
from tests.records.checkpoint.trees import is_tree, names, refuse, written

FILES = ["manifest.json", "state.json", "tensors.safetensors"]


def test_what_was_written_is_read(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    [checkpoint] = written(folder, 10)
    assert (checkpoint.path, checkpoint.step) == (folder / "step_000010", 10)
    assert is_tree(checkpoint.read(), 10)
    assert names(folder) == ["step_000010"]
    assert names(checkpoint.path) == FILES


def test_the_newest_is_the_one_of_the_latest_step(tmp_path):
    assert newest(tmp_path / "none", refuse) is None
    written(tmp_path, 20, 3, 1000000)
    assert [c.step for c in list_checkpoints(tmp_path)] == [3, 20, 1000000]
    checkpoint, tree = newest(tmp_path, refuse)
    assert checkpoint.step == 1000000
    assert is_tree(tree, 1000000)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link(path):
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def be_a_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = [truncate, flip, Path.unlink, link, be_a_folder, lambda path: path.write_bytes(b"")]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=["cut", "flip", "gone", "link", "folder", "empty"])
def test_a_damaged_file_is_named_and_its_checkpoint_skipped(tmp_path, name, damage):
    _, last = written(tmp_path, 5, 6)
    damage(last.path / name)
    with pytest.raises(CorruptCheckpoint, match=f"step_000006/{name}: "):
        last.read()
    told = []
    checkpoint, tree = newest(tmp_path, told.append)
    assert checkpoint.step == 5
    assert is_tree(tree, 5)
    assert len(told) == 1
    assert re.search(f"step 6 cannot be read .*step_000006/{name}: ", told[0])


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_and_every_cut_is_noticed(tmp_path, name):
    checkpoint = write_checkpoint(tmp_path, 1, {"x": torch.zeros(2), "n": 1})
    path = checkpoint.path / name
    data = path.read_bytes()
    for place in range(len(data)):
        for change in (1, 0x20, 0xFF):
            path.write_bytes(data[:place] + bytes([data[place] ^ change]) + data[place + 1 :])
            with pytest.raises(CorruptCheckpoint, match=name):
                checkpoint.read()
        path.write_bytes(data[:place])
        with pytest.raises(CorruptCheckpoint, match=name):
            checkpoint.read()
    path.write_bytes(data)
    assert checkpoint.read()["n"] == 1


def test_what_is_wrong_is_said(tmp_path):
    [checkpoint] = written(tmp_path, 1)
    path = checkpoint.path / "tensors.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(CorruptCheckpoint, match=f"10 bytes, expected {size}"):
        checkpoint.read()
    path.write_bytes(bytes(size))
    with pytest.raises(CorruptCheckpoint, match="changed after it was written"):
        checkpoint.read()
    link(path)
    with pytest.raises(CorruptCheckpoint, match="not a regular file"):
        checkpoint.read()
    path.unlink()
    with pytest.raises(CorruptCheckpoint, match="missing"):
        checkpoint.read()


def test_a_folder_without_a_readable_checkpoint_raises_an_error(tmp_path):
    for checkpoint in written(tmp_path, 1, 2):
        (checkpoint.path / "state.json").unlink()
    told = []
    with pytest.raises(CorruptCheckpoint, match=r"No checkpoint in .* can be read: .*step_000002.*step_000001"):
        newest(tmp_path, told.append)
    assert len(told) == 2


def rewritten(checkpoint, **changes):
    """Write a manifest with a correct hash of its changed content."""
    path = checkpoint.path / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    path.write_bytes(render_manifest({**manifest, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2, "realign": "9.1"}, r"written in format 2 by realign 9\.1; this version reads 1"),
        ({"step": 4}, "the manifest is of step 4, but the folder is of step 3"),
        ({"files": {}}, "must list state.json and tensors.safetensors"),
        ({"files": {"../../secret": {}, "state.json": {}, "tensors.safetensors": {}}}, "must list"),
        ({"files": None}, "manifest.json"),
        ({"files": {"state.json": 1, "tensors.safetensors": []}}, "manifest.json"),
        ({"files": {"state.json": {}, "tensors.safetensors": {}}}, "manifest.json: missing key 'bytes'"),
    ],
)
def test_a_manifest_that_asks_for_something_else_is_refused(tmp_path, changes, message):
    [checkpoint] = written(tmp_path, 3)
    rewritten(checkpoint, **changes)
    with pytest.raises(CorruptCheckpoint, match=message):
        checkpoint.read()


def test_other_files_are_left_alone_and_links_not_followed(tmp_path):
    folder = tmp_path / "checkpoints"
    [checkpoint] = written(folder, 1)
    (checkpoint.path / "notes.txt").write_text("mine")
    for name in ("step_2", "step_0000003", "step_00000x", "best", "..step_000004", ".step_000005.else", "step_٠٠٠٠٠٦"):
        shutil.copytree(checkpoint.path, folder / name)
    (folder / "step_000007").symlink_to(checkpoint.path)
    (folder / "step_000008").write_text("a file")
    assert [c.path.name for c in list_checkpoints(folder)] == ["step_000001"]
    assert is_tree(newest(folder, refuse)[1], 1)


def test_a_file_that_the_system_refuses_to_grow(tmp_path):
    written(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_checkpoint(tmp_path, 2, {"x": torch.zeros(10000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step_000001"]


def killed(*arguments):
    program = Path(__file__).with_name("killed_writers.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(folder_module.__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, program, *map(str, arguments)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_kill_at_any_system_call_of_a_write_costs_at_most_that_checkpoint(tmp_path):
    seen = killed("every_point", tmp_path / "checkpoints")
    assert sum(record["killed"] for record in seen) > 100
    for record in seen:
        assert record["whole"], record
        assert record["warnings"] == []
        valid = [max(record["before"], default=None), record["step"]] if record["killed"] else [record["step"]]
        assert record["newest"] in valid, record
        assert record["after_start"][-1:] == ([record["newest"]] if record["newest"] else [])
        assert record["failed"] == []
        assert not any(name.startswith(".") for name in record["next"]), record
        assert record["next"][-1] == "step_000009"
        assert len(record["next"]) <= record["keep"]


@pytest.mark.slow
def test_writers_killed_at_random_moments_lose_nothing_that_was_complete(tmp_path):
    seen = killed("random", tmp_path / "checkpoints", 40)
    before = 0
    for record in seen:
        assert record["whole"], record
        assert record["warnings"] == []
        assert record["newest"] >= max(record["told"], before), record
        before = record["newest"]
    assert before > 40


def test_the_manifest_says_what_there_is(tmp_path):
    [checkpoint] = written(tmp_path, 7)
    manifest = json.loads((checkpoint.path / "manifest.json").read_text())
    digest = manifest.pop("sha256")
    canonical = (
        subprocess.run(
            ["sha256sum"],
            input=json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode(),
            capture_output=True,
            check=True,
        )
        .stdout.decode()
        .split()[0]
    )
    assert digest == canonical
    assert (manifest["format"], manifest["step"]) == (1, 7)
    for name, facts in manifest["files"].items():
        checksum = subprocess.run(
            ["sha256sum", checkpoint.path / name], capture_output=True, check=True
        ).stdout.decode()
        assert facts == {"sha256": checksum.split()[0], "bytes": (checkpoint.path / name).stat().st_size}
    assert sorted(manifest["files"]) == FILES[1:]
