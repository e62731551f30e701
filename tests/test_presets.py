"""Every recipe with a learned reward, end to end on tiny models: generation, scores, values, credit, both updates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realign.api import derive_seed
from realign.config import build_experiment, compose
from realign.runtime import run
from tests.tiny import save_tiny

RLHF = ["ppo"]
"""Experiments with a reward model."""
RULES = {
    "areal_decoupled": {"behaviour_weight_mean", "behaviour_rejected_fraction", "behaviour_kl", "staleness_head"},
    "areal_ppo": {"critic/value_loss", "critic/return_moment_std", "critic/optimizer_steps", "kl_coef"},
}
"""Experiments with a reward function, and metrics that say that their own parts took part."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A policy, a reward model and prompts of several lengths, on disk."""
    root = tmp_path_factory.mktemp("models")
    prompts = root / "prompts.jsonl"
    words = ["a cat", "the dog sat", "1 + 1 =", "so it is.", "why?", "well. no"]
    rows = [{"prompt": words[derive_seed(0, str(i)) % len(words)] + " " * (i % 3) + "x" * (i % 5)} for i in range(24)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "actor": save_tiny(root / "actor"),
        "reward": save_tiny(root / "reward", head="score", seed=1),
        "prompts": prompts,
    }


def small(name: str, folders: dict[str, Path], out: Path, *more: str) -> list[str]:
    return [
        f"experiment={name}",
        f"models.actor.path={folders['actor']}",
        f"models.reward.path={folders['reward']}",
        f"data.path={folders['prompts']}",
        f"output_dir={out}",
        "steps=2",
        "batch_prompts=8",
        "interfaces.actor.generation.max_new_tokens=12",
        *more,
    ]


@pytest.mark.parametrize("name", RLHF)
def test_a_recipe_runs_end_to_end(name, folders, tmp_path):
    result = run(build_experiment(compose(small(name, folders, tmp_path / "run"))))
    assert [r["step"] for r in result.history] == [0, 1, 2]
    last = result.history[-1]
    assert last["optimizer_steps"] > 0
    assert last["first_logprob_diff_max"] < 1e-4
    assert {"reward", "policy_loss", "clip_fraction", "approx_kl", "ref_kl_per_sequence", "kl_coef"} <= last.keys()
    assert {"critic/value_loss", "critic/optimizer_steps"} <= last.keys()
    assert (tmp_path / "run" / "final" / "actor" / "model.safetensors").exists()
    assert (tmp_path / "run" / "final" / "critic" / "model.safetensors").exists()


@pytest.mark.parametrize("name", RULES)
def test_a_recipe_with_a_reward_function_runs_end_to_end(name, folders, tmp_path):
    (tmp_path / "judge.py").write_text("def score(prompt, response, row):\n    return 1 if len(response) % 2 else -1\n")
    overrides = [
        f"experiment={name}",
        f"models.actor.path={folders['actor']}",
        f"interfaces.reward.function={tmp_path / 'judge.py'}:score",
        f"data.path={folders['prompts']}",
        f"output_dir={tmp_path / 'run'}",
        "steps=2",
        "batch_prompts=8",
        "interfaces.actor.generation.n=4",
        "interfaces.actor.generation.max_new_tokens=12",
    ]
    last = run(build_experiment(compose(overrides))).history[-1]
    assert last["step"] == 2
    assert last["optimizer_steps"] > 0
    assert last["first_logprob_diff_max"] < 1e-4
    assert RULES[name] <= last.keys()
