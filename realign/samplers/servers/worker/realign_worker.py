"""`WeightReceiver`: lets a server of vLLM take updates that contain only changed weights; and the format of these.

    --worker-extension-cls realign_worker.WeightReceiver

The environment of the server need not have realign, so this file imports only torch and the standard library.

A full update is a folder of safetensors files. A delta is one safetensors file per rank of the run. It contains the new
bits of the changed elements, not differences, so that applying it twice does no harm. For each changed weight it has
the tensors `NAME:counts`, the number of changes in each block of 65,536 elements; `NAME:low`, the positions in the
blocks; and `NAME:values`. The digest of the result is a sha256 over all weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in safetensors files."""
MODEL_FILES = "model*.safetensors"
BLOCK = 2**16
_LARGEST_HEADER = 100 * 2**20
_COUNTS, _LOW, _VALUES = ":counts", ":low", ":values"
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
T = TypeVar("T")


def map_file(path: str | Path, *, writable: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, mapped into memory. Only a writable mapping changes the file.

    Raises:
        ValueError: the file is damaged.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        # A damaged length must not make `read` allocate that much.
        if length > min(size - 8, _LARGEST_HEADER):
            raise ValueError(f"{path}: the header is longer than the file")
        header = json.loads(file.read(length))
    bytes_N = torch.from_file(str(path), shared=writable, size=size, dtype=torch.uint8)[8 + length :]
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            if not 0 <= start <= end <= len(bytes_N):
                raise ValueError(f"{path}: {name} lies outside of the file")
            tensors[name] = bytes_N[start:end].view(DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors


def map_folder(folder: str | Path, *, writable: bool = False) -> dict[str, Tensor]:
    """Return the tensors of the model files in a folder; see `map_file`."""
    files = sorted(Path(folder).glob(MODEL_FILES))
    return {name: x for file in files for name, x in map_file(file, writable=writable).items()}


def bits(x: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, which are equal also for NaN, and differ for 0 and -0."""
    return x.view(_BITS[x.element_size()])


def digest(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 of the names, dtypes, shapes and bits of contiguous weights on the CPU."""

    def line(name: str) -> str:
        x = weights[name]
        # The bytes in place, without a copy: `hashlib` also releases the interpreter, so that threads help.
        content = hashlib.sha256(x.reshape(-1).view(torch.uint8).numpy().data)
        return f"{name} {x.dtype} {list(x.shape)} {content.hexdigest()}\n"

    return hashlib.sha256("".join(_in_threads(line, sorted(weights))).encode()).hexdigest()


def changes(name: str, old: Tensor, new: Tensor, whole: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a delta for a weight, or for a part of it; empty if nothing changed.

    Args:
        name: name of the weight.
        old: the bits of the part before.
        new: the part now, as a view of `whole`.
        whole: the weight, contiguous.
    """
    # One row of positions instead of one for each dimension: `nonzero` returns one number per change.
    if new.is_contiguous():
        old, new = old.reshape(-1), new.reshape(-1)
    places = (bits(old) != bits(new)).nonzero()
    if not len(places):
        return {}
    offset = int(new.storage_offset()) - int(whole.storage_offset())
    positions = (places * torch.tensor(new.stride())).sum(-1) + offset
    return {
        name + _COUNTS: (positions // BLOCK).bincount(minlength=-(-whole.numel() // BLOCK)).to(torch.int32),
        name + _LOW: (positions % BLOCK).to(torch.uint16),
        name + _VALUES: whole.view(-1)[positions],
    }


def apply(delta: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Write the changes of a delta into contiguous weights.

    Raises:
        LookupError: the delta belongs to other weights.
    """

    def change(name: str) -> None:
        counts, low = delta[name + _COUNTS].long(), delta[name + _LOW].long()
        positions = torch.arange(len(counts)).repeat_interleave(counts) * BLOCK + low
        bits(weights[name]).view(-1)[positions] = bits(delta[name + _VALUES])

    _in_threads(change, [key.removesuffix(_LOW) for key in delta if key.endswith(_LOW)])


def _in_threads(function: Callable[[str], T], names: Iterable[str]) -> list[T]:
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as threads:
        return list(threads.map(function, names))


class _Copy:
    """The weights of a server in anonymous memory, which other processes of the user open under `paths`.

    The memory has no name in any folder, and is freed when the processes end, however they end.
    """

    def __init__(self, folder: str) -> None:
        self._files = []
        for source in sorted(Path(folder).glob(MODEL_FILES)):
            file = os.fdopen(os.memfd_create(source.name), "wb")
            with source.open("rb") as content:
                shutil.copyfileobj(content, file, 2**24)
            file.flush()
            self._files.append(file)
        self.paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._files]
        self.weights = {name: x for path in self.paths for name, x in map_file(path, writable=True).items()}
        self.digest: str | None = digest(self.weights)

    def close(self) -> None:
        """Free the memory, as soon as no process has it mapped."""
        self.digest = None
        self.weights.clear()
        for file in self._files:
            file.close()


class WeightReceiver:
    """Methods that vLLM adds to its workers. `/collective_rpc` calls them on all workers of a server.

    The first worker keeps a copy of the weights in the memory of the host, and all workers load it.
    """

    rank: int
    model_runner: Any
    _realign_copy: _Copy | None = None

    def realign_receive(self, folder: str) -> dict[str, Any] | None:
        """Copy the weights of a folder, and return the digest and the place of the copy."""
        if self.rank:
            return None
        if self._realign_copy is not None:  # first, since two copies may not fit
            self._realign_copy.close()
            self._realign_copy = None
        self._realign_copy = _Copy(folder)
        return self._realign_state()

    def realign_change(self, folder: str, base: str) -> dict[str, Any] | None:
        """Apply the deltas of a folder, if the copy has the digest `base`; see `realign_receive`."""
        if self.rank:
            return None
        copy = self._realign_copy
        if copy is not None and copy.digest == base:
            copy.digest = None  # the copy is neither the old nor the new one if this fails
            for file in sorted(Path(folder).glob(MODEL_FILES)):
                apply(map_file(file), copy.weights)
            copy.digest = digest(copy.weights)
        return self._realign_state()

    def _realign_state(self) -> dict[str, Any]:
        copy = self._realign_copy
        return {"digest": None, "paths": []} if copy is None else {"digest": copy.digest, "paths": copy.paths}

    def realign_load(self, paths: list[str]) -> None:
        """Load the copy into the model."""
        self.model_runner.reload_weights(weights_iterator=_tensors(paths))


def _tensors(paths: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    for path in paths:
        yield from map_file(path).items()
