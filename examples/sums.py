"""Sums with a verifier: a tiny model learns to add from nothing but right and wrong.

    python examples/sums.py [KEY=VALUE ...]

Flags belong to GRPO, such as `steps=300` or `algorithm=dapo`, and with `sft.` to the imitation before.

For a task of your own, change `score`, and write your rows as JSON lines: `prompt`, `answer`, and any other column that
`score` reads. A model that follows instructions needs no imitation, so GRPO starts at once, with the settings of
`experiment=grpo`:

    python examples/sums.py models.actor.path=Qwen/Qwen2.5-0.5B-Instruct data.path=mine.jsonl \
        evaluation.data.path=held_out.jsonl evaluation.every_steps=20

The tiny model first imitates demonstrations (`prompt`, `response`), some of which must be right. It knows only the
characters 0123456789+= and answers with four of them at most, which is enough to sort digits, for example:

    python examples/sums.py sft.data.path=demonstrations.jsonl data.path=mine.jsonl evaluation.data.path=held_out.jsonl
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages import flags  # the file beside this one

import realign
from realign.demo.arithmetic import prepare

FOLDER = Path("runs/sums")


def score(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """Return 1 for the answer, and 0 for anything else."""
    return float(response.strip() == row["answer"])


def main(words: Sequence[str]) -> realign.Run:
    """Imitate demonstrations that mostly forget to carry, then learn from the verifier."""
    sft, grpo = flags(words, "sft")
    chosen = {"reward": score, "output_dir": FOLDER / "grpo", **grpo}
    if "models.actor.path" in grpo:
        return realign.train("grpo", **chosen)
    task = prepare(FOLDER / "task", seed=0)
    held_out = {"evaluation.data.path": grpo.get("evaluation.data.path", task.held_out), "overwrite": True}
    start = {"models.actor.path": task.model, "data.path": task.demonstrations, "output_dir": FOLDER / "sft"}
    imitated = realign.train("sft_arithmetic", **start | held_out | sft).folder / "final" / "actor"
    # `score` is also the reward of the evaluation
    learn = {"models.actor.path": imitated, "data.path": task.prompts, "evaluation.reward": None}
    return realign.train("grpo_arithmetic", **learn | held_out | chosen)


if __name__ == "__main__":
    print("right on held-out rows:", main(sys.argv[1:]).series("eval/reward"))
