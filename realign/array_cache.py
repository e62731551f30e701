"""Arrays that never change, on disk under the hash of all that they follow from; runs and processes share them.

An entry is a safetensors file in a private folder. It appears by a rename, so a reader sees all of it or nothing. What
is missing, damaged or writable by others counts as absent, and the caller computes it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from realign.cache_folder import Cache

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

_DIGEST = "sha256"


class ArrayCache(Cache):
    """Entries of arrays by key. Reading and writing never raise: a full or unwritable disk only costs the entry."""

    def __init__(self) -> None:
        """Open the cache of this user."""
        super().__init__("arrays")

    def get(self, key: str) -> Arrays | None:
        """Return the arrays of an entry; None if there is no valid one."""
        with suppress(SafetensorError, ValueError, KeyError, TypeError):
            arrays = load(self.read(f"{key}.safetensors") or b"")
            if arrays.pop(_DIGEST).tobytes() == _digest(key, arrays):
                return arrays
        return None

    def put(self, key: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Store an entry."""
        content = save({**arrays, _DIGEST: np.frombuffer(_digest(key, arrays), dtype=np.uint8)})
        self.write(f"{key}.safetensors", content)


def _digest(key: str, arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return a hash of an entry: safetensors reads flipped bytes without an error."""
    digest = hashlib.sha256(key.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


@cache
def code_version() -> str:
    """Return a hash of the source of this package and of the versions of the packages that compute for it."""
    digest, root = hashlib.sha256(), Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"\n{path.relative_to(root)}\n".encode() + path.read_bytes())
    for package in (
        "torch",
        "transformers",
        "tokenizers",
        "jinja2",
        "numpy",
        "flash-attn",
        "kernels",
        "peft",
        "bitsandbytes",
    ):
        with suppress(PackageNotFoundError):
            digest.update(f"{package} {version(package)}\n".encode())
    return digest.hexdigest()


def key_of(*parts: str) -> str:
    """Return the key of what follows from these texts."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode(errors="surrogatepass")
        digest.update(f"{len(content)} ".encode() + content)
    return digest.hexdigest()


__all__ = ["ArrayCache", "Arrays", "code_version", "key_of"]
