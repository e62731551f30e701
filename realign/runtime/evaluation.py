"""`Evaluation`: held-out prompts answered by a role and judged by a reward function; no part of the training graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from realign.api import (
    GenerationConfig,
    Mean,
    MicroBatchSpec,
    Model,
    ModelInterface,
    SequenceSample,
    Stats,
    masked_mean,
    merge_stats,
    stat_values,
)
from realign.functional import segment_sum


@dataclass
class Evaluation:
    """What to ask, how to sample, how to judge."""

    data: Any
    """Held-out prompts: a data node such as `realign.data.PromptData`."""
    reward: ModelInterface
    """Judges each response: an interface whose `inference` writes `rewards`."""
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(greedy=True))
    """How responses are sampled; any settings, since nothing trains on them."""
    every_steps: int = 10
    """Steps between evaluations; there is always one before and one after training."""
    role: str = "actor"
    """Whose model answers."""
    batch_prompts: int = 256
    """Prompts answered at once."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "batch_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"evaluation.{name} must be at least 1, found {getattr(self, name)}")

    def run(self, model: Model, dataset: Any) -> tuple[dict[str, float], SequenceSample]:
        """Answer and judge every prompt of `dataset` once.

        Returns:
            The metrics `eval/...`, and the judged responses of the first batch.
        """
        stats: list[Stats] = []
        first: SequenceSample | None = None
        for number, prompts in enumerate(self._batches(dataset)):
            judged = self._judge(model, prompts, number)
            first = first or judged
            stats.append(sequence_stats(judged))
        if first is None:
            raise ValueError("the evaluation data holds no prompt")
        return {f"eval/{name}": value for name, value in stat_values(merge_stats(stats)).items()}, first

    def _batches(self, dataset: Any) -> Iterator[SequenceSample]:
        for start in range(0, len(dataset), self.batch_prompts):
            rows = range(start, min(start + self.batch_prompts, len(dataset)))
            yield dataset.sample([(0, row) for row in rows])

    def _judge(self, model: Model, prompts: SequenceSample, number: int) -> SequenceSample:
        seed = model.call_seed(f"evaluation/{number}")
        answered = model.machine.generate(prompts.select(["prompt_ids"]), self.generation, seed=seed)
        answered = answered.merge(prompts.select(["row"]))
        judge = Model("evaluation", None, model.tokenizer, model.seed, model.version)
        return answered.merge(self.reward.inference(judge, answered, MicroBatchSpec()))


def sequence_stats(batch: SequenceSample) -> Stats:
    """Metrics of sampled sequences, as far as their keys are there; each a mean over the sequences of the batch.

    `reward` (of those that have one), `missing_rewards` (fraction), `response_tokens` (all that follow the prompt, also
    tokens of tools and of responses without reward) and `truncated_fraction`.
    """
    stats: Stats = {}
    if "rewards" in batch:
        present_S = batch["rewards"].isfinite()
        stats["reward"] = masked_mean(batch["rewards"], present_S)
        stats["missing_rewards"] = _mean((~present_S).float())
    if "prompt_mask" in batch:
        tokens_S = segment_sum((~batch["prompt_mask"]).float(), batch.cu_seqlens())
        stats["response_tokens"] = _mean(tokens_S)
    if "truncated" in batch:
        stats["truncated_fraction"] = _mean(batch["truncated"].float())
    return stats


def _mean(x_S: Tensor) -> Mean:
    return masked_mean(x_S, torch.ones_like(x_S, dtype=torch.bool))
