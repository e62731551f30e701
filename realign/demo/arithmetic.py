"""The demo's task: two-digit addition for a tiny Qwen2, with a tokenizer of single characters; made here, from nothing.

Numbers after "=" are written from their units on: 37+45=28. The worked problems that SFT imitates are of mixed quality:
in most of them no digit is carried (37+45=27). So SFT teaches two ways of adding, and greedy answers tend to the more
frequent, wrong one; that the other is right, only the checked reward of the second run can tell.

`prepare` writes an ordinary Hugging Face folder and JSONL files, on which every command of the CLI works; so does

    python -m realign.demo.arithmetic [folder] [seed]
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realign.demo import tiny

CHARACTERS = "0123456789+="


@dataclass(frozen=True)
class Task:
    """Where the parts of the task are."""

    model: Path
    demonstrations: Path
    """JSONL of `prompt`, `response`: the worked problems that SFT sees."""
    prompts: Path
    """JSONL of `prompt`, `answer`: the problems that reinforcement learning practises on."""
    held_out: Path
    """JSONL of `prompt`, `answer`: problems that nothing trains on, in either order of the summands."""

    @classmethod
    def of(cls, folder: Path) -> Task:
        """The parts that `prepare` writes to `folder`."""
        return cls(
            folder / "model", folder / "demonstrations.jsonl", folder / "prompts.jsonl", folder / "held_out.jsonl"
        )


def prepare(
    folder: Path, *, seed: int, demonstrations: int = 7000, mistakes: float = 0.75, held_out: int = 500
) -> Task:
    """Write model, tokenizer and data of the task.

    Args:
        folder: gets `model/`, `demonstrations.jsonl`, `prompts.jsonl` and `held_out.jsonl`.
        seed: of the split and of the weights.
        demonstrations: worked problems for SFT.
        mistakes: fraction of them in which no digit is carried.
        held_out: problems to judge by.
    """
    task = Task.of(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]  # a + b and b + a never part ways
    rng.shuffle(pairs)
    asked, kept = pairs[: held_out // 2], pairs[held_out // 2 :]
    practice = [p for pair in kept for p in both_ways(*pair)]
    rng.shuffle(practice)
    tiny.write_rows(task.held_out, [_problem(*p) for pair in asked for p in both_ways(*pair)])
    tiny.write_rows(task.prompts, [_problem(a, b) for a, b in practice])
    worked = [(a, b, add_without_carry(a, b) if rng.random() < mistakes else a + b) for a, b in practice]
    tiny.write_rows(
        task.demonstrations,
        [{"prompt": f"{a}+{b}=", "response": written(answer)} for a, b, answer in worked[:demonstrations]],
    )
    tiny.build_model("qwen2", 2 + len(CHARACTERS), seed=seed).save_pretrained(task.model)
    build_tokenizer().save_pretrained(task.model)
    return task


def both_ways(a: int, b: int) -> list[tuple[int, int]]:
    """A pair of summands in either order, once if they are equal."""
    return list(dict.fromkeys([(a, b), (b, a)]))


def add_without_carry(a: int, b: int) -> int:
    """The sum whose digits are added each for itself: 37 + 45 = 72."""
    return (a // 10 + b // 10) % 10 * 10 + (a % 10 + b % 10) % 10


def _problem(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a}+{b}=", "answer": written(a + b)}


def written(number: int) -> str:
    """A number in the demo's notation: from its units to its hundreds, in the order in which one adds."""
    return str(number)[::-1]


def build_tokenizer() -> Any:
    """A tokenizer of single characters."""
    from tokenizers import Regex, decoders, pre_tokenizers

    split = pre_tokenizers.Split(Regex("."), "isolated")
    return tiny.build_tokenizer(CHARACTERS, split=split, decoder=decoders.Fuse())


if __name__ == "__main__":
    folder, seed = (sys.argv[1:] + ["runs/arithmetic", "0"][len(sys.argv) - 1 :])[:2]
    for name, path in vars(prepare(Path(folder), seed=int(seed))).items():
        print(f"{name}: {path}")
