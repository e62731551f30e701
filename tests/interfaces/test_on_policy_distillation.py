"""`advantage=teacher_kl`: PPO's actor without rewards, whose advantage is the log-ratio of the teacher."""

from __future__ import annotations

import json

import pytest
import torch

from realign.api import Model
from realign.config import build_experiment, compose
from realign.interfaces.components import Normalization, TeacherKL
from realign.interfaces.ppo import PPOActorInterface
from realign.runtime import run
from realign.testing import BigramEngine, random_batch
from tests.tiny import save_tiny

READ = ("input_ids", "loss_mask", "logprobs", "teacher_logprobs")
PLAIN = Normalization("none", "none")


def actor(**settings) -> PPOActorInterface:
    return PPOActorInterface(**{"advantage": TeacherKL(), "adv_norm": PLAIN, **settings})


def advantages(data, **settings) -> torch.Tensor:
    interface, model = actor(**settings), Model("actor", BigramEngine())
    return interface.estimate_advantages(model, interface.score(model, data))["advantages"]


def test_the_advantage_is_the_log_ratio_of_teacher_to_policy():
    data = random_batch().select(READ)
    ratio_T = torch.where(data["loss_mask"], data["teacher_logprobs"] - data["logprobs"], 0)
    torch.testing.assert_close(advantages(data), ratio_T)
    torch.testing.assert_close(advantages(data, advantage=TeacherKL(0.5)), 0.5 * ratio_T)


def test_gamma_adds_the_log_ratios_of_later_tokens():
    data = random_batch().select(READ)
    credited = data.with_tokens(credit=advantages(data, advantage=TeacherKL(gamma=0.9))).sequences("credit")
    for i, (mask, teacher, own) in enumerate(
        zip(*map(data.sequences, ("loss_mask", "teacher_logprobs", "logprobs")), strict=True)
    ):
        later = 0.0
        for t in reversed(range(len(mask))):
            if mask[t]:
                later = float(teacher[t] - own[t]) + 0.9 * later
                assert float(credited[i][t]) == pytest.approx(later)


def test_rewards_are_added_if_there_are_any_and_a_missing_one_excludes_its_response():
    data = random_batch().select([*READ, "rewards"])
    without = advantages(data.select(READ), advantage=TeacherKL(gamma=1.0))
    with_rewards = advantages(data, advantage=TeacherKL(gamma=1.0))
    added = data.with_tokens(added=with_rewards - without).sequences("added")
    for reward, mask, difference in zip(data["rewards"].tolist(), data.sequences("loss_mask"), added, strict=True):
        if reward == reward:
            assert difference[mask].tolist() == pytest.approx([reward] * int(mask.sum()), abs=1e-6)
    last = data.sequences("loss_mask")[-1]
    assert last.any()
    assert not data.with_tokens(credit=with_rewards).sequences("credit")[-1].any()


def test_a_student_approaches_a_larger_teacher_from_prompts_alone(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("a cat.", "the dog", "so it is", "well") * 4))
    given = [
        "experiment=on_policy_distillation",
        f"models.actor.path={save_tiny(tmp_path / 'student')}",
        f"models.teacher.path={save_tiny(tmp_path / 'teacher', 'gpt2', seed=1, n_embd=96)}",
        f"data.path={prompts}",
        f"output_dir={tmp_path / 'run'}",
        "models.actor.optimizer={lr: 3.0e-3, schedule: {kind: constant}}",
        "interfaces.actor.generation.max_new_tokens=8",
        "batch_prompts=16",
        "steps=25",
    ]
    history = run(build_experiment(compose(given))).history
    kl = [r["teacher_kl"] for r in history if "teacher_kl" in r]
    assert sum(kl[-3:]) < 0.6 * sum(kl[:3])
    assert "reward" not in history[-1]
