"""Sums with a verifier: a tiny model learns to add from nothing but right and wrong.

    python examples/sums.py [KEY=VALUE ...]

Flags belong to GRPO, such as `steps=300` or `algorithm=dapo`, and with `sft.` to the imitation before. With your model
and rows, there is no imitation: `models.actor.path=Qwen/Qwen2.5-0.5B-Instruct data.path=mine.jsonl
evaluation.data.path=held_out.jsonl`.

For a task of your own, change `score`: any verifier works that returns a number.
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
    if "models.actor.path" not in grpo:
        task = prepare(FOLDER / "task", seed=0)
        held_out = {"evaluation.data.path": task.held_out, "overwrite": True}
        start = {"models.actor.path": task.model, "data.path": task.demonstrations, "output_dir": FOLDER / "sft"}
        grpo = {
            "models.actor.path": realign.train("sft_arithmetic", **start | held_out | sft).folder / "final" / "actor",
            "data.path": task.prompts,
            **held_out,
            **grpo,
        }
    return realign.train("grpo_arithmetic", reward=score, **{"output_dir": FOLDER / "grpo"} | grpo)


if __name__ == "__main__":
    print("right on held-out sums:", main(sys.argv[1:]).series("eval/reward"))
