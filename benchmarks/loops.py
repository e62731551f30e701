"""Plain loops that `benchmarks.data` compares with: nested Python lists, and one tensor operation at a time.

Each loop reimplements an approach of another framework:

- Lengths as lists of lists, and slices per sequence (realhf).
- Advantages by a loop over the time steps of a padded batch (TRL, OpenRLHF).
- Group statistics by a dictionary from prompt to rewards (verl).
- Bins that are searched linearly.

Letters: S sequences, N tokens of the longest sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class NestedBatch:
    """A batch of prompts: packed tensors, and the list of sequence lengths for each key and prompt."""

    ids: list[Hashable]
    data: dict[str, Tensor]
    lengths: dict[str, list[list[int]]]

    def take(self, prompts: Sequence[int]) -> NestedBatch:
        """Select the prompts at these positions."""
        data = {}
        for key, x in self.data.items():
            starts, at = [], 0
            for counted in self.lengths[key]:
                starts.append(at)
                at += sum(counted)
            data[key] = torch.cat([x[starts[i] : starts[i] + sum(self.lengths[key][i])] for i in prompts])
        lengths = {key: [nested[i] for i in prompts] for key, nested in self.lengths.items()}
        return NestedBatch([self.ids[i] for i in prompts], data, lengths)

    def minibatches(self, order: Sequence[int], n: int) -> list[NestedBatch]:
        """Divide the prompts, in this order, into `n` parts whose sizes differ by at most one."""
        size, larger = divmod(len(order), n)
        parts, start = [], 0
        for i in range(n):
            stop = start + size + (i < larger)
            parts.append(self.take(order[start:stop]))
            start = stop
        return parts

    def merge(self, other: NestedBatch) -> NestedBatch:
        """Combine the keys of two batches of the same prompts."""
        for mine, theirs in zip(self.ids, other.ids, strict=True):
            if mine != theirs:
                raise ValueError("different prompts")
        for key in self.data:
            if key in other.data:
                raise ValueError(f"both batches have the key {key!r}")
        return NestedBatch(self.ids, {**self.data, **other.data}, {**self.lengths, **other.lengths})

    def sequences(self, key: str) -> list[Tensor]:
        """Return views of the sequences of `key`."""
        views, start = [], 0
        for lengths in self.lengths[key]:
            for n in lengths:
                views.append(self.data[key][start : start + n])
                start += n
        return views

    def split(self, plan: Sequence[Sequence[int]]) -> list[NestedBatch]:
        """Return one batch per part of the plan: its sequences and their prompts. All keys have the same sequences."""
        owners = [i for i, lengths in enumerate(next(iter(self.lengths.values()))) for _ in lengths]
        views = {key: self.sequences(key) for key in self.data}
        parts = []
        for chosen in plan:
            prompts = list(dict.fromkeys(owners[s] for s in chosen))
            place = {prompt: i for i, prompt in enumerate(prompts)}
            data = {key: torch.cat([views[key][s] for s in chosen]) for key in self.data}
            lengths: dict[str, list[list[int]]] = {key: [[] for _ in prompts] for key in self.data}
            for s in chosen:
                for key in self.data:
                    lengths[key][place[owners[s]]].append(len(views[key][s]))
            parts.append(NestedBatch([self.ids[i] for i in prompts], data, lengths))
        return parts

    def restore(self, plan: Sequence[Sequence[int]], parts: Sequence[NestedBatch]) -> NestedBatch:
        """Concatenate the parts of the plan in the order of this batch."""
        data, lengths = {}, {}
        for key in parts[0].data:
            found: dict[int, Tensor] = {}
            for chosen, part in zip(plan, parts, strict=True):
                found.update(zip(chosen, part.sequences(key), strict=True))
            data[key] = torch.cat([found[s] for s in range(len(found))])
            nested, s = [], 0
            for counted in next(iter(self.lengths.values())):
                nested.append([len(found[s + i]) for i in range(len(counted))])
                s += len(counted)
            lengths[key] = nested
        return NestedBatch(self.ids, data, lengths)


def gather(batches: Sequence[NestedBatch]) -> NestedBatch:
    """Concatenate batches into one."""
    ids: list[Hashable] = []
    lengths: dict[str, list[list[int]]] = {key: [] for key in batches[0].data}
    for batch in batches:
        for i in batch.ids:
            ids.append(i)
        for key, nested in batch.lengths.items():
            lengths[key] += nested
    data = {key: torch.cat([batch.data[key] for batch in batches]) for key in lengths}
    return NestedBatch(ids, data, lengths)


def padded_gae(rewards_SN: Tensor, values_SN: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns [S, N] by a loop over time steps, last step first. Padding contains zeros."""
    steps = rewards_SN.shape[1]
    last_S = torch.zeros_like(rewards_SN[:, 0])
    backwards = []
    for t in reversed(range(steps)):
        next_S = values_SN[:, t + 1] if t + 1 < steps else torch.zeros_like(last_S)
        delta_S = rewards_SN[:, t] + gamma * next_S - values_SN[:, t]
        last_S = delta_S + gamma * lam * last_S
        backwards.append(last_S)
    advantages_SN = torch.stack(backwards[::-1], 1)
    return advantages_SN, advantages_SN + values_SN


def normalize_by_group(scores_S: Tensor, groups: Sequence[Hashable], eps: float) -> Tensor:
    """Subtract the group mean from each score, and divide by the group std (of K - 1) plus `eps`."""
    by_group: dict[Hashable, list[Tensor]] = defaultdict(list)
    for score, group in zip(scores_S, groups, strict=True):
        by_group[group].append(score)
    mean, std = {}, {}
    for group, scores in by_group.items():
        stacked = torch.stack(scores)
        mean[group], std[group] = stacked.mean(), stacked.std()
    out_S = scores_S.clone()
    for i, group in enumerate(groups):
        out_S[i] = (scores_S[i] - mean[group]) / (std[group] + eps)
    return out_S


def best_of_group(rewards: Sequence[float], groups: Sequence[Hashable], k: int) -> list[bool]:
    """Return which rewards are among the `k` largest of their group. Of equal rewards, the first ones count."""
    by_group: dict[Hashable, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        by_group[group].append(i)
    keep = [False] * len(rewards)
    for members in by_group.values():
        for i in sorted(members, key=lambda i: -rewards[i])[:k]:
            keep[i] = True
    return keep


def pack(groups: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Plan micro-batches like `plan_microbatches`, with a linear search of bins, for groups that fit the budget.

    Assigns the largest group first, to the emptiest bin, or to a new bin if it would not fit. Bins that were opened
    late contain less. So the groups are distributed once more over the final number of bins. This plan is used if it
    fits.

    Returns:
        The indices of the sequences of each bin.
    """
    sizes = [sum(lengths) for lengths in groups]
    order = sorted(range(len(sizes)), key=lambda g: -sizes[g])
    n_bins = -(-sum(sizes) // budget)
    bins = _fill(order, sizes, n_bins, budget)
    if len(bins) > n_bins:
        even = _fill(order, sizes, len(bins), None)
        if max(sum(sizes[g] for g in members) for members in even) <= budget:
            bins = even
    first, at = [], 0
    for lengths in groups:
        first.append(at)
        at += len(lengths)
    plan = [sorted(first[g] + i for g in members for i in range(len(groups[g]))) for members in bins if members]
    return sorted(plan)


def _fill(order: Sequence[int], sizes: Sequence[int], n_bins: int, budget: int | None) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    loads = [0] * n_bins
    for g in order:
        emptiest = 0
        for b in range(1, len(bins)):
            if (loads[b], len(bins[b])) < (loads[emptiest], len(bins[emptiest])):
                emptiest = b
        if budget is not None and loads[emptiest] + sizes[g] > budget:
            bins.append([])
            loads.append(0)
            emptiest = len(bins) - 1
        bins[emptiest].append(g)
        loads[emptiest] += sizes[g]
    return bins
