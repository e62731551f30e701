"""Test the examples of environments: their logic, and a few training steps with their command lines."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"examples.{name}")


@pytest.mark.parametrize(
    ("name", "sft_steps"), [pytest.param("calculator_agent", 100, marks=pytest.mark.slow), ("guessing_game", 3)]
)
def test_an_example_runs_as_its_command_line_does(name, sft_steps, example, tmp_path, capsys):
    """Imitation takes enough steps for the model to be sometimes right. Otherwise all rewards are equal and nothing
    is learned."""
    steps = ["--sft-steps", str(sft_steps), "--steps", "2"]
    result = example(name).main(["--output-dir", str(tmp_path), "--seed", "1", *steps])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert Path(last["curves"]).read_bytes()[:4] == b"\x89PNG"
    assert len(result.series("turns")) == 2
    assert result.series("missing_rewards") == [0.0] * 2
    assert result.series("first_logprob_diff_max")[0] < 1e-4  # log-probs of sampled turns equal those of the whole text
    assert (tmp_path / "grpo" / "final" / "actor" / "model.safetensors").exists()
