"""Compare what ranks leave with what one process leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

OWN = {"n_microbatches", "shared_tokens"}
"""Metrics that describe the work of a single rank, which shares the first tokens of its own prompts only."""


class Alone(dict[str, Any]):
    """The results of one process by name, each computed when it is first read."""

    def __init__(self, compute: Callable[[str], Any]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, name: str) -> Any:
        self[name] = self._compute(name)
        return self[name]


def assert_same(actual: Any, wanted: Any, path: str = "") -> None:
    """Compare tensors with absolute tolerance 2e-5, numbers with relative tolerance 1e-5, and all else exactly."""
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=0, msg=lambda text: f"{path}: {text}")
    elif isinstance(wanted, dict):
        assert actual.keys() == wanted.keys(), path
        for key in wanted.keys() - OWN:
            assert_same(actual[key], wanted[key], f"{path}/{key}")
    elif isinstance(wanted, list):
        assert len(actual) == len(wanted), path
        for i, (a, b) in enumerate(zip(actual, wanted, strict=True)):
            assert_same(a, b, f"{path}/{i}")
    elif isinstance(wanted, float):
        assert actual == pytest.approx(wanted, rel=1e-5, abs=1e-5), path
    else:
        assert actual == wanted, path


def assert_same_files(one: Path, other: Path, pattern: str = "model*") -> None:
    names = [sorted(path.name for path in folder.glob(pattern)) for folder in (one, other)]
    assert names[0] == names[1] != []
    for name in names[0]:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
