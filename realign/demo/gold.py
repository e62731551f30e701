"""Measure reward over-optimization: learned reward versus gold reward (arXiv:2210.10760).

A run saves its responses as text (`sample_prompts`), with the learned reward of each. This module scores the same
responses with the gold function. It standardizes both rewards by mean and standard deviation at the first step, whose
responses the reference policy sampled. So the two rewards are comparable, and both start at 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from realign.errors import DataError
from realign.rewards import RewardFunction

Sample = dict[str, Any]


def judged(samples: Path, gold: RewardFunction) -> list[list[Sample]]:
    """Return the responses of a `samples.jsonl` that have both rewards, grouped by step.

    Adds the key `gold` to each response.

    Raises:
        DataError: no response has both rewards.
    """
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["gold"] = gold(row["prompt"], row["response"], row)
    both = [row for row in rows if None not in (row["reward"], row["gold"])]
    if not both:
        raise DataError(f"{samples} contains no response with both a learned and a gold reward.")
    return [list(step) for _, step in groupby(both, key=lambda row: row["step"])]


def compare(steps: Sequence[Sequence[Sample]]) -> list[dict[str, float]]:
    """Return the standardized learned and gold rewards of each step.

    Args:
        steps: Responses by step, as returned by `judged`.

    Returns:
        For each step: `step`; `learned` and `gold`, the mean rewards in standard deviations from the first step;
        `gap`, learned minus gold; and `own_accuracy` (see `agreement`) if it is defined.
    """
    first = steps[0]
    found = []
    for samples in steps:
        learned, gold = (_standard(samples, first, key) for key in ("reward", "gold"))
        record = {"step": samples[0]["step"], "learned": learned, "gold": gold, "gap": learned - gold}
        accuracy = agreement(samples)
        found.append(record if accuracy is None else record | {"own_accuracy": accuracy})
    return found


def agreement(samples: Sequence[Sample]) -> float | None:
    """Return the accuracy of the reward model: the fraction of response pairs that both rewards rank equally.

    Each pair consists of two responses to one prompt. Pairs with equal gold rewards are skipped. Pairs with equal
    learned rewards count as errors.

    Returns:
        The fraction; None if no pair is left.
    """
    prompts: dict[Any, list[Sample]] = {}
    for sample in samples:
        prompts.setdefault(sample["id"], []).append(sample)
    alike: list[bool] = []
    for group in prompts.values():
        learned, gold = _values(group, "reward"), _values(group, "gold")
        a, b = np.triu_indices(len(group), k=1)
        differs = gold[a] != gold[b]
        alike += (((learned[a] - learned[b]) * (gold[a] - gold[b])) > 0)[differs].tolist()
    return sum(alike) / len(alike) if alike else None


def _standard(samples: Sequence[Sample], first: Sequence[Sample], key: str) -> float:
    start = _values(first, key)
    deviation = float(start.std()) or 1.0
    return (float(_values(samples, key).mean()) - float(start.mean())) / deviation


def _values(samples: Sequence[Mapping[str, Any]], key: str) -> npt.NDArray[np.float64]:
    return np.array([sample[key] for sample in samples], dtype=np.float64)
