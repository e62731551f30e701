"""Compile `decode_step.cpp` on first use, cache the shared library on disk, and load it.

The library does not depend on torch, so a build takes two seconds. Its file name contains a hash of the source, the
flags of the compiler and the CPU. Concurrent builds are safe: each process compiles to a temporary file, and renames it
to the final name. Loading a library runs its code, so folder and file must not be writable by other users.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from enum import StrEnum
from functools import cache
from pathlib import Path

from realign.cache_folder import cache_folder
from realign.own_files import replace_bytes, why_not_private

SOURCE = Path(__file__).with_name("decode_step.cpp")

COMPILERS = ("c++", "g++", "clang++")
"""Commands that are tried in this order if the variable CXX is not set."""

# Not -ffast-math: it changes what NaN does, and with some versions of GCC the rounding mode of the whole process.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread")

TIMEOUT_S = 300
"""Time limit of a build in seconds. A build takes two seconds on an idle machine."""


class CompiledDecode(StrEnum):
    """Whether decode steps run in a compiled library (on a CPU) or as CUDA graphs."""

    auto = "auto"
    """On a CPU, if a C++ compiler is installed or the library is in the cache; on CUDA, if graphs work."""
    on = "on"
    """Always; without library or graphs, the first rollout raises an error."""
    off = "off"


class LibraryError(Exception):
    """The library cannot be built or loaded. The message is a reason that completes a sentence after "since"."""


@cache
def load_library() -> ctypes.CDLL | LibraryError:
    """Return the library, or the reason why this process has none; the first call builds it if necessary."""
    try:
        return open_library(cache_folder())
    except LibraryError as error:
        return error


def open_library(folder: Path) -> ctypes.CDLL:
    """Load the library from `folder`. If its file is missing or cannot be loaded, build it.

    Raises:
        LibraryError: no compiler is installed, the build failed, the folder is not writable, or other users can write
            to the folder or the file.
    """
    path = folder / f"decode-step-{_key()}.so"
    if path.exists():
        _check_private(folder)
        _check_private(path)
        try:
            return _declare(ctypes.CDLL(str(path)))
        except (OSError, AttributeError):  # damaged: build it again
            pass
    if (compiler := find_compiler()) is None:
        names = os.environ.get("CXX") or ", ".join(COMPILERS)
        raise LibraryError(f"no C++ compiler is installed (tried {names})")
    _build(compiler, path)
    try:
        return _declare(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        raise LibraryError(f"the built library cannot be loaded ({error})") from error


def find_compiler() -> str | None:
    """Return the path of the C++ compiler; None if none is installed."""
    own = os.environ.get("CXX")
    return next((path for name in ([own] if own else COMPILERS) if (path := shutil.which(name))), None)


def _check_private(path: Path) -> None:
    """Raise LibraryError if a user other than this one and root owns the file or folder, or can write to it."""
    if (why := why_not_private(path)) is not None:
        repair = f"Run chmod go-w {path}, or select" if why.startswith("other users") else "Select"
        raise LibraryError(f"{why}, and its code would run. {repair} another folder with XDG_CACHE_HOME")


def _build(compiler: str, path: Path) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(path.parent)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise LibraryError(
            f"{path.parent} is not writable ({error.strerror}). XDG_CACHE_HOME selects another folder"
        ) from error
    try:
        with tempfile.TemporaryDirectory() as scratch:
            built = Path(scratch, path.name)
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
            process = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
            )
            if process.returncode != 0:
                lines = [line for line in (process.stderr or process.stdout).splitlines() if line.strip()]
                first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
                raise LibraryError(f"{compiler} failed with exit code {process.returncode} ({first.strip()[:200]})")
            replace_bytes(path, built.read_bytes(), mode=0o700)
    except subprocess.TimeoutExpired as error:
        raise LibraryError(f"{compiler} did not finish within {TIMEOUT_S} s") from error
    except OSError as error:
        raise LibraryError(f"{compiler} could not run ({error})") from error


def _key() -> str:
    """Return a hash of the source, the flags and the CPU."""
    parts = [SOURCE.read_bytes(), " ".join(FLAGS).encode(), _cpu().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cpu() -> str:
    """Return the architecture and the instruction sets of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = ("flags", "Features", "model", "cpu family")
    features = {line for line in lines if line.partition("\t")[0].strip() in names}
    return "\n".join([platform.machine(), platform.processor(), *sorted(features)])


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument types of the functions in `decode_step.cpp`."""
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.realign_decode.argtypes = [pointer, count, count, count, pointer, pointer, pointer, pointer, count]
    library.realign_store.argtypes = [pointer, count, count, count, count, pointer, count, count]
    library.realign_product.argtypes = [count, pointer, pointer, count, count, pointer, count, count]
    library.realign_logprobs.argtypes = [count, pointer, count, pointer, pointer, pointer]
    for name in ("decode", "store", "product", "logprobs"):
        getattr(library, f"realign_{name}").restype = None
    for question in (library.realign_has_tiles, library.realign_has_wider_vectors):
        question.argtypes, question.restype = [], count
    library.realign_scratch.argtypes, library.realign_scratch.restype = [pointer, count, count], count
    return library
