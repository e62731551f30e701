"""Test what ranks send of a batch: digests, results and metrics, but no batch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from tests.engines.distributed import scenarios
from tests.engines.distributed.run_ranks import run_ranks
from tests.tiny import random_sample, save_tiny

TOKENS = 8
SIZES = (16, 64)
"""Numbers of sequences."""


def sent(folder: Path) -> dict[str, list[int]]:
    """Return the bytes that this rank sends to the others in each call, for each size of the batch."""
    engine: Any = scenarios.load(folder, "llama").engine
    sizes: dict[str, list[int]] = {"forward": [], "train_batch": [], "generate": []}
    gather = dist.all_gather_object
    total = 0

    def counted(values: list[Any], x: Any, group: Any = None) -> None:
        nonlocal total
        total += len(pickle.dumps(x))
        gather(values, x, group=group)

    def score(output: Any, part: SequenceSample) -> SequenceSample:
        return part.with_tokens(scored=output.logprobs())

    with patch.object(dist, "all_gather_object", counted):
        for n in SIZES:
            data, spec = random_sample([(TOKENS,)] * n), MicroBatchSpec(TOKENS * n)
            prompts = SequenceSample.from_sequences(
                tuple(range(n)), {"prompt_ids": [[torch.full((3,), 5)] for _ in range(n)]}
            )
            config = GenerationConfig(max_new_tokens=5, min_new_tokens=5)
            for name, call in {
                "forward": lambda data=data, spec=spec: engine.forward(data, spec, score),
                "train_batch": lambda data=data, spec=spec: engine.train_batch(
                    data, spec, scenarios.plain_loss, scenarios.weight
                ),
                "generate": lambda prompts=prompts, config=config: engine.generate(prompts, config, seed=0),
            }.items():
                total = 0
                call()
                sizes[name].append(total)
    return sizes


def test_a_larger_batch_only_sends_more_results(tmp_path: Path) -> None:
    save_tiny(tmp_path / "llama", family="llama", vocab_size=97)
    more = (SIZES[1] - SIZES[0]) // 2  # sequences of a rank
    of_id = 40  # identifiers and lengths of a sequence
    token = {"forward": 4, "generate": 8 + 1 + 1 + 4}  # log-probs; tokens, two masks and log-probs
    for sizes in run_ranks(2, sent, tmp_path):
        assert abs(sizes["train_batch"][1] - sizes["train_batch"][0]) < 200
        for call, size in token.items():
            assert sizes[call][1] - sizes[call][0] <= more * (TOKENS * size + of_id)
