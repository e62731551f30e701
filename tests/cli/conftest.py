"""A run of five steps, for the commands on earlier runs."""

from __future__ import annotations

import pytest

from realign.cli import main
from realign.demo.arithmetic import prepare

REWARD = "def score(prompt, response, row):\n    return len(response) / 5 + (response[:1] in '13579')\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder in which a run of five steps is in runs/a, with checkpoints after steps 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prepare(folder / "task", seed=0, demonstrations=64, held_out=16)
        (folder / "reward.py").write_text(REWARD)
        words = [
            "experiment=grpo_arithmetic",
            "models.actor.path=task/model",
            "data.path=task/prompts.jsonl",
            "evaluation=null",
            "interfaces.reward.function=reward.py:score",
            "interfaces.reward.workers=0",
            "interfaces.actor.generation.n=4",
            *("batch_prompts=4", "steps=5", "checkpoint.every_steps=2", "checkpoint.keep=9"),
        ]
        assert main([*words, "output_dir=runs/a"]) == 0
    return folder
