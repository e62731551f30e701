"""Batches of the referee, made from seeds: padded tensors for the peers, and the same tokens packed for realign.

S responses, R columns of the padded responses. Lengths have a long tail, rewards have ties, and one group has equal
rewards. Log-probs differ from the old ones by 1e-5 to 2 nats, so that some sequences stay inside every clip range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from realign.api import SequenceSample

PROMPT = 2
"""Tokens of every prompt."""


@dataclass(frozen=True)
class Kind:
    """What a batch contains."""

    groups: tuple[int, ...] = (4,) * 6
    """Responses of each prompt."""
    tools: bool = True
    """Whether responses contain tokens that do not train, such as the output of tools."""
    truncated: bool = False
    """Whether some responses are truncated, and leave the loss."""
    equal: bool = False
    """Whether all rewards are 0.1."""
    longest: int = 60
    """Most tokens of a response."""
    far: bool = False
    """Whether some log-probs differ by up to 30 nats from those of the reference."""
    positive: bool = False
    """Whether no reward is below 0."""
    missing: bool = False
    """Whether some responses lack the second of the named rewards."""


KINDS = {
    "groups": Kind(),
    "ragged": Kind((4, 2, 6, 3, 5, 4)),
    "single": Kind((1,) * 16, tools=False),
    "single with tools": Kind((1,) * 16),
    "pairs": Kind((2,) * 8, tools=False, longest=10),
    "with a group of one": Kind((4, 1, 3, 2, 6, 4)),
    "truncated": Kind(truncated=True),
    "groups of 7 equal rewards": Kind((7,) * 3, equal=True),
    "far from the reference": Kind(far=True),
    "without negative rewards": Kind((4, 2, 6, 3, 5, 4), positive=True),
    "with several rewards": Kind((4, 2, 6, 3, 5, 4)),
    "with several rewards, some missing": Kind(missing=True),
}


def batch(kind: str, seed: int) -> dict[str, Tensor]:
    """Return [S, R] and [S] tensors in fp32, int64 and bool."""
    of, rng = KINDS[kind], np.random.default_rng([seed, sorted(KINDS).index(kind)])
    group = np.repeat(np.arange(len(of.groups)), of.groups)
    lengths = np.minimum(1 + rng.lognormal(2, 0.9, len(group)).astype(int), of.longest)
    responses, columns = len(group), lengths.max()
    exists = np.arange(columns) < lengths[:, None]
    mask = exists & ((rng.random((responses, columns)) < 0.85) | (not of.tools))
    mask[np.arange(responses), lengths - 1] = True
    spread = 10 ** rng.uniform(-5, 0.3, (responses, 1))
    old = -rng.gamma(2, 1, (responses, columns)) - 0.01
    new = np.minimum(old + spread * rng.normal(0, 1, old.shape), -1e-3)
    ref = np.minimum(new + rng.normal(0, 0.3, old.shape), -1e-3)
    if of.far:
        draw = rng.random(old.shape)
        old, new = np.where(draw < 0.1, old - 14, old), np.where(draw < 0.1, new - 14, new)
        ref = np.where(draw > 0.9, new - rng.uniform(5, 30, old.shape), ref)
    rewards = np.where(rng.random(responses) < 0.7, rng.integers(0, 2, responses), rng.normal(0, 2, responses).round(2))
    rewards = np.where(group == 0, rewards[0], rewards) if max(of.groups) > 1 else rewards
    rewards = np.full(responses, 0.1) if of.equal else rewards
    truncated = (rng.random(responses) < 0.25) & of.truncated
    values = rng.normal(0, 1, old.shape)
    floats = {
        "old": old,
        "new": new,
        "ref": ref,
        "values": values,
        "old_values": values,
        "new_values": values + rng.normal(0, 0.3, old.shape),
        "returns": values + rng.normal(0, 1, old.shape),
        "rewards": rewards,
    }
    # After all others, so that these have the same numbers in every kind of batch.
    named = np.stack([rng.integers(0, 2, responses), rng.normal(0, 5, responses).round(1)], 1)
    named[group == 1, 0] = 1
    named[(rng.random(responses) < 0.2) & of.missing, 1] = np.nan
    floats |= {"named": named} | ({"rewards": np.abs(rewards)} if of.positive else {})
    shown = {
        k: torch.from_numpy(np.where(exists, x, 0) if x.shape == exists.shape else x).float() for k, x in floats.items()
    }
    others = {"exists": exists, "mask": mask & ~truncated[:, None], "group": group, "truncated": truncated}
    return shown | {key: torch.from_numpy(x) for key, x in others.items()}


def packed(batch: dict[str, Tensor]) -> SequenceSample:
    """Return the batch in realign's layout. The id of a response's token is 1 + its place in the padded tensors."""
    responses, columns = batch["mask"].shape
    ids = 1 + torch.arange(responses * columns).view(responses, columns)
    groups = [torch.nonzero(batch["group"] == g)[:, 0].tolist() for g in range(int(batch["group"].max()) + 1)]

    def rows(x: Tensor, prompt: float) -> list[list[Tensor]]:
        start = torch.full((PROMPT,), prompt, dtype=x.dtype)
        return [[torch.cat([start, x[s][batch["exists"][s]]]) for s in group] for group in groups]

    keys = {"input_ids": ids, "logprobs": batch["old"], "ref_logprobs": batch["ref"], "values": batch["values"]}
    keys |= {"returns": batch["returns"], "loss_mask": batch["mask"] | (batch["exists"] & batch["truncated"][:, None])}
    nested = {key: rows(x, 0) for key, x in keys.items()}
    nested["prompt_mask"] = rows(~batch["exists"], 1)
    order = [s for group in groups for s in group]
    sample = SequenceSample.from_sequences([f"p{i}" for i in range(len(groups))], nested)
    return sample.with_sequences(
        rewards=batch["rewards"][order],
        truncated=batch["truncated"][order],
        bootstrap_values=batch.get("bootstrap", torch.zeros(responses))[order],
        **{f"rewards/{name}": batch["named"][order, k] for k, name in enumerate("ab")},
        labels=1.0 - torch.arange(responses) % 2,
        margins=torch.zeros(responses),
    )


def padded(x_T: Tensor, ids_T: Tensor, like: Tensor) -> Tensor:
    """Return values of packed tokens in the padded layout."""
    flat = torch.zeros(like.numel() + 1, dtype=x_T.dtype)
    flat[ids_T] = x_T
    return flat[1:].view_as(like)
