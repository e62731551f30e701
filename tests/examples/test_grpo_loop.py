"""Test the GRPO loop without the framework: it ends with the weights of `experiment=grpo_arithmetic`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from realign.config import build_experiment, compose
from realign.demo.arithmetic import prepare
from realign.runtime import run


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module("grpo_loop")


def test_the_loop_ends_with_the_weights_of_the_experiment(example, tmp_path, capsys):
    task = prepare(tmp_path / "task", seed=0)
    rows = [json.loads(line) for line in task.prompts.read_text().splitlines()[:40]]
    # A model with random weights never adds correctly, but some of its responses are a single digit.
    task.prompts.write_text("".join(json.dumps(row | {"answer": "7"}) + "\n" for row in rows))
    steps, prompts, responses = 3, 24, 8  # the second batch crosses the end of an epoch

    config = compose(
        [
            "experiment=grpo_arithmetic",
            f"models.actor.path={task.model}",
            f"data.path={task.prompts}",
            "evaluation=null",
            f"steps={steps}",
            f"batch_prompts={prompts}",
            f"interfaces.actor.generation.n={responses}",
            "interfaces.reward.workers=0",
            f"output_dir={tmp_path / 'run'}",
        ]
    )
    result = run(build_experiment(config))
    sizes = [f"--steps={steps}", f"--batch-prompts={prompts}", f"--group-size={responses}"]
    example.main([str(task.model), str(task.prompts), *sizes, f"--output-dir={tmp_path / 'loop'}"])

    begin, theirs, ours = (
        load_file(folder / "model.safetensors")
        for folder in (task.model, tmp_path / "run" / "final" / "actor", tmp_path / "loop")
    )
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert any(not torch.equal(theirs[name], begin[name]) for name in theirs)
    shown = [float(line.split()[3].rstrip(",")) for line in capsys.readouterr().out.splitlines() if "reward" in line]
    assert shown == pytest.approx(result.series("reward"), abs=6e-4)
