"""Run the three commands of the tutorial in sequence: on a tiny model, and on the real one (slow)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from realign.config import build_experiment, compose
from realign.demo import reasoning
from realign.demo.smollm2 import smollm2
from realign.runtime import run
from tests.demo.reasoning_package import REAL, REASON
from tests.docs import pages
from tests.tiny import save_tiny

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "tutorial.md"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SHORT = {
    "experiment=sft": ["batch_prompts=2"],
    "experiment=dpo": ["batch_prompts=2"],
    "experiment=grpo_reasoning": ["batch_prompts=2", "evaluation.batch_prompts=4"],
}


def run_commands(model: Path) -> list[dict[str, float]]:
    """Run the commands of the page for two steps each, and return their last metrics."""
    reasoning.prepare(Path("sums"), seed=0)
    commands = [words[1:] for words in pages.commands(PAGE.read_text(encoding="utf-8"))]
    commands = [words for words in commands if words[0].startswith("experiment=")]
    assert [words[0] for words in commands] == list(SHORT)
    records = []
    for words in commands:
        given = [word.replace("=MODEL", f"={model}") for word in words if not word.startswith("steps=")]
        overrides = [*given, *SHORT[words[0]], "steps=2", "save_every_steps=null"]
        records.append(run(build_experiment(compose(overrides))).history[-1])
    return records


def check(sft: dict[str, float], dpo: dict[str, float], grpo: dict[str, float]) -> None:
    """Check that every stage trained, and that the reward is the weighted sum of its functions."""
    assert sft["loss"] > 0
    assert 0 <= dpo["rewards/accuracy"] <= 1
    assert grpo["reward"] == pytest.approx(grpo["rewards/right/mean"] + 0.2 * grpo["rewards/brief/mean"], abs=1e-6)
    assert "eval/reward" in grpo
    for name in ("sft", "dpo", "grpo_reasoning"):
        assert Path("runs", name, "final", "actor", "config.json").is_file()


def test_the_commands_run_in_sequence_on_a_tiny_model(reasoning_package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny(Path("tiny"))
    config = json.loads(Path("tiny/tokenizer_config.json").read_text())
    Path("tiny/tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    check(*run_commands(Path("tiny")))


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason=REASON)
def test_the_commands_run_in_sequence_on_the_real_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "reasoning_gym" not in sys.modules or hasattr(sys.modules["reasoning_gym"], "__path__")
    check(*run_commands(smollm2()))
