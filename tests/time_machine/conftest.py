"""A task, and a run of five steps on it, for the commands on earlier runs."""

from __future__ import annotations

import pytest

from realign.cli import main
from tests.small_task import small_task

REWARD = "def score(prompt, response, row):\n    return len(response) / 5 + (response[:1] in '13579')\n"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Return a folder with a model and prompts in `task`, and a reward function."""
    folder = tmp_path_factory.mktemp("work")
    small_task(folder / "task")
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def train(work):
    """Return a function that trains a small run into runs/NAME."""

    def train(name, *words):
        shared = [
            "models.actor.path=task/model",
            "data.path=task/prompts.jsonl",
            "evaluation=null",
            "interfaces.reward.function=reward.py:score",
            "interfaces.reward.workers=0",
            "interfaces.actor.generation={n: 4, max_new_tokens: 6, temperature: 1.0}",
            *("batch_prompts=4", "checkpoint.every_steps=2", "checkpoint.keep=9"),
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(work)
            assert main([*shared, *words, f"output_dir=runs/{name}"]) == 0

    return train


@pytest.fixture(scope="module")
def finished(work, train):
    """Return the folder in which a run of five steps is in runs/a, with checkpoints after steps 2, 4 and 5."""
    train("a", "experiment=grpo_arithmetic", "steps=5")
    return work
