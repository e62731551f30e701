"""Random batches with every key of the data layout, for tests."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from realign.api import (
    Lengths,
    SequenceSample,
)
from realign.api.rewards import NAMED
from realign.api.sample import with_response_index
from realign.functional import LMHead

_HIDDEN_SIZE = 4
"""Size of the hidden states of other roles."""


def random_heads(seed: int = 0, *, vocabulary: int = 11) -> dict[str, LMHead]:
    """Return a head in float64 for each role whose hidden states are in `random_batch`."""
    generator = torch.Generator().manual_seed(seed)
    roles = ("ref", "teacher")
    return {
        role: LMHead(torch.randn(vocabulary, _HIDDEN_SIZE, generator=generator, dtype=torch.float64)) for role in roles
    }


def random_batch(
    seed: int = 0, *, n_prompts: int = 6, max_group: int = 4, max_tokens: int = 9, vocabulary: int = 11
) -> SequenceSample:
    """Create a batch with every key of the data layout, with groups of different sizes and tool tokens in responses.

    It also has keys of other lengths: one baseline reward and one pretraining text per prompt.

    Returns:
        A sample whose second prompt has a response without tokens, and whose last response has no reward (NaN).
    """
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, max_group + 1, n_prompts)
    counts[0] = max_group
    lengths = Lengths(counts, rng.integers(2, max_tokens + 1, counts.sum()))
    given, trained = list[np.ndarray](), list[np.ndarray]()
    for s, n in enumerate(lengths.flat.tolist()):
        # Sequence counts[0] is the first one of the second prompt: all prompt, no response.
        prompt = n if s == counts[0] else int(rng.integers(1, n))
        given.append(np.arange(n) < prompt)
        trained.append((np.arange(n) >= prompt) & (rng.random(n) < 0.85))

    def noise(scale: float) -> Tensor:
        return torch.from_numpy(rng.normal(0, scale, lengths.total))

    base = -2.4 + noise(0.3)
    keys = {
        "input_ids": torch.from_numpy(rng.integers(0, vocabulary, lengths.total)),
        "prompt_mask": torch.from_numpy(np.concatenate(given)),
        "loss_mask": torch.from_numpy(np.concatenate(trained)),
        "logprobs": base,
        "prox_logprobs": base + noise(0.1),
        "ref_logprobs": base + noise(0.3),
        "values": noise(1.0),
        "returns": noise(1.0),
        "dense_rewards": noise(0.2),
        "advantages": noise(1.0),
        "versions": torch.zeros(lengths.total, dtype=torch.int32),
    }
    other = np.random.default_rng([seed, 1])  # so that keys of other roles do not change the keys above and below
    keys["teacher_logprobs"] = base + torch.from_numpy(other.normal(0, 0.3, lengths.total))
    keys |= {
        key: torch.from_numpy(other.normal(0, 1, (lengths.total, _HIDDEN_SIZE)))
        for key in ("ref_hidden", "teacher_hidden")
    }
    rewards_S = torch.from_numpy(rng.integers(0, 2, len(lengths.flat)).astype(np.float64))
    rewards_S[-1] = math.nan
    keys["turn_index"] = torch.from_numpy(np.concatenate([_turns(mask) for mask in trained]))
    keys["turn_rewards"] = torch.from_numpy(other.normal(0, 0.3, lengths.total))
    sample = SequenceSample(tuple(f"q{i}" for i in range(n_prompts)), keys, dict.fromkeys(keys, lengths))
    sample = sample.with_sequences(
        rewards=rewards_S,
        truncated=torch.from_numpy(rng.random(len(lengths.flat)) < 0.2),
        bootstrap_values=torch.from_numpy(rng.normal(0, 1, len(lengths.flat))),
    )
    text = Lengths(np.ones_like(counts), rng.integers(2, max_tokens + 1, n_prompts))
    sample = sample.with_data(
        {"ptx_input_ids": torch.from_numpy(rng.integers(0, vocabulary, text.total))}, lengths=text
    )
    sample = sample.with_data({"ptx_loss_mask": torch.from_numpy(rng.random(text.total) < 0.8)}, lengths=text)
    per_prompt = Lengths(np.ones_like(counts), np.ones_like(counts))
    sample = sample.with_data({"baseline_rewards": torch.from_numpy(rng.normal(0, 1, n_prompts))}, lengths=per_prompt)
    return with_response_index(sample).with_metadata(row=[{"answer": str(i)} for i in range(n_prompts)])


def _turns(trained: np.ndarray) -> np.ndarray:
    """Return the turn of each trained token of a sequence: each run of them is one; -1 for the others."""
    starts = np.diff(trained.astype(np.int32), prepend=0) == 1
    return np.where(trained, starts.cumsum() - 1, -1).astype(np.int32)


def with_own_keys(
    data: SequenceSample, inputs: Collection[str], own: Mapping[str, str], seed: int = 0
) -> SequenceSample:
    """Return the batch with random numbers for `own` keys, and for the named rewards in `inputs` that it has not.

    Args:
        data: the batch.
        inputs: keys that a call reads. Named rewards (`rewards/<name>`) are 0 or 1, and NaN for the last response.
        own: shape of each further key: "T" is one number per token, "S" one per sequence.
        seed: seed of the numbers; those of a key depend on its name only.

    Raises:
        ValueError: a shape is neither "T" nor "S".
    """
    for key in sorted({*own, *(key for key in inputs if key.startswith(NAMED))} - data.keys):
        rng = np.random.default_rng([seed, *key.encode()])
        if key not in own:
            rewards_S = torch.from_numpy(rng.integers(0, 2, data.n_sequences).astype(np.float64))
            rewards_S[-1] = math.nan
            data = data.with_sequences(**{key: rewards_S})
        elif own[key] == "T":
            data = data.with_tokens(**{key: torch.from_numpy(rng.normal(0, 1, data.lengths["input_ids"].total))})
        elif own[key] == "S":
            data = data.with_sequences(**{key: torch.from_numpy(rng.normal(0, 1, data.n_sequences))})
        else:
            raise ValueError(f'own[{key!r}]={own[key]!r}: must be "T" (one per token) or "S" (one per sequence)')
    return data


def random_preferences(
    seed: int = 0, *, n_prompts: int = 5, max_tokens: int = 9, vocabulary: int = 11
) -> SequenceSample:
    """Create a batch of preference pairs: one to three pairs per prompt, and one response without tokens.

    The chosen response is the first or the second of a pair, at random.

    Returns:
        A sample with every key of preference data, `ref_logprobs`, and `mismatched_ref_logprobs` (KTO).
    """
    rng = np.random.default_rng(seed)
    n_pairs = rng.integers(1, 4, n_prompts)
    lengths = Lengths(2 * n_pairs, rng.integers(2, max_tokens + 1, 2 * n_pairs.sum()))
    given = []
    for s, n in enumerate(lengths.flat.tolist()):
        # The first response of the second prompt has no tokens.
        prompt = n if s == 2 * n_pairs[0] else int(rng.integers(1, n))
        given.append(np.arange(n) < prompt)
    prompt_T = torch.from_numpy(np.concatenate(given))
    keys = {
        "input_ids": torch.from_numpy(rng.integers(0, vocabulary, lengths.total)),
        "prompt_mask": prompt_T,
        "loss_mask": ~prompt_T,
        "ref_logprobs": torch.from_numpy(rng.normal(-2.4, 0.4, lengths.total)),
    }
    first_wins = rng.random(n_pairs.sum()) < 0.5
    labels = np.stack([first_wins, ~first_wins], 1).reshape(-1).astype(np.float32)
    margins = np.repeat(rng.random(n_pairs.sum()), 2).astype(np.float32)
    sample = SequenceSample(tuple(f"q{i}" for i in range(n_prompts)), keys, dict.fromkeys(keys, lengths))
    return sample.with_sequences(
        labels=torch.from_numpy(labels),
        margins=torch.from_numpy(margins),
        mismatched_ref_logprobs=torch.from_numpy(rng.normal(-12, 2, 2 * n_pairs.sum())),
    )


__all__ = ["random_batch", "random_heads", "random_preferences"]
