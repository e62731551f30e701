"""Rewards computed by a Python function `(prompt, response, row) -> float | None`, in processes that may fail alone.

Reads `input_ids`, `prompt_mask` and `row`; writes `rewards` [S]. The response is the text of the tokens that were not
given, without special tokens. A function that raises, hangs, crashes or returns nonsense gives NaN for that response
(so does None): it leaves the loss and its group's statistics, and above `max_failed_fraction` the run stops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from realign.api import MicroBatchSpec, Model, ModelInterface, SequenceSample, derive_seed
from realign.rewards.pool import RewardPool


@dataclass
class RuleRewardInterface(ModelInterface):
    """A verifiable reward; needs no network."""

    function: str = "realign.rewards.arithmetic:exact_answer"
    """Import path of the function, `package.module:name` or `path/to/file.py:name`, or a URL that is asked for each
    response (`realign.rewards.http`)."""
    workers: int = 2
    """Processes; 0 calls the function in this process (a breakpoint works; a hang is not caught)."""
    timeout_s: float = 30.0
    """Seconds that one call may take."""
    memory_mb: int | None = 4096
    """Address space that a worker may use beyond its imports (MiB; Linux only); null sets no limit."""
    max_failed_fraction: float = 0.5
    """The run stops when more than this fraction of a batch fails."""
    shuffle: bool = False
    """Deal the rewards of a batch out at random: the control under which nothing may be learned."""

    needs_engine: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._pool: RewardPool | None = None

    def open(self) -> None:
        """Find the function and start the worker processes.

        Raises:
            ValueError: there is no such function, or a setting is out of range.
        """
        self._opened()

    def _opened(self) -> RewardPool:
        if self._pool is None:
            self._pool = RewardPool(
                self.function,
                workers=self.workers,
                timeout_s=self.timeout_s,
                memory_mb=self.memory_mb,
                max_failed_fraction=self.max_failed_fraction,
            )
        return self._pool

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`rewards` [S] fp32, NaN where there is none."""
        prompts, responses = texts(model, data)
        rows = [data.metadata["row"][i] for i in data.group_index().tolist()]
        values = self._opened().score(prompts, responses, rows).values
        rewards_S = torch.tensor([float("nan") if v is None else v for v in values], dtype=torch.float32)
        if self.shuffle:
            seed = derive_seed(model.seed, "shuffle", *map(str, data.ids))
            rewards_S = rewards_S[torch.from_numpy(np.random.default_rng(seed).permutation(len(rewards_S)))]
        return data.select(["input_ids"]).with_sequences(rewards=rewards_S).select(["rewards"])

    def close(self) -> None:
        """Stop the worker processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def texts(model: Model, data: SequenceSample) -> tuple[list[str], list[str]]:
    """The prompt and the response of every sequence as text, without special tokens."""
    prompts, responses = [], []
    for ids, given in zip(data.sequences("input_ids"), data.sequences("prompt_mask"), strict=True):
        prompts.append(ids[given].tolist())
        responses.append(ids[~given].tolist())
    decode = model.tokenizer.batch_decode
    return decode(prompts, skip_special_tokens=True), decode(responses, skip_special_tokens=True)
