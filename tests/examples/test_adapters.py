"""Train on environments of other packages, and by self-play, for a few steps (slow).

`OPENENV_PYTHON` and `VERIFIERS_PYTHON` are interpreters of Python environments with the packages openenv (or its
predecessor openenv-core) and verifiers.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = ["--sft-steps", "40", "--steps", "2"]
pytestmark = pytest.mark.slow


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def needs(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs the package {package}")


def checked(result, printed: str, *, steps: int = 2) -> dict[str, float]:
    """Check that each step trained on episodes with rewards, and return the last line of the output."""
    assert result.series("missing_rewards") == [0.0] * steps
    assert len({round(entropy, 9) for entropy in result.series("entropy")}) == steps  # the weights change
    assert result.series("first_logprob_diff_max")[0] < 1e-4
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize(
    ("adapter", "module", "package"),
    [
        ("gymnasium", "gymnasium", "gymnasium"),
        ("textarena", "textarena", "textarena"),
        ("reasoning_gym", "reasoning_gym", "reasoning-gym"),
    ],
)
def test_a_policy_trains_on_an_environment_of_a_package(adapter, module, package, example, tmp_path, capsys):
    needs(module, package)
    result = example("adapters").main([adapter, "--output-dir", str(tmp_path), *SHORT])
    last = checked(result, capsys.readouterr().out)
    assert 0 < last["reward_before"] < 1


def test_both_roles_of_self_play_train_with_their_own_rewards(example, tmp_path, capsys):
    result = example("self_play").main(["--output-dir", str(tmp_path), *SHORT])
    last = checked(result, capsys.readouterr().out)
    assert 0 < last["won_before"] < 1
    samples = [json.loads(line) for line in (tmp_path / "grpo" / "samples.jsonl").read_text().splitlines()]
    roles = {role for sample in samples for role, reward in sample["rewards"].items() if reward is not None}
    assert roles == {"first", "second"}
    for sample in samples:
        assert [reward for reward in sample["rewards"].values() if reward is not None] == [sample["reward"]]


def test_an_agent_of_the_openai_agents_sdk_trains_and_uses_its_tool(example, tmp_path, capsys):
    needs("agents", "openai-agents")
    steps = ["--sft-steps", "150", "--steps", "2"]
    result = example("openai_agents_sdk").main(["--output-dir", str(tmp_path), *steps])
    last = checked(result, capsys.readouterr().out)
    assert 0 < last["right_before"] < 1
    assert max(result.series("turns")) > 1  # a call of the tool is a turn
