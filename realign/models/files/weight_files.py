"""Headers of safetensors files, which say where each tensor is, so that a file can be written in parts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""Supported dtypes and their names in safetensors files, in the order of the library, which writes the last first."""

_DTypeShape: TypeAlias = tuple[torch.dtype, Sequence[int]]


@dataclass(frozen=True)
class Header:
    """The first bytes of a safetensors file, and what follows them."""

    content: bytes
    offsets: Mapping[str, int]
    """First byte of each tensor in the file, in the order of the file."""
    size: int
    """Bytes of the file."""

    @classmethod
    def of(cls, tensors: Mapping[str, _DTypeShape], metadata: Mapping[str, str], *, aligned: int = 8) -> Header:
        """Return the header that the safetensors library writes for these tensors.

        Args:
            tensors: dtype and shape of each tensor.
            metadata: texts for the header.
            aligned: the tensors begin at a multiple of this number of bytes; 8 in files of the library.
        """
        rank = {dtype: place for place, dtype in enumerate(DTYPES)}
        # Wide dtypes first, which aligns each tensor.
        order = sorted(tensors, key=lambda name: (-rank[tensors[name][0]], name))
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        starts, end = {}, 0
        for name in order:
            dtype, shape = tensors[name]
            starts[name] = end
            end += torch.Size(shape).numel() * dtype.itemsize
            entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        # The format allows blanks after the header.
        text += b" " * (-(8 + len(text)) % aligned)
        content = len(text).to_bytes(8, "little") + text
        return cls(content, {name: len(content) + start for name, start in starts.items()}, len(content) + end)

    def create(self, path: Path, mode: int = 0o666) -> None:
        """Create a file with this header, and with disk space for all tensors.

        Raises:
            OSError: the file exists, or there is not enough space.
        """
        # Not through a link, and never into a file of somebody else.
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
            file.write(self.content)
            file.flush()
            if sys.platform == "darwin":  # has no such call
                file.truncate(self.size)
            else:
                os.posix_fallocate(file.fileno(), 0, self.size)
