"""Run the tasks of examples/README.md at a tiny size, as their command lines do, and one with a model of one's own."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {
    "sums": ["sft.steps=60", "steps=2"],
    "preferences": ["sft.steps=2", "steps=2", "evaluation.generation.n=1", "evaluation.batch_prompts=4"],
    "sentiment_rlhf": ["sft.steps=2", "reward.steps=2", "reward.calibration.samples=16", "steps=2", "batch_prompts=4"],
    "distillation": ["sft.steps=2", "steps=2", "batch_prompts=4"],
}


@pytest.fixture
def recipe(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_recipe_runs_with_flags_for_each_stage(recipe, name):
    run = recipe(name).main([*TINY[name], "threads=1"])
    assert len(run.series("eval/reward")) == 2
    assert len(run.history) == 3


def test_your_model_and_rows_need_no_imitation(recipe, tmp_path):
    task = recipe("realign.demo.arithmetic").prepare(tmp_path / "mine", seed=0, demonstrations=1, held_out=4)
    words = [f"models.actor.path={task.model}", f"data.path={task.prompts}", f"evaluation.data.path={task.held_out}"]
    sums = recipe("sums")
    sums.score = lambda prompt, response, row: len(response) / 5
    assert len(sums.main([*words, "steps=1", "batch_prompts=4", "curriculum=null"]).series("reward")) == 1
    assert not (sums.FOLDER / "sft").exists()
