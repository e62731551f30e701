"""Task of the demo: two-digit addition for a tiny, randomly initialized Qwen2 with a character-level tokenizer.

The SFT demonstrations have mixed quality: most of them omit the carry (37+45=72). So SFT teaches two ways of adding,
and greedy answers tend to the more frequent, wrong one. Only the verifiable reward of the GRPO run favors the other.

`prepare` writes a Hugging Face model folder and JSONL files, which every CLI command accepts. The same from the shell:

    python -m realign.demo.arithmetic [folder] [seed]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from realign.demo import tiny
from realign.demo.tiny import Task

CHARACTERS = "0123456789+="


def prepare(
    folder: Path, *, seed: int, demonstrations: int = 7000, mistakes: float = 0.75, held_out: int = 500
) -> Task:
    """Write model, tokenizer and data of the task.

    Args:
        folder: Output folder for `model/`, `demonstrations.jsonl` (`prompt`, `response`), `prompts.jsonl` and
            `held_out.jsonl` (`prompt`, `answer`). Held-out problems have either order of the summands.
        seed: Seed of the split and of the weights.
        demonstrations: Number of demonstrations for SFT.
        mistakes: Fraction of the demonstrations that omit the carry.
        held_out: Number of held-out problems for evaluation.
    """
    task = Task.of(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]  # a + b and b + a are in the same split
    rng.shuffle(pairs)
    asked, trained = pairs[: held_out // 2], pairs[held_out // 2 :]
    practice = [p for pair in trained for p in _both_ways(*pair)]
    rng.shuffle(practice)
    tiny.write_rows(task.held_out, [_problem(*p) for pair in asked for p in _both_ways(*pair)])
    tiny.write_rows(task.prompts, [_problem(a, b) for a, b in practice])
    worked = [(a, b, add_without_carry(a, b) if rng.random() < mistakes else a + b) for a, b in practice]
    tiny.write_rows(
        task.demonstrations,
        [{"prompt": f"{a}+{b}=", "response": str(answer)} for a, b, answer in worked[:demonstrations]],
    )
    tiny.save(task.model, tiny.build_model("qwen2", 2 + len(CHARACTERS), seed=seed), build_tokenizer())
    return task


def _both_ways(a: int, b: int) -> list[tuple[int, int]]:
    """Return a pair of summands in either order, or once if they are equal."""
    return list(dict.fromkeys([(a, b), (b, a)]))


def add_without_carry(a: int, b: int) -> int:
    """Return the digit-wise sum without carry: 37 + 45 = 72."""
    return (a // 10 + b // 10) % 10 * 10 + (a % 10 + b % 10) % 10


def _problem(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def build_tokenizer() -> Any:
    """Return a character-level tokenizer."""
    from tokenizers import Regex, decoders, pre_tokenizers

    split = pre_tokenizers.Split(Regex("."), "isolated")
    return tiny.build_tokenizer(CHARACTERS, split=split, decoder=decoders.Fuse())


if __name__ == "__main__":
    folder, seed = (sys.argv[1:] + ["runs/arithmetic", "0"][len(sys.argv) - 1 :])[:2]
    for name, path in vars(prepare(Path(folder), seed=int(seed))).items():
        print(f"{name}: {path}")
