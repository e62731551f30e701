"""Run `test_runs.py` on the GPU of this machine: `pytest -p tests.virtual_cuda.real tests/virtual_cuda`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch


def pytest_configure() -> None:
    if not torch.cuda.is_available():
        pytest.exit("torch finds no CUDA device", returncode=pytest.ExitCode.USAGE_ERROR)


@contextlib.contextmanager
def limit(free: int) -> Iterator[None]:
    """Make the device full after `free` more bytes; further ones raise torch's `OutOfMemoryError`."""
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + free) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
