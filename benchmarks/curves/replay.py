"""The preset and the independent implementation on identical samples, step by step."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.curves import padded, task
from benchmarks.curves.runs import Record, Run, realign_record, score_text
from realign.config import build_experiment, compose
from realign.demo.tiny import write_rows
from realign.runtime.local import LocalRuntime

DIFFERENCES = {
    "metric_difference": "largest difference of a metric",
    "weight_difference": "of a weight",
    "weight_moved": "largest change of a weight",
}
"""What a record contains, with titles."""
MICRO_BATCH = 8192
"""Tokens of a micro-batch of the preset. It limits memory."""


class Step(NamedTuple):
    """A step of the preset."""

    queries: list[list[int]]
    responses: Tensor
    """[B, R]."""
    scores: Tensor
    """[B]."""
    record: Record
    weights: Tensor
    """All weights after the step."""


class Difference(NamedTuple):
    """Difference of both implementations after a step on identical samples."""

    record: Record
    """Metrics of the independent implementation."""
    metric: float
    """Largest difference of a metric, relative above 1."""
    weight: float
    """Largest difference of a weight."""


def trained(runtime: LocalRuntime, steps: int) -> Iterator[Step]:
    """Train the preset."""
    machine: Any = runtime.models["actor"].engine
    for step in range(1, steps + 1):
        values, batch = runtime.step(step)
        rows = list(zip(batch.sequences("input_ids"), batch.sequences("prompt_mask"), strict=True))
        queries = [ids[prompt].tolist() for ids, prompt in rows]
        responses = torch.stack([ids[~prompt] for ids, prompt in rows])
        head = machine.value_head.head[0]
        yield Step(
            queries,
            responses,
            batch["rewards"],
            realign_record(values),
            flat([*machine.module.parameters(), head.weight[0], head.bias[0]]),
        )


def replay(trainer: padded.PaddedPPO, step: Step) -> Difference:
    """Train the independent implementation on the samples of a step of the preset."""
    rollout = trainer.rollout(step.queries, step.responses.to(trainer.device), step.scores.to(trainer.device))
    record = trainer.update(rollout)
    metric = max(abs(step.record[name] - record[name]) / max(1.0, abs(record[name])) for name in step.record)
    return Difference(record, metric, float((flat(trainer.parameters) - step.weights).abs().max()))


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return the values of all tensors."""
    return torch.cat([x.detach().flatten() for x in tensors])


def language_model_records(run: Run, folder: Path, model: Path, device: str) -> Iterator[dict[str, Any]]:
    """Train a pretrained language model with both implementations on identical samples, in fp32.

    Args:
        run: the run; its width and implementation do not matter.
        folder: folder for the texts and the output of the preset.
        model: folder of a causal language model with a tokenizer.
        device: cpu or cuda.

    Yields:
        For each step the metrics of both implementations and their differences; how far weights are from the start,
        and how many scores differ.
    """
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    # full stops without a space before them are one token of their own
    texts = (re.sub(r" (?=[.,!])", "", text) for text in task.passages(4096, 0))
    write_rows(folder / "texts.jsonl", ({"prompt": text} for text in texts))
    words = [*run.overrides(folder), f"models.actor.path={model}", "data.excerpt.max_tokens=64"]
    words += [f"+models.actor.device={device}", "+models.actor.dtype=float32", "overwrite=true"]
    words += [f"microbatch.max_tokens_per_microbatch={MICRO_BATCH}"]
    runtime = LocalRuntime(build_experiment(compose(words)))
    trainer = padded.PaddedPPO(model, run.constants(), seed=run.seed, device=device)
    start, tokenizer = flat(trainer.parameters), AutoTokenizer.from_pretrained(model, trust_remote_code=False)

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    began = time.perf_counter()
    try:
        for step in trained(runtime, run.steps):
            replayed = replay(trainer, step)
            scores = padded.scores(step.responses, decode, lambda text: score_text(run.reward, text))
            yield {
                "realign": step.record,
                "padded": replayed.record,
                "metric_difference": replayed.metric,
                "weight_difference": replayed.weight,
                "weight_moved": float((step.weights - start).abs().max()),
                "scores_that_differ": int((scores != step.scores.cpu()).sum()),
                "seconds": round(time.perf_counter() - began, 1),
            }
    finally:
        runtime.close()
