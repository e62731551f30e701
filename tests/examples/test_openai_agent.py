"""Compare the agent on the openai client with the environment class of the same task."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from realign.runtime import run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return [importlib.import_module(name) for name in ("calculator_agent", "openai_agent")]


@pytest.mark.slow
def test_the_agent_over_http_starts_with_the_episodes_of_the_environment_class_and_learns(modules, tmp_path, capsys):
    calculator, _ = modules
    steps = 2
    result = modules[1].main(
        ["--output-dir", str(tmp_path), "--seed", "1", "--sft-steps", "100", "--steps", str(steps)]
    )
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert Path(last["curves"]).read_bytes()[:4] == b"\x89PNG"
    assert result.series("missing_rewards") == [0.0] * steps
    assert result.series("first_logprob_diff_max")[0] < 1e-4  # captured log-probs equal rescored ones
    _, learn = calculator.experiments(tmp_path, 1, 100, steps)
    in_process = run(learn)
    for name in ("reward", "turns", "response_tokens"):
        assert result.series(name)[0] == in_process.series(name)[0], name
    assert result.series("eval/reward")[0] == in_process.series("eval/reward")[0]
    rewards, expected = (one.series("reward") for one in (result, in_process))
    # later steps differ by the rounding of log-probs, which depends on how calls are batched
    assert sum(rewards) / steps == pytest.approx(sum(expected) / steps, abs=0.1)
