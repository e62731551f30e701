"""Compile `device.cpp` once per version of torch. This module does not import torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
NO_COMPILER = "no C++ compiler is installed"


def compiler() -> str | None:
    """Return the C++ compiler; None if there is none."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def library() -> Path:
    """Return the compiled library, compiling it if the source or torch has changed (10 to 40 s).

    Raises:
        RuntimeError: there is no compiler, or the source does not compile.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    key = hashlib.sha256(SOURCE.read_bytes() + importlib.metadata.version("torch").encode() + bytes(torch))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "realign" / "virtual_cuda"
    built = cache / f"{key.hexdigest()[:16]}.so"
    if not built.exists():
        _compile(torch, built)
    return built


def _compile(torch: Path, built: Path) -> None:
    program = compiler()
    if program is None:
        raise RuntimeError(NO_COMPILER)
    built.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    link = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:  # another process may compile at the same time
        made = Path(folder) / "device.so"
        command = [program, "-O1", "-shared", "-fPIC", "-std=c++20", *include, str(SOURCE), "-o", str(made), *link]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{SOURCE.name} does not compile:\n{done.stderr[-4000:]}")
        made.replace(built)
