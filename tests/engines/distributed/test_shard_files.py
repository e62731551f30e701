"""Test tensor files shared by several processes. Tests with several processes are in `test_sharded_engine.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint

from realign.engines.distributed import shard_files
from realign.engines.distributed.shard_files import (
    OFFSETS,
    Saved,
    Shard,
    file_of,
    read_saved,
    read_shards,
    shards_to_write,
)
from realign.ranks import Ranks
from realign.records.checkpoint.serialize import write_tensors

TENSORS = {"a/b": torch.arange(6.0).view(2, 3), "c": torch.tensor([True, False]), "d": torch.zeros(0, 4)}
CUTS = {0: ([0, 0], [0]), 1: ([1, 0], [1])}
"""Offsets of the shards of `a/b` and `c` on two ranks."""


def write(folder: Path) -> None:
    """Write the files of two ranks, the rows of each tensor divided between them."""
    folder.mkdir(exist_ok=True)
    for rank in (0, 1):
        tensors = {"a/b": TENSORS["a/b"][rank : rank + 1], "c": TENSORS["c"][rank : rank + 1]}
        offsets = {name: {"saved_offsets": at} for name, at in zip(tensors, CUTS[rank], strict=True)}
        with (folder / file_of(rank)).open("wb") as file:
            write_tensors(file.write, tensors, {"format": "pt", OFFSETS: json.dumps(offsets)})


def test_one_process_writes_and_reads_whole_tensors(tmp_path: Path) -> None:
    with (tmp_path / file_of(0)).open("wb") as file:
        write_tensors(file.write, *shards_to_write(TENSORS, Ranks()))
    saved = read_saved(tmp_path)
    assert saved.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        assert torch.equal(saved[name], x)
        assert saved[name].dtype == x.dtype


def test_shards_of_several_ranks_are_one_tensor_here_and_in_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "RELEASED", 1)  # files are closed and opened again
    write(tmp_path / "parts")
    saved = read_saved(tmp_path / "parts")
    theirs = {name: torch.empty_like(x) for name, x in saved.items()}
    reader = checkpoint.HuggingFaceStorageReader(str(tmp_path / "parts"))
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        checkpoint.load(dict(theirs), storage_reader=reader, no_dist=True)
    for name in ("a/b", "c"):
        assert torch.equal(saved[name], TENSORS[name])
        assert torch.equal(theirs[name], TENSORS[name])


def test_a_copy_of_a_shard_does_not_stand_in_for_a_missing_one(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / file_of(1)).write_bytes((tmp_path / file_of(0)).read_bytes())  # rank 0 has the first row of two
    with (tmp_path / file_of(2)).open("wb") as file:
        offsets = json.dumps({"a/b": {"saved_offsets": [2, 0]}})
        write_tensors(file.write, {"a/b": TENSORS["a/b"][1:]}, {"format": "pt", OFFSETS: offsets})
    with pytest.raises(ValueError, match="a part of 'a/b' is missing"):
        read_saved(tmp_path)


def test_what_is_not_in_the_files_is_told(tmp_path: Path) -> None:
    write(tmp_path / "parts")
    file = tmp_path / "parts" / file_of(0)
    rows = slice(0, 3)
    with pytest.raises(ValueError, match=r"parts: .*other"):
        read_shards([(Saved("other", torch.float32, [Shard(file, (slice(0, 2),))]), torch.zeros(2))])
    part = Saved("a/b", torch.float32, [Shard(file, (slice(0, 1), rows))])
    with pytest.raises(ValueError, match=r"parts: a part of 'a/b' is missing"):
        read_shards([(part, torch.zeros(2, 3))])
    file.unlink()
    with pytest.raises(ValueError, match=r"parts: No such file"):
        read_shards([(part, torch.zeros(2, 3))])
