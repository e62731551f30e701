"""Rewards computed by a Python function `(prompt, response, row) -> float | None`, in isolated worker processes.

Reads `input_ids`, `prompt_mask` and `row`; writes `rewards` [S]. The function gets the text of the response tokens
without special tokens. If it raises, hangs, crashes, or returns None or an invalid value, the response's reward is NaN.
The response is then excluded from the loss and from its group's statistics. The run stops if more than
`max_failed_fraction` of a batch fails.

With `dense` the function is called as `(prompt, response, row, tokens)` and rewards every token of the response. Then
`dense_rewards` [T] is written too, and `rewards` is 0 for scored responses and NaN for the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from realign.api import Keys, MicroBatchSpec, Model, ModelInterface, SequenceSample, derive_seed
from realign.errors import SettingsError
from realign.interfaces.components.response_cut import ResponseCut, cut_responses, reward_keys
from realign.rewards.pool.limits import Limits, OpenFiles
from realign.rewards.pool.pool import RewardPool
from realign.settings import Count, Fraction, NonNegative, NonNegativeInt, Positive


@dataclass
class RuleRewardInterface(ModelInterface):
    """A reward computed by a function instead of a model."""

    function: str = "realign.rewards.arithmetic:exact_answer"
    """Import path of the function, `package.module:name` or `path/to/file.py:name`, or the URL of a server that scores
    responses (`realign.rewards.pool.http`)."""
    workers: NonNegativeInt = 2
    """Number of worker processes; 0 calls the function in this process (breakpoints work, hangs are not caught)."""
    timeout_s: Positive = 30.0
    """Time limit of one call in seconds."""
    patience_s: NonNegative = 120.0
    """Seconds without any answer (function hangs, server is down) after which the rest of a batch fails. Until then,
    responses that a server did not answer are retried, so a restart of the server loses no rewards."""
    memory_mb: Count | None = 4096
    """Address space in MiB that a worker may use beyond its imports (Linux only); null sets no limit."""
    cpu_s: Positive | None = 600.0
    """CPU seconds that one call may use, over all its threads (not on Windows); null sets no limit. The limit also
    applies to each process that the function starts."""
    open_files: OpenFiles | None = 1024
    """Number of file descriptors of a worker (not on Windows); null keeps the system's limit."""
    keep_environment: list[str] = field(default_factory=list)
    """Environment variables that workers inherit although they look like secrets, such as `[OPENAI_API_KEY]`. Other
    variables with token, key, secret or password in their name are removed."""
    max_failed_fraction: Fraction = 0.5
    """Fraction of a batch that may fail; the run stops above it."""
    shuffle: bool = False
    """Randomly permute the rewards within a batch. This is a negative control: the policy should not improve."""
    cut: ResponseCut | None = None
    """Settings to score a response only up to its first end mark; null: score the whole response."""
    dense: bool = False
    """Pass the text of each response token to the function, and expect a list with one reward per token. The texts
    include special tokens. A character that spans several tokens appears as replacement characters."""

    needs_engine: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shuffle and self.dense:
            raise SettingsError(
                "shuffle=true: permutes one reward per response, but dense=true rewards tokens. Set one to false"
            )
        Limits(self.memory_mb, self.cpu_s, self.open_files, self.keep_environment)  # validates the settings
        self._pool: RewardPool | None = None

    def open(self) -> None:
        """Load the function and create the pool of worker processes.

        Raises:
            ConfigError: the function does not exist, or a setting is out of range.
        """
        self._opened()

    def _opened(self) -> RewardPool:
        if self._pool is None:
            self._pool = RewardPool(
                self.function,
                workers=self.workers,
                timeout_s=self.timeout_s,
                patience_s=self.patience_s,
                memory_mb=self.memory_mb,
                cpu_s=self.cpu_s,
                open_files=self.open_files,
                keep_environment=self.keep_environment,
                max_failed_fraction=self.max_failed_fraction,
                dense=self.dense,
            )
        return self._pool

    def keys(self, method: str) -> Keys:
        """See `ModelInterface.keys`."""
        if method != "inference":
            return Keys()
        return Keys(needs=dict.fromkeys(("input_ids", "prompt_mask", "row"), ""), writes=reward_keys(self.dense))

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Compute `rewards` [S] fp32, NaN for responses without reward; with `dense` also `dense_rewards` [T]."""
        cut = cut_responses(self.cut, data, model.tokenizer)
        asked = cut.judged_S.nonzero()[:, 0].tolist()  # responses with the penalty are not scored
        owners = data.group_index().tolist()
        prompts, responses = texts(model, cut.data)
        prompts, responses = [prompts[i] for i in asked], [responses[i] for i in asked]
        rows = [data.metadata["row"][owners[i]] for i in asked]
        rewards_S = torch.zeros(len(owners))
        if not self.dense:
            values = self._opened().score(prompts, responses, rows).values
            rewards_S[asked] = torch.tensor([math.nan if v is None else v for v in values])
            rewards_S = self._shuffled(cut.rewards(rewards_S), model, data)
            return data.with_sequences(rewards=rewards_S).select(["rewards"])
        tokens = token_texts(model, cut.data)
        lists = self._opened().score_tokens(prompts, responses, rows, [tokens[i] for i in asked]).values
        rewards_S[asked] = torch.tensor([math.nan if v is None else 0.0 for v in lists])
        found = dict(zip(asked, lists, strict=True))
        flat = [x for i, own in enumerate(tokens) for x in found.get(i) or [0.0] * len(own)]
        dense_T = torch.zeros(len(cut.data["input_ids"])).masked_scatter(~cut.data["prompt_mask"], torch.tensor(flat))
        written = data.with_sequences(rewards=cut.rewards(rewards_S))
        return written.with_tokens(dense_rewards=cut.dense_rewards(dense_T, data)).select(["rewards", "dense_rewards"])

    def _shuffled(self, rewards_S: Tensor, model: Model, data: SequenceSample) -> Tensor:
        if not self.shuffle:
            return rewards_S
        seed = derive_seed(model.seed, "shuffle", *map(str, data.ids))
        return rewards_S[torch.from_numpy(np.random.default_rng(seed).permutation(len(rewards_S)))]

    def close(self) -> None:
        """Stop the worker processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def texts(model: Model, data: SequenceSample) -> tuple[list[str], list[str]]:
    """Decode the prompt and the response of every sequence, without special tokens."""
    prompts, responses = [], []
    for ids, given in zip(data.sequences("input_ids"), data.sequences("prompt_mask"), strict=True):
        prompts.append(ids[given].tolist())
        responses.append(ids[~given].tolist())
    decode = model.tokenizer.batch_decode
    return decode(prompts, skip_special_tokens=True), decode(responses, skip_special_tokens=True)


def token_texts(model: Model, data: SequenceSample) -> list[list[str]]:
    """Decode each response token of every sequence, including special tokens."""
    known = data["input_ids"].unique().tolist()
    decoded = model.tokenizer.batch_decode([[i] for i in known], skip_special_tokens=False)
    text = dict(zip(known, decoded, strict=True))
    pairs = zip(data.sequences("input_ids"), data.sequences("prompt_mask"), strict=True)
    return [[text[i] for i in ids[~given].tolist()] for ids, given in pairs]
