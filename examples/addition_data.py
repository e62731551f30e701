"""A dataset of your own: addition problems that are made up at the start of the run, from no file.

Use it with `data._target_=examples.addition_data.Additions`. Its fields are flags, such as `data.count=500`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from realign.data import DataSpec, PromptDataset
from realign.settings import Count


@dataclass
class Additions(DataSpec):
    """Addition problems with their answers."""

    count: Count = 100
    """Number of problems."""
    seed: int = 0
    """Seed of the numbers."""

    def load(self, tokenizer: Any) -> PromptDataset:
        """Return the tokenized problems, each with its row for the reward function."""
        numbers = random.Random(self.seed)
        pairs = [(numbers.randint(1, 99), numbers.randint(1, 99)) for _ in range(self.count)]
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
        return PromptDataset.from_ids((tokenizer(row["prompt"])["input_ids"] for row in rows), rows, source="additions")
