"""Operations on packed samples and advantage estimation, compared with equivalent plain loops.

    python -m benchmarks.data                              # 1k, 10k and 100k sequences
    python -m benchmarks.data sizes=1000,10000 repeats=9

Sequences have 48 tokens on average (geometric, at most 256), in groups of 8. `benchmarks.loops` contains the loops. The
benchmark first checks that both sides give the same result, then runs them in alternation. Prints a table of medians,
and one JSON object as the last line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import loops
from benchmarks.loops import NestedBatch
from benchmarks.report import alternate, arguments, facts, table
from realign.api import Lengths, MicroBatchSpec, SequenceSample, plan_microbatches
from realign.functional import Scope, gae, keep_best, normalize

GROUP = 8
PARTS = 8
BUDGET = 32_768
GAMMA, LAM, EPS = 0.99, 0.95, 1e-6


@dataclass
class Operation:
    """An operation with two implementations. `check` raises if their results differ."""

    name: str
    ours: Callable[[], Any]
    loop: Callable[[], Any]
    check: Callable[[Any, Any], None]


def make_sample(n_sequences: int, seed: int = 0) -> SequenceSample:
    """Build a batch with three keys per token, one key per sequence, and one object per prompt."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    flat = np.clip(rng.geometric(1 / 48, n_sequences), 2, 256)
    total, n_prompts = int(flat.sum()), n_sequences // GROUP
    sample = SequenceSample(tuple(f"prompt-{i}" for i in range(n_prompts)))
    ids_T = torch.randint(0, 32_000, (total,), generator=generator)
    sample = sample.with_data({"input_ids": ids_T}, lengths=Lengths(np.full(n_prompts, GROUP), flat))
    mask_T = torch.rand(total, generator=generator) < 0.5
    sample = sample.with_tokens(logprobs=torch.randn(total, generator=generator), loss_mask=mask_T)
    return sample.with_sequences(rewards=torch.randn(n_sequences, generator=generator))


def nested(sample: SequenceSample) -> NestedBatch:
    """Convert a batch to nested lists of lengths."""
    lengths = {key: [list(prompt) for prompt in cut.nested()] for key, cut in sample.lengths.items()}
    return NestedBatch(list(sample.ids), dict(sample.data), lengths)


def same_batch(ours: SequenceSample, loop: NestedBatch) -> None:
    """Raise an error unless both batches have the same prompts, keys, lengths and values."""
    assert list(ours.ids) == loop.ids
    assert ours.data.keys() == loop.data.keys()
    for key, x in ours.data.items():
        assert torch.equal(x, loop.data[key]), key
        assert [list(prompt) for prompt in ours.lengths[key].nested()] == loop.lengths[key], key


def same_batches(ours: Any, loop: list[NestedBatch]) -> None:
    """Apply `same_batch` to each pair."""
    for mine, other in zip(ours, loop, strict=True):
        same_batch(mine, other)


def sample_operations(sample: SequenceSample) -> list[Operation]:
    """Return the operations of a training step on its batch."""
    spec = MicroBatchSpec(max_tokens_per_microbatch=BUDGET)
    order = np.random.default_rng(0).permutation(len(sample))
    plain = nested(sample)
    batches = sample.split(spec)
    plan = [indices.tolist() for indices in batches.plan]
    results = [part.select(["logprobs", "rewards"]) for part in batches]
    plain_results = [nested(part) for part in results]
    n_parts = min(PARTS, len(sample))
    chunks = sample.chunks(n_parts)
    plain_chunks = [nested(chunk) for chunk in chunks]
    left, right = sample.select(["input_ids"]), sample.select(["logprobs", "loss_mask", "rewards"])
    plain_left, plain_right = nested(left), nested(right)
    listed = order.tolist()

    def packing() -> list[list[int]]:
        return loops.pack(plain.lengths["input_ids"], BUDGET)

    def same_plan(ours: Any, loop: list[list[int]]) -> None:
        assert [indices.tolist() for indices in ours] == loop

    return [
        Operation("gather", lambda: SequenceSample.gather(chunks), lambda: loops.gather(plain_chunks), same_batch),
        Operation("take", lambda: sample.take(order), lambda: plain.take(listed), same_batch),
        Operation(
            "minibatches",
            lambda: sample.minibatches(n_parts, np.random.default_rng(0)),
            lambda: plain.minibatches(listed, n_parts),
            same_batches,
        ),
        Operation("merge", lambda: left.merge(right), lambda: plain_left.merge(plain_right), same_batch),
        Operation("plan", lambda: plan_microbatches(sample.lengths["input_ids"], spec), packing, same_plan),
        Operation("plan, split", lambda: sample.split(spec), lambda: plain.split(packing()), same_batches),
        Operation("restore", lambda: batches.restore(results), lambda: plain.restore(plan, plain_results), same_batch),
    ]


def credit_operations(sample: SequenceSample) -> list[Operation]:
    """Return the operations of an algorithm on rewards."""
    cu_seqlens, flat = sample.cu_seqlens(), torch.from_numpy(sample.lengths["input_ids"].flat.copy())
    rewards_T, values_T = sample["logprobs"], sample["logprobs"].flip(0)
    mask_T = torch.ones(len(rewards_T), dtype=torch.bool)
    there_SN = torch.arange(int(flat.max())) < flat[:, None]
    rewards_SN, values_SN = (torch.zeros(there_SN.shape).masked_scatter(there_SN, x) for x in (rewards_T, values_T))
    scores_S, group_S = sample["rewards"], sample.group_index()
    owners = [i for i in sample.ids for _ in range(GROUP)]
    every_S = torch.ones(len(scores_S), dtype=torch.bool)
    listed = scores_S.tolist()

    def same_credit(ours: Any, loop: Any) -> None:
        for mine_T, other_SN in zip(ours, loop, strict=True):
            torch.testing.assert_close(mine_T, other_SN[there_SN], rtol=1e-4, atol=1e-4)

    def same_scores(ours: Any, loop: Any) -> None:
        torch.testing.assert_close(ours, loop, rtol=1e-4, atol=1e-4)

    def same_choice(ours: Any, loop: Any) -> None:
        assert ours.tolist() == loop

    return [
        Operation(
            "GAE",
            lambda: gae(rewards_T, values_T, mask_T, cu_seqlens, gamma=GAMMA, lam=LAM),
            lambda: loops.padded_gae(rewards_SN, values_SN, gamma=GAMMA, lam=LAM),
            same_credit,
        ),
        Operation(
            "normalise by group",
            lambda: normalize(scores_S, group_S, every_S, mean=Scope.group, std=Scope.group, unbiased=True, eps=EPS),
            lambda: loops.normalize_by_group(scores_S, owners, EPS),
            same_scores,
        ),
        Operation(
            "keep the best 2",
            lambda: keep_best(scores_S, group_S, every_S, 2),
            lambda: loops.best_of_group(listed, owners, 2),
            same_choice,
        ),
    ]


def measure(n_sequences: int, repeats: int) -> list[dict[str, Any]]:
    """Check the results of every operation at one size, and return the median seconds."""
    sample = make_sample(n_sequences)
    rounds = repeats * min(10, max(1, 10_000 // n_sequences))  # short operations vary the most
    rows = []
    for operation in [*sample_operations(sample), *credit_operations(sample)]:
        operation.check(operation.ours(), operation.loop())
        found = alternate({"ours": operation.ours, "loop": operation.loop}, rounds, warm_up=False)
        rows.append(
            {
                "sequences": n_sequences,
                "operation": operation.name,
                "ours_s": float(f"{found['ours'].wall:.4g}"),
                "loop_s": float(f"{found['loop'].wall:.4g}"),
                "ratio": float(f"{found['loop'].wall / found['ours'].wall:.3g}"),
                "cpu_ratio": float(f"{found['loop'].cpu / found['ours'].cpu:.3g}"),
            }
        )
    return rows


def main(given: list[str] | None = None) -> None:
    """Measure every size; print the table and the JSON line."""
    words = arguments({"sizes": "1000,10000,100000", "repeats": "5"}, given)
    rows = [row for n in words["sizes"].split(",") for row in measure(int(n) // GROUP * GROUP, int(words["repeats"]))]
    cells = [
        [
            r["operation"],
            f"{r['sequences']:,}",
            f"{r['ours_s'] * 1e3:,.2f}",
            f"{r['loop_s'] * 1e3:,.2f}",
            f"{r['ratio']:.1f}",
            f"{r['cpu_ratio']:.1f}",
        ]
        for r in rows
    ]
    print(table(["operation", "sequences", "ours ms", "loop ms", "ratio", "CPU time ratio"], cells))
    print(json.dumps({"benchmark": "data", **facts(), "repeats": int(words["repeats"]), "rows": rows}))


if __name__ == "__main__":
    main()
