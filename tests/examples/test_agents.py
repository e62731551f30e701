"""Test the examples of environments: their logic, and a few training steps with their command lines."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path

import pytest

from realign.api.environment import Response

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"examples.{name}")


def talk(environment, row: dict, *texts: str) -> list[tuple]:
    """Return what an environment answers to each text: observation, reward, terminated, truncated."""

    async def conversation():
        assert await environment.reset(row, seed=0) == ("", {})
        return [(await environment.step(Response(text, (), turn, False)))[:4] for turn, text in enumerate(texts)]

    return asyncio.run(conversation())


def test_the_calculator_computes_what_it_is_asked_and_judges_the_rest(example):
    make, row = example("calculator_agent").Calculator, {"answer": "29842"}
    assert talk(make(), row, "calc 347*86", "answer 29842") == [
        ("= 29842\n", 0.0, False, False),
        ("", 1.0, True, False),
    ]
    assert talk(make(), row, "calc 9*7", "calc 347*86") == [
        ("= 63\n", 0.0, False, False),
        ("= 29842\n", 0.0, False, False),
    ]
    for wrong in ("answer 29843", "29842", "calc 347*", "calc 1234567*2", "calc 2**9"):
        assert talk(make(), row, wrong) == [("", 0.0, True, False)]


def test_the_game_says_higher_and_lower_and_ends_with_the_secret(example):
    make, row = example("guessing_game").GuessingGame, {"secret": 5}
    assert talk(make(), row, "3", "6", "5") == [
        ("higher", 0.0, False, False),
        ("lower", 0.0, False, False),
        ("", 1.0, True, False),
    ]
    assert talk(make(), row, "higher") == [("", 0.0, True, False)]


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
