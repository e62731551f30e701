"""Run the tasks of examples/README.md at a tiny size, as their command lines do, and one with a model of one's own."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import yaml

import realign
from realign.demo.tiny import write_rows

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


def _config(run):
    return yaml.safe_load((run.folder / "config.yaml").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_recipe_runs_with_flags_for_each_stage(recipe, name):
    run = recipe(name).main([*TINY[name], "threads=1"])
    assert len(run.series("eval/reward")) == 2
    assert len(run.history) == 3


def test_your_model_and_rows_need_no_imitation_and_get_the_rate_of_their_size(recipe, tmp_path):
    task = recipe("realign.demo.arithmetic").prepare(tmp_path / "mine", seed=0, demonstrations=1, held_out=4)
    words = [f"models.actor.path={task.model}", f"data.path={task.prompts}", f"evaluation.data.path={task.held_out}"]
    sums = recipe("sums")
    sums.score = lambda prompt, response, row: len(response) / 5
    run = sums.main([*words, "steps=1", "batch_prompts=4", "interfaces.actor.generation.max_new_tokens=5"])
    assert len(run.series("reward")) == 1
    assert _config(run)["models"]["actor"]["optimizer"]["lr"] is None
    assert not (sums.FOLDER / "sft").exists()


@pytest.mark.slow
def test_your_rows_teach_the_tiny_model_what_your_demonstrations_show(recipe, tmp_path):
    """Sorted digits, and a reward of which the demonstrations say nothing, which also scores held-out rows."""
    numbers = [f"{number:03d}" for number in range(16)]
    files = {"shown": "response", "asked": "answer"}
    for name, column in files.items():
        write_rows(tmp_path / name, ({"prompt": f"{n}=", column: "".join(sorted(n))} for n in numbers))
    sums = recipe("sums")
    sums.score = lambda prompt, response, row: 7.0 + len(response)
    words = [f"sft.data.path={tmp_path / 'shown'}", "sft.steps=2", "steps=1", "batch_prompts=4", "threads=1"]
    run = sums.main([*words, f"data.path={tmp_path / 'asked'}", f"evaluation.data.path={tmp_path / 'asked'}"])
    assert min(run.series("eval/reward")) > 7
    assert _config(realign.Run(sums.FOLDER / "sft"))["data"]["path"] == str(tmp_path / "shown")
