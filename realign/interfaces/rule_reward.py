"""Rewards computed by Python functions, reward servers or LLM judges, in isolated worker processes.

Reads `input_ids`, `prompt_mask` and `row`; writes `rewards` [S]. A function gets the text of the response tokens
without special tokens. If it raises, hangs, crashes, or returns None or an invalid value, the response's reward is NaN.
The response is then excluded from the loss and from its group's statistics. The run stops if a function fails on more
than `max_failed_fraction` of a batch.

With several `functions`, the reward is the weighted sum of their rewards. `rewards/<name>` [S] contains the reward of
each function before weighting. A response without a reward of one function has no reward.

With `dense` the function also has the argument `tokens`, and rewards every token of the response. Then
`dense_rewards` [T] is written too, and `rewards` is 0 for scored responses and NaN for the others.
"""

from __future__ import annotations

import contextvars
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from realign.api import Keys, MicroBatchSpec, Model, ModelInterface, Plan, SequenceSample, derive_seed
from realign.api.rewards import ANSWER, NAMED
from realign.errors import ConfigError, SettingsError
from realign.interfaces.components.response_cut import Cut, ResponseCut, cut_responses, reward_keys
from realign.rewards.pool.binding import RewardScope
from realign.rewards.pool.functions import SessionFunction
from realign.rewards.pool.limits import OpenFiles, WorkerLimits
from realign.rewards.pool.pool import RewardPool, RewardResults
from realign.rewards.terms import FunctionTerm, RewardTerm
from realign.settings import Count, Fraction, NonNegative, NonNegativeInt, Positive
from realign.tokenization import Tokens

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_SINGLE = ""
"""Name of the term of `function`, which is not reported apart."""


@dataclass
class RuleRewardInterface(ModelInterface):
    """A reward computed by functions instead of a model."""

    function: str | None = None
    """Your reward function, `path/to/file.py:name` or `package.module:name`, or the URL of a server that scores
    responses (`realign.rewards.pool.http`). For several functions, leave it null and set `functions`."""
    functions: dict[str, str | FunctionTerm | RewardTerm] = field(default_factory=dict)
    """Several functions by names of your choice, each an import path, with or without a `weight`. The reward is their
    weighted sum. A component such as `realign.rewards.judge.Judge` can stand in for a function."""
    workers: NonNegativeInt = 2
    """Number of worker processes; 0 calls the function in this process (breakpoints work, hangs aren't caught)."""
    timeout_s: Positive = 30.0
    """Time limit of one call in seconds."""
    patience_s: NonNegative = 120.0
    """Give up on the rest of a batch after this many seconds without any answer (function hangs, server is down). Until
    then, requests to a server are retried, so restarting it loses no rewards."""
    memory_mb: Count | None = 4096
    """Memory limit of a worker beyond its imports, as address space in MiB (Linux only); null sets no limit."""
    cpu_s: Positive | None = 600.0
    """CPU limit of one call in seconds, over all its threads (not on Windows); null sets no limit. It also applies to
    each process that the function starts."""
    open_files: OpenFiles | None = 1024
    """Limit of open files per worker (not on Windows); null keeps the system's limit."""
    keep_environment: list[str] = field(default_factory=list)
    """Secrets that your function needs in its environment, such as `[OPENAI_API_KEY]`. Workers don't inherit other
    variables with token, key, secret or password in their name."""
    max_failed_fraction: Fraction = 0.5
    """Stop the run if a larger fraction of a batch fails."""
    shuffle: bool = False
    """Shuffle the rewards within a batch, as a negative control: the policy shouldn't improve."""
    cut: ResponseCut | None = None
    """Score a response only up to its first end mark; null scores all of it."""
    known_answer: str | None = None
    """Column with the correct answer, such as `answer` or `reward_model.ground_truth`. `realign check` and the launch
    then score correct and wrong answers of a few rows, and stop unless the correct ones score higher. null: off."""
    known_answer_template: str = ANSWER
    """Response that `known_answer` scores, with the answer at `{answer}`, such as `<answer>{answer}</answer>`."""
    dense: bool = False
    """Reward every token: the function also gets the text of each response token, and returns a list with one reward
    per token. The texts include special tokens. A character that spans several tokens shows as replacement
    characters."""

    needs_engine: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shuffle and self.dense:
            raise SettingsError(
                "shuffle=true: permutes one reward per response, but dense=true rewards tokens. Set one to false"
            )
        if self.known_answer is not None and self.dense:
            raise SettingsError("known_answer: needs one reward per response. Set it to null, or dense=false")
        if ANSWER not in self.known_answer_template:
            raise SettingsError(
                f"known_answer_template={self.known_answer_template!r}: must contain {ANSWER}, the place of the answer"
            )
        WorkerLimits(self.memory_mb, self.cpu_s, self.open_files, self.keep_environment)  # validates the settings
        self._terms = self._check_terms()
        self._pools: dict[str, RewardPool] = {}
        self._notes: dict[str, str] = {}
        self._calls: dict[str, str] = {}

    @override
    def ineffective(self) -> Mapping[str, str]:
        functions = [self.function] if self.function is not None else list(self.functions.values())
        session = [isinstance(f.function if isinstance(f, FunctionTerm) else f, SessionFunction) for f in functions]
        of_workers = ("workers", "memory_mb", "cpu_s", "open_files", "keep_environment")
        reason = "on a function of a Python session, which no worker process has. Move the function to a file"
        return dict.fromkeys(of_workers, reason) if session and all(session) else {}

    def _check_terms(self) -> dict[str, RewardTerm]:
        """Return the term of each function, by name."""
        if (self.function is None) == (not self.functions):
            cure = "set. Set function=null to use functions" if self.functions else "empty. Set function=MODULE:NAME"
            raise SettingsError(f"function: function and functions are both {cure}")
        if self.dense and self.functions:
            raise SettingsError("functions: dense=true supports one function. Set function, or dense=false")
        for name in self.functions:
            if not _NAME.fullmatch(name):
                raise SettingsError(
                    f"functions.{name}: the name is part of the name of a metric. Use only letters, digits, '_', '-' "
                    "and '.'"
                )
        given = self.functions if self.function is None else {_SINGLE: self.function}
        return {name: FunctionTerm(term) if isinstance(term, str) else term for name, term in given.items()}

    def open(self) -> None:
        """Load the functions and create their pools of worker processes.

        Raises:
            ConfigError: a function does not exist, or a setting is out of range.
        """
        for name in self._terms:
            self._open_pool(name)

    def _open_pool(self, name: str) -> RewardPool:
        if name not in self._pools:
            term = self._terms[name]
            self._pools[name] = RewardPool(
                term.load(),
                workers=self.workers,
                timeout_s=term.deadline_s(self.timeout_s),
                patience_s=self.patience_s,
                memory_mb=self.memory_mb,
                cpu_s=self.cpu_s,
                open_files=self.open_files,
                keep_environment=[*self.keep_environment, *term.variables],
                max_failed_fraction=self.max_failed_fraction,
                dense=self.dense,
                concurrency=term.concurrency,
            )
            self._notes[name] = self._pools[name].note
            if isinstance(term, FunctionTerm) and "://" not in term.function:
                self._calls[name] = self._pools[name].binding.describe()
        return self._pools[name]

    @override
    def keys(self, method: str) -> Keys:
        if method != "inference":
            return Keys()
        return Keys(
            needs=dict.fromkeys(("input_ids", "prompt_mask", "row"), ""),
            writes=reward_keys(self.dense),
            reports=frozenset(f"{NAMED}{name}" for name in self.functions),
        )

    def plan(self) -> Plan:
        """Return the plan. Whether a function needs whole batches is known after `open`."""
        return Plan(whole_batch=any(pool.binding.scope is RewardScope.batch for pool in self._pools.values()))

    def describe(self, batch_prompts: int) -> dict[str, str]:
        """Return the rows of the launch table. How functions are called, and a sandbox, are known after `open`."""
        terms = " + ".join(f"{term.weight:g} x {name}" for name, term in sorted(self._terms.items()) if name)
        notes = sorted({note for note in self._notes.values() if note})
        functions = (term.function for term in self._terms.values() if isinstance(term, FunctionTerm))
        session = [function.label for function in functions if isinstance(function, SessionFunction)]
        in_thread = (
            f"{', '.join(session)}: in a thread of the run, given up after {self.timeout_s:g} s, without limits of "
            "memory and CPU time. In a file of its own, it has worker processes"
        )
        rows = {
            "reward": terms,
            "reward calls": "; ".join(self._calls.values()),
            "programs of responses": ", ".join(notes),
        }
        return rows | ({"functions of this session": in_thread} if session else {})

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Compute `rewards` [S] fp32, NaN for responses without reward.

        Also computes `rewards/<name>` [S] fp32 for each of `functions`, NaN for responses that were not scored. With
        `dense`, also computes `dense_rewards` [T].
        """
        cut = cut_responses(self.cut, data, model.tokenizer)
        if self.dense:
            return self._dense(model, data, cut)
        scored = self._score(model, data, cut)
        order_S = self._order(model, data)
        rewards_S = cut.rewards(self._total(scored))[order_S]
        named = {f"{NAMED}{name}": scored[name].float()[order_S] for name in self.functions}
        return data.with_sequences(rewards=rewards_S, **named).select(["rewards", *named])

    def _score(self, model: Model, data: SequenceSample, cut: Cut) -> dict[str, Tensor]:
        """Return the rewards [S] fp64 of each function by name, NaN where it gives none."""
        judged = cut.judged_S.nonzero()[:, 0].tolist()  # responses with the penalty are not scored
        owners = data.group_index().tolist()
        groups = [owners[i] for i in judged]
        rows = [data.metadata["row"][owner] for owner in groups]
        ids = [pair for i, pair in enumerate(token_ids(cut.data)) if i in {*judged}]
        rewards = {name: torch.full((len(owners),), math.nan, dtype=torch.float64) for name in self._terms}
        for name, values in self._term_rewards(model, ids, rows, groups).items():
            rewards[name][judged] = values
        return rewards

    def _term_rewards(
        self,
        model: Model,
        ids: Sequence[_TokenIds],
        rows: list[Any],
        groups: list[int],
        responses: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Return the rewards [N] fp64 of N responses by the name of the function, NaN where it gives none.

        Args:
            model: model whose tokenizer decodes.
            ids: token ids of each prompt and response.
            rows: row of the data for each response.
            groups: index of the prompt of each response.
            responses: texts of the responses; None decodes them.
        """
        decoded = {
            special: decode(model, ids, special) for special in {self._special_tokens(name) for name in self._terms}
        }
        end = getattr(model.tokenizer, "eos_token", None) or ""
        calls = {}
        for name, term in self._terms.items():
            special = self._special_tokens(name)
            prompts, texts_ = decoded[special]
            if responses is not None:
                texts_ = list(responses) if special else [_without_special(model, text) for text in responses]
            elif isinstance(term, FunctionTerm) and term.special_tokens:
                texts_ = [text.removesuffix(end) for text in texts_]
            calls[name] = partial(self._open_pool(name).score, prompts, texts_, rows, groups, ids)
        return {name: _tensor(result.values) for name, result in self._concurrently(calls).items()}

    def _special_tokens(self, name: str) -> bool:
        """Return whether the texts for a function contain special tokens."""
        return self._terms[name].sees_special_tokens or self._open_pool(name).binding.convention.special_tokens

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Check that the rows have the columns that the functions ask for; see `Verifier`."""
        for name in self._terms:
            if problem := self._open_pool(name).binding.describe_missing(rows):
                raise ConfigError(problem)

    def is_cheap(self) -> bool:
        """Return whether every function is plain Python code that scores one response as it is; see `Verifier`."""
        return not self.dense and self.cut is None and all(self._open_pool(name).cheap for name in self._terms)

    def why_not_attacked(self) -> str:
        """Return why scoring hundreds of texts is impossible or may cost money; see `Verifier`."""
        if self.dense:
            return "dense=true rewards tokens"
        if self.keep_environment:
            return f"keep_environment={self.keep_environment}: a function may ask a service that costs money"
        asking = [name or self._open_pool(name).name for name in self._terms if not self._open_pool(name).local]
        return f"{', '.join(asking)}: a judge, a server or an async function may cost money" if asking else ""

    def score_texts(self, model: Model, data: SequenceSample, responses: Sequence[Sequence[str]]) -> Tensor:
        """Compute the rewards [S] fp32 of texts as responses, without `cut` and `shuffle`; see `Verifier`."""
        groups = [i for i, texts_ in enumerate(responses) for _ in texts_]
        given = [text for texts_ in responses for text in texts_]
        prompts = [prompt.tolist() for prompt in data.sequences("prompt_ids")]
        encoded: list[list[int]] = [[]] * len(given)
        if given and any(self._open_pool(name).binding.token_ids for name in self._terms):
            encoded = model.tokenizer(given, add_special_tokens=False)["input_ids"]
        ids = [(prompts[i], answer) for i, answer in zip(groups, encoded, strict=True)]
        return self._total(self._term_rewards(model, ids, [data.metadata["row"][i] for i in groups], groups, given))

    def _concurrently(self, calls: Mapping[str, Callable[[], RewardResults[float]]]) -> dict[str, RewardResults[float]]:
        """Return the result of each call, by name. Functions in worker processes run concurrently."""
        if self.workers == 0 or len(calls) == 1:
            return {name: call() for name, call in calls.items()}
        with ThreadPoolExecutor(len(calls)) as threads:
            # A thread starts with an empty context, but the pool finds the `Tally` of the batch in the caller's.
            running = {n: threads.submit(contextvars.copy_context().run, call) for n, call in calls.items()}
            try:
                return {name: future.result() for name, future in running.items()}
            except BaseException:
                for pool in self._pools.values():  # ends the other calls
                    pool.close()
                raise

    def _total(self, found: Mapping[str, Tensor]) -> Tensor:
        """Return [S] fp32: the weighted sum, independent of the order of the functions."""
        columns = [(self._terms[name].weight * values_S).tolist() for name, values_S in found.items()]
        return torch.tensor([math.fsum(values) for values in zip(*columns, strict=True)])

    def _dense(self, model: Model, data: SequenceSample, cut: Cut) -> SequenceSample:
        judged = cut.judged_S.nonzero()[:, 0].tolist()
        owners = data.group_index().tolist()
        (prompts, responses), tokens = decode(model, token_ids(cut.data)), _token_texts(model, cut.data)
        lists = self._open_pool(_SINGLE).score_tokens(
            [prompts[i] for i in judged],
            [responses[i] for i in judged],
            [data.metadata["row"][owners[i]] for i in judged],
            [tokens[i] for i in judged],
        )
        by_response = dict(zip(judged, lists.values, strict=True))
        rewards_S = torch.tensor(
            [math.nan if i in by_response and by_response[i] is None else 0.0 for i in range(len(owners))]
        )
        flat = [x for i, own in enumerate(tokens) for x in by_response.get(i) or [0.0] * len(own)]
        dense_T = torch.zeros(len(cut.data["input_ids"])).masked_scatter(~cut.data["prompt_mask"], torch.tensor(flat))
        written = data.with_sequences(rewards=cut.rewards(rewards_S))
        return written.with_tokens(dense_rewards=cut.dense_rewards(dense_T, data)).select(["rewards", "dense_rewards"])

    def _order(self, model: Model, data: SequenceSample) -> Tensor:
        """Return [S] the response whose reward each response gets: its own, or with `shuffle` that of any response."""
        n = data.n_sequences
        if not self.shuffle:
            return torch.arange(n)
        seed = derive_seed(model.seed, "shuffle", *map(str, data.ids))
        return torch.from_numpy(np.random.default_rng(seed).permutation(n))

    def close(self) -> None:
        """Stop the worker processes."""
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()


_TokenIds = tuple[list[int], list[int]]
"""Token ids of a prompt and of a response."""


def token_ids(data: SequenceSample) -> list[_TokenIds]:
    """Return the token ids of the prompt and of the response of every sequence.

    The response is everything after the prompt: in a multi-turn episode, all turns and observations.

    Args:
        data: batch with `input_ids` and `prompt_mask`.
    """
    pairs = []
    for ids, given in zip(data.sequences("input_ids"), data.sequences("prompt_mask"), strict=True):
        # Only the leading run: in an episode, `prompt_mask` also marks observations.
        n = int(given.int().cumprod(0).sum())
        pairs.append((ids[:n].tolist(), ids[n:].tolist()))
    return pairs


def decode(model: Model, ids: Sequence[_TokenIds], special_tokens: bool = False) -> tuple[list[str], list[str]]:
    """Return the texts of prompts and of responses, with or without special tokens."""
    tokens = Tokens(model.tokenizer)
    prompts = [tokens.decode(prompt, (), special=special_tokens) for prompt, _ in ids]
    return prompts, [tokens.decode(response, prompt, special=special_tokens) for prompt, response in ids]


def _without_special(model: Model, text: str) -> str:
    """Return a text as it is decoded from its tokens without special tokens."""
    for token in getattr(model.tokenizer, "all_special_tokens", ()):
        text = text.replace(token, "")
    return text


def _tensor(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


def _token_texts(model: Model, data: SequenceSample) -> list[list[str]]:
    """Decode each response token of every sequence, including special tokens."""
    # Each id once, since a batch repeats few of them.
    known = data["input_ids"].unique().tolist()
    text = dict(zip(known, Tokens(model.tokenizer).texts(known), strict=True))
    pairs = zip(data.sequences("input_ids"), data.sequences("prompt_mask"), strict=True)
    return [[text[i] for i in ids[~given].tolist()] for ids, given in pairs]
