"""Test the task with images end to end: SFT learns to name colors, and GRPO improves on its mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from realign.config import build_experiment, compose
from realign.demo.colors import prepare
from realign.runtime import run

EVALUATION = [
    "+evaluation.data._target_=realign.data.PromptData",
    "+evaluation.data.images_column=images",
    "+evaluation.reward._target_=realign.interfaces.rule_reward.RuleRewardInterface",
    "+evaluation.reward.function=realign.rewards.arithmetic:exact_answer",
    "+evaluation.every_steps=1000",
    "+evaluation.generation={n: 8, max_new_tokens: 4, greedy: false}",
]


def trained(out: Path, task, words):
    """Run an experiment on the task, and return the rewards before and after training, and all metrics."""
    folder = task.model.parent
    common = [f"output_dir={out}", "data.images_column=images", f"data.image_folder={folder}", "save_every_steps=null"]
    common += [*EVALUATION, f"+evaluation.data.path={task.held_out}", f"+evaluation.data.image_folder={folder}"]
    history = run(build_experiment(compose([*words, *common]))).history
    rewards = [record["eval/reward"] for record in history if "eval/reward" in record]
    return rewards[0], rewards[-1], history


def sft(out, task, steps, *words):
    settings = ["models.actor.optimizer.lr=3e-3", f"steps={steps}", f"data.path={task.demonstrations}"]
    return trained(out, task, ["experiment=sft", f"models.actor.path={task.model}", *settings, *words])


def grpo(out, task, model, steps, *words):
    settings = [
        "models.actor.optimizer.lr=1e-3",
        "models.actor.optimizer.schedule.warmup=0",
        "interfaces.actor.generation.max_new_tokens=4",
        "interfaces.reward.function=realign.rewards.arithmetic:exact_answer",
        f"steps={steps}",
        f"data.path={task.prompts}",
    ]
    return trained(out, task, ["experiment=grpo", f"models.actor.path={model}", *settings, *words])


@pytest.mark.slow
def test_sft_learns_to_name_colors_and_grpo_improves_on_its_mistakes(tmp_path):
    task = prepare(tmp_path / "task", seed=0)
    before, after, _ = sft(tmp_path / "sft", task, 60)
    assert before < 0.2
    assert after > 0.45  # 40% of the demonstrations are random
    start, end, history = grpo(tmp_path / "grpo", task, tmp_path / "sft/final/actor", 15)
    assert start == pytest.approx(after, abs=0.1)
    assert end > start + 0.15
    assert history[1]["first_logprob_diff_max"] < 1e-4
