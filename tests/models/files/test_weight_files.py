from __future__ import annotations

import os
import sys

import pytest
import torch
from safetensors.torch import save_file

from realign.models.files.weight_files import DTYPES, Header


def test_a_header_is_what_the_library_writes_for_all_dtypes_and_names(tmp_path):
    tensors = {f"{name}.{n}": torch.zeros(n, 2, dtype=dtype) for dtype, name in DTYPES.items() for n in (2, 0, 1)}
    tensors |= {
        'a "quoted" name\n': torch.zeros(3),
        "naïve.重み": torch.zeros(()),
        "Z": torch.zeros(1),
        "a": torch.zeros(1),
    }
    metadata = {"format": "pt"}
    save_file(tensors, tmp_path / "library", metadata=metadata)
    header = Header.of({name: (x.dtype, x.shape) for name, x in tensors.items()}, metadata)
    content = (tmp_path / "library").read_bytes()
    assert content[: len(header.content)] == header.content
    assert header.size == len(content)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_created_file_has_room_for_its_tensors_and_is_never_an_existing_one(platform, tmp_path, monkeypatch):
    if platform == "darwin":
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    header = Header.of({"a": (torch.float32, [3, 5]), "b": (torch.int64, [1])}, {}, aligned=64)
    header.create(tmp_path / "file", 0o600)
    assert (tmp_path / "file").stat().st_size == header.size == len(header.content) + 60 + 8
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert header.offsets["b"] % 64 == 0
    with pytest.raises(FileExistsError):
        header.create(tmp_path / "file")
