"""Preferences: DPO on pairs of short reviews makes a tiny model write kind ones, without a reward model.

    python examples/preferences.py [KEY=VALUE ...]

Flags belong to DPO, such as `steps=400` or `algorithm=simpo`, and with `sft.` to the imitation before. With your model
and pairs (columns `prompt`, `chosen`, `rejected`), there is no imitation: `models.actor.path=Qwen/Qwen2.5-0.5B-Instruct
data.path=pairs.jsonl evaluation=null`.

The pairs are written here, by the small grammar of `realign.demo.sentiment`; a lexicon prefers the kinder review.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from stages import flags  # the file beside this one

import realign
from realign.demo.sentiment import GOLD, prepare

FOLDER = Path("runs/preferences")


def main(words: Sequence[str]) -> realign.Run:
    """Imitate reviews of every tone, then prefer the kind ones."""
    sft, dpo = flags(words, "sft")
    if "models.actor.path" not in dpo:
        task = prepare(FOLDER / "task", seed=0, hasty=0.0)
        start = {"models.actor.path": task.model, "data.path": task.demonstrations, "output_dir": FOLDER / "sft"}
        kindness = {
            "every_steps": 50,
            "batch_prompts": 512,
            "data": {"_target_": "prompts", "path": task.held_out},
            "generation": {"greedy": False, "n": 8, "max_new_tokens": 32},
            "reward": {"_target_": "rule_reward", "function": GOLD},
        }
        start |= {"evaluation.data.path": task.held_out, "overwrite": True}
        dpo = {
            "models.actor.path": realign.train("sft_sentiment", **start | sft).folder / "final" / "actor",
            "models.actor.optimizer.lr": 5e-4,
            "data.path": task.pairs,
            "evaluation": kindness,
            "overwrite": True,
            **dpo,
        }
    return realign.train("dpo", **{"output_dir": FOLDER / "dpo"} | dpo)


if __name__ == "__main__":
    print("kindness of held-out reviews, from -1 to 1:", main(sys.argv[1:]).series("eval/reward"))
