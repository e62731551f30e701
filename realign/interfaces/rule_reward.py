"""Rewards computed by a Python function `(prompt, response, row) -> float | None`, in processes that may fail alone.

Reads `input_ids`, `prompt_mask` and `row`; writes `rewards` [S]. The response is the text of the tokens that were not
given, without special tokens. A function that raises, hangs, crashes or returns nonsense gives NaN for that response
(so does None): it leaves the loss and its group's statistics, and above `max_failed_fraction` the run stops.

With `dense` the function is called as `(prompt, response, row, tokens)` and rewards every token of the response, so
`dense_rewards` [T] are written too, and `rewards` only say whether there was a verdict: 0, or NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from realign.api import Keys, MicroBatchSpec, Model, ModelInterface, SequenceSample, derive_seed
from realign.interfaces.components.response_cut import ResponseCut, cut_responses, reward_keys
from realign.rewards.pool.limits import Limits, OpenFiles
from realign.rewards.pool.pool import RewardPool
from realign.settings import Count, Fraction, NonNegative, NonNegativeInt, Positive


@dataclass
class RuleRewardInterface(ModelInterface):
    """A verifiable reward; needs no network."""

    function: str = "realign.rewards.arithmetic:exact_answer"
    """Import path of the function, `package.module:name` or `path/to/file.py:name`, or a URL that is asked for each
    response (`realign.rewards.pool.http`)."""
    workers: NonNegativeInt = 2
    """Processes; 0 calls the function in this process (a breakpoint works; a hang is not caught)."""
    timeout_s: Positive = 30.0
    """Seconds that one call may take."""
    patience_s: NonNegative = 120.0
    """Seconds without any answer, of a function that hangs or a server that is gone, after which the rest of a batch is
    given up. Until then responses that a server did not answer are asked for again: one that restarts costs none."""
    memory_mb: Count | None = 4096
    """Address space that a worker may use beyond its imports (MiB; Linux only); null sets no limit."""
    cpu_s: Positive | None = 600.0
    """CPU seconds, of all threads together, that one call may use, also in processes that outlive it (each of them
    alone; not on Windows); null sets no limit."""
    open_files: OpenFiles | None = 1024
    """File descriptors that a worker may hold (not on Windows); null leaves the system's limit."""
    keep_environment: list[str] = field(default_factory=list)
    """Variables that workers inherit although they look like secrets, such as `[OPENAI_API_KEY]`; others whose names
    say token, key, secret or password they do not have."""
    max_failed_fraction: Fraction = 0.5
    """The run stops when more than this fraction of a batch fails."""
    shuffle: bool = False
    """Deal the rewards of a batch out at random: the control under which nothing may be learned."""
    cut: ResponseCut | None = None
    """Judge a response only up to its first end mark; null: all of it."""
    dense: bool = False
    """Give the function also the text of each token of the response, special tokens too (a character that several
    tokens make up shows as replacement characters), and take a list with one reward for each."""

    needs_engine: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shuffle and self.dense:
            raise ValueError("shuffle deals one reward out to each response, but dense rewards its tokens; choose one")
        Limits(self.memory_mb, self.cpu_s, self.open_files, self.keep_environment)  # checks the names
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
        """`rewards` [S] fp32, NaN where there is none; with `dense` also `dense_rewards` [T]."""
        cut = cut_responses(self.cut, data, model.tokenizer)
        asked = cut.judged_S.nonzero()[:, 0].tolist()  # who gets the penalty is not judged
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
    """The prompt and the response of every sequence as text, without special tokens."""
    prompts, responses = [], []
    for ids, given in zip(data.sequences("input_ids"), data.sequences("prompt_mask"), strict=True):
        prompts.append(ids[given].tolist())
        responses.append(ids[~given].tolist())
    decode = model.tokenizer.batch_decode
    return decode(prompts, skip_special_tokens=True), decode(responses, skip_special_tokens=True)


def token_texts(model: Model, data: SequenceSample) -> list[list[str]]:
    """The text of each token of the response of every sequence, special tokens too."""
    known = data["input_ids"].unique().tolist()
    decoded = model.tokenizer.batch_decode([[i] for i in known], skip_special_tokens=False)
    text = dict(zip(known, decoded, strict=True))
    pairs = zip(data.sequences("input_ids"), data.sequences("prompt_mask"), strict=True)
    return [[text[i] for i in ids[~given].tolist()] for ids, given in pairs]
