"""Run the first program of the README as it stands on the real model, and compare with the result printed below it.

`test_docs` runs the same text with a tiny model in place of the real one.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys

import pytest

import realign
from realign.demo.smollm2 import smollm2
from tests.demo.reasoning_package import REAL, REASON
from tests.docs.pages import HUB_MODEL, PROGRAM, ROOT

PAGES = ("README.md", "docs/quickstart-python.md")
STATED = re.compile(
    r"In the first three steps (\d+)% of the sampled answers are right, in the last three (\d+)%.+?(\d+) GiB", re.DOTALL
)
SHOWN = re.compile(r"^step (\d+): reward 1  (.+)$", re.MULTILINE)


def below_the_program(name: str) -> str:
    """Return what a page says about the result of its first program."""
    text = (ROOT / name).read_text(encoding="utf-8").split(PROGRAM)[1]
    return re.split(r"^(?:The same from a shell|The first argument)", text, flags=re.MULTILINE)[0]


def test_both_pages_state_the_same_result():
    readme, quickstart = map(below_the_program, PAGES)
    assert readme == quickstart
    assert STATED.search(readme) is not None
    assert SHOWN.search(readme) is not None


@pytest.mark.slow
@pytest.mark.very_slow
@pytest.mark.skipif(not REAL, reason=REASON)
def test_the_readme_prints_what_its_first_program_does(tmp_path):
    """The rates are those of 96 answers each, and CPUs round differently: within 0.2, four standard errors."""
    folder = tmp_path / HUB_MODEL  # a local folder takes precedence over the hub
    folder.parent.mkdir()
    folder.symlink_to(smollm2())
    (tmp_path / "first.py").write_text(PROGRAM, encoding="utf-8")
    settings = {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "first.py"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stated = STATED.search(below_the_program("README.md"))
    *rates, memory = map(float, stated.groups())
    rewards = realign.Run(tmp_path / "runs/grpo").series("reward")
    measured = [sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3]
    assert measured == pytest.approx([rate / 100 for rate in rates], abs=0.2)
    assert measured[1] > measured[0] + 0.1
    assert len(SHOWN.findall(done.stdout)) == 3
    assert (tmp_path / "runs/grpo/curves.png").is_file()
    assert (tmp_path / "my-model/model.safetensors").is_file()
    # kibibytes of the largest child of this process
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    assert used < memory
