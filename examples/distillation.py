"""Distillation: a student of a quarter of the size learns from its teacher, on text that it writes itself.

    python examples/distillation.py [KEY=VALUE ...]

Flags belong to the distillation, such as `steps=300` or `interfaces.actor.divergence=jsd`, and with `sft.` to the
imitation before. With your models and prompts, there is no imitation: `models.actor.path=STUDENT
models.teacher.path=TEACHER data.path=prompts.jsonl evaluation=null interfaces.actor.generation.max_new_tokens=512`.

The teacher has seen right sums, the student mostly wrong ones. Both need the same tokenizer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from stages import flags  # the file beside this one
from transformers import AutoConfig, AutoModelForCausalLM

import realign
from realign.demo.arithmetic import prepare

FOLDER = Path("runs/distillation")


def main(words: Sequence[str]) -> realign.Run:
    """Teach the teacher and the student by imitation, then the student by the teacher."""
    sft, gkd = flags(words, "sft")
    if "models.actor.path" not in gkd:
        right = prepare(FOLDER / "right", seed=0, mistakes=0.0)
        wrong = prepare(FOLDER / "wrong", seed=0)
        small = AutoConfig.from_pretrained(
            wrong.model, hidden_size=64, intermediate_size=128, head_dim=16, trust_remote_code=False
        )
        AutoModelForCausalLM.from_config(small, trust_remote_code=False).save_pretrained(wrong.model)
        held_out = {"evaluation.data.path": right.held_out, "overwrite": True}
        models = {}
        for role, task in {"teacher": right, "actor": wrong}.items():
            start = {"models.actor.path": task.model, "data.path": task.demonstrations, "output_dir": FOLDER / role}
            run = realign.train("sft_arithmetic", **start | held_out | sft)
            models[f"models.{role}.path"] = run.folder / "final" / "actor"
        sums = {
            "every_steps": 20,
            "batch_prompts": 512,
            "data": {"_target_": "prompts", "path": right.held_out},
            "generation": {"max_new_tokens": 5},
            "reward": {"_target_": "rule_reward", "function": "realign.rewards.arithmetic:exact_answer"},
        }
        flags_of_task = {"data.path": right.prompts, "evaluation": sums, "overwrite": True, "batch_prompts": 128}
        rate = {"models.actor.optimizer.lr": 1e-3, "interfaces.actor.generation.max_new_tokens": 5, "steps": 120}
        gkd = models | flags_of_task | rate | gkd
    return realign.train("gkd", **{"output_dir": FOLDER / "gkd"} | gkd)


if __name__ == "__main__":
    print("right on held-out sums:", main(sys.argv[1:]).series("eval/reward"))
