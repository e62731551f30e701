"""Times the operations on packed samples. Run: `python benchmarks/bench_data.py [--repeats 5]`.

Two batches: 10,000 sequences of 1,000 tokens in 1,250 groups, and 100,000 sequences of 48 tokens on average in groups
of 8. Prints a table of seconds (median and best of the repeats) and, as the last line, the same as one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from realign.api import Lengths, MicroBatchSpec, SequenceSample, plan_microbatches

GROUP = 8


def make_batch(flat: np.ndarray) -> SequenceSample:
    """A batch as an algorithm sees it: three keys per token, one per sequence, one object per prompt."""
    n_prompts, total = len(flat) // GROUP, int(flat.sum())
    tokens = Lengths(np.full(n_prompts, GROUP), flat)
    sample = SequenceSample(tuple(f"prompt-{i}" for i in range(n_prompts)))
    sample = sample.with_data({"input_ids": torch.randint(0, 32_000, (total,))}, lengths=tokens)
    sample = sample.with_tokens(logprobs=torch.randn(total), loss_mask=torch.rand(total) < 0.5)
    return sample.with_sequences(rewards=torch.randn(len(flat))).with_metadata(row=[{} for _ in range(n_prompts)])


def operations(sample: SequenceSample, budget: int) -> dict[str, Callable[[], object]]:
    """The timed calls by name; what they need is made beforehand."""
    spec = MicroBatchSpec(max_tokens_per_microbatch=budget)
    batches = sample.split(spec)
    results = [part.select(["logprobs", "rewards"]) for part in batches]
    chunks = sample.chunks(8)
    order = np.random.default_rng(0).permutation(len(sample))
    left, right = sample.select(["input_ids"]), sample.select(["logprobs", "loss_mask", "rewards"])
    return {
        "plan": lambda: plan_microbatches(sample.lengths["input_ids"], spec),
        "split": lambda: sample.split(spec),
        "restore": lambda: batches.restore(results),
        "chunks": lambda: sample.chunks(8),
        "gather": lambda: SequenceSample.gather(chunks),
        "merge": lambda: left.merge(right),
        "permute": lambda: sample.take(order),
        "unpack": sample.unpack,
    }


def seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Wall-clock seconds of each of the repeats; one call before them is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        kept = call()  # freeing the result is not part of the operation
        times.append(time.perf_counter() - start)
        del kept
    return times


def main() -> None:
    """Time everything, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    batches = {
        "10k x 1000 tokens, budget 32k": (np.full(10_000, 1000), 32_768),
        "100k x mean 48 tokens, budget 32k": (rng.integers(1, 96, 100_000), 32_768),
    }
    report: dict[str, object] = {"torch": torch.__version__, "python": platform.python_version()}
    report |= {"threads": torch.get_num_threads(), "cpus": os.cpu_count(), "repeats": repeats}
    for name, (flat, budget) in batches.items():
        print(f"{name:<36}{'median s':>10}{'best s':>10}")
        sample = make_batch(flat)
        for operation, call in operations(sample, budget).items():
            times = seconds(call, repeats)
            median, best = round(statistics.median(times), 4), round(min(times), 4)
            report[f"{name}: {operation}"] = median
            print(f"  {operation:<34}{median:>10.4f}{best:>10.4f}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
