from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_child_prints_its_peaks():
    """A separate process, as in the benchmark: memory that earlier tests freed would be used again."""
    lines = [
        "from dataclasses import replace",
        "from benchmarks import memory",
        "from benchmarks.memory import CONFIGURATIONS, SMALL, Configuration",
        "tiny = replace(SMALL, name='tiny', hidden=64, layers=2, heads=2, mlp=64, vocabulary=128, max_new=8)",
        "tiny = replace(tiny, prompts=2)",
        "CONFIGURATIONS['tiny'] = Configuration(tiny, budget=64, threads=1)",
        "memory.main(['child=tiny'])",
    ]
    out = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True).stdout
    peaks = json.loads(out.splitlines()[-1])
    assert peaks.keys() == {"training", "rollout"}
    assert peaks["training"] > 0
