"""`RewardPool`: runs a user's reward function on many items, and isolates their failures.

A function may raise, hang, crash its process or exhaust memory. Workers are spawned processes with a deadline and a
memory limit. A failed item has a message with the reason and does not affect other items.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Any, Generic, TypeVar

from realign.errors import ConfigError, RewardError, TransientError
from realign.rewards.pool.binding import RewardScope, Scored
from realign.rewards.pool.functions import (
    Prepared,
    RewardFunction,
    SessionFunction,
    check_function,
    is_async,
    load_function,
    name_of,
)
from realign.rewards.pool.http import HttpReward
from realign.rewards.pool.limits import WorkerLimits, limits_memory
from realign.rewards.pool.processes import Answers, WorkerProcesses
from realign.rewards.pool.worker import (
    Answer,
    Concurrency,
    Expected,
    FailureKind,
    Problem,
    RewardCall,
    answer,
    answer_concurrently,
)
from realign.rewards.pool.worker_process import WORKER_NAME
from realign.secrets import redact, secret_variables
from realign.text import headline, log_file

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

# Fraction of `timeout_s` for a server's answer: a request ends before the item's deadline stops the worker.
_ASKED = 0.9


@dataclass(frozen=True)
class Failure:
    """A response without reward: its index in the call of `score`, the kind of failure, and a traceback or explanation.

    If a call for several responses fails, each of them has a failure.
    """

    index: int
    kind: FailureKind
    message: str


@dataclass(frozen=True)
class RewardResults(Generic[Value]):
    """Rewards in the order of the items. None: the function abstained (returned None) or failed."""

    values: list[Value | None]
    failures: list[Failure]


class RewardPool:
    """Worker processes for one reward function, such as `(prompt, response, row) -> float | None`.

    The names of its arguments say what it gets, and how many responses it scores in one call; see `CONVENTIONS`. With
    `dense` it also has the argument `tokens`, and returns a list with one number per token, or None.
    An `async def` function is called several times concurrently in each worker.

    The workers start at the first `score` and run until `close`, the end of a `with` block, or the end of this process.
    They import the function again, but not this process's main script, unless it defines the function. A script
    therefore needs no `if __name__ == "__main__"` guard. When a worker is stopped, the processes that the function
    started end too. Several threads may use the pool concurrently.

    With `workers=0` the function runs in this process, for one thread at a time. Breakpoints work and there is no IPC
    overhead. Exceptions still fail single items, but a hang, a crash or high memory use affects the run.

    A `SessionFunction` runs in a thread of this process, whatever `workers` is. After `timeout_s`, its item fails, but
    nothing can stop the thread.

    Args:
        function: `package.module:function`, `path/to/file.py:function`, a URL, a `SessionFunction`, or a callable that
            can be pickled.
        workers: number of processes; 0 runs the function in this process.
        timeout_s: time limit of one call in seconds, after which its worker is stopped. Accurate to about 0.2 s. The
            call of an `async def` function is canceled, and its worker is stopped 5 s later if it still runs.
        memory_mb: address space in MiB that a worker may use, in addition to its usage after importing the function;
            None sets no limit. Linux only; ignored with a warning on other platforms.
        max_failed_fraction: `score` raises once more than this fraction of its items has failed. If a batch is scored
            in several calls (`Tally`), the fraction is taken of the whole batch.
        patience_s: seconds without any answer after which the remaining items fail. Until then the pool retries items
            that a server (a function given as a URL) did not answer.
        dense: whether the function rewards every token; use `score_tokens` instead of `score` then.
        cpu_s: CPU seconds that one call may use, over all its threads, before its worker is stopped; None sets no
            limit.
        open_files: number of file descriptors of a worker; None keeps the system's limit.
        keep_environment: variables that the workers inherit although they look like secrets (`secret_variables`).
        concurrency: concurrent calls of an `async def` function, over all workers; ignored for other functions.

    Raises:
        ConfigError: the function does not exist or is unusable, or a worker limit is out of range (`SettingsError`).
        TransientError: the server of a URL accepts no connections.
    """

    def __init__(
        self,
        function: str | RewardFunction,
        *,
        workers: int,
        timeout_s: float,
        memory_mb: int | None,
        max_failed_fraction: float,
        patience_s: float = 120.0,
        dense: bool = False,
        cpu_s: float | None = None,
        open_files: int | None = None,
        keep_environment: Sequence[str] = (),
        concurrency: int = 32,
    ) -> None:
        self.limits = WorkerLimits(memory_mb, cpu_s, open_files, keep_environment)
        if workers and multiprocessing.current_process().name == WORKER_NAME:
            raise ConfigError(
                "the file of the reward function starts a reward pool when a worker imports it. Put that part under "
                "`if __name__ == '__main__':`."
            )
        self._thread_s: float | None = None
        if isinstance(function, SessionFunction):
            function, workers, self._thread_s = function.function, 0, timeout_s
        source: str | bytes = b""
        self._function: RewardFunction = load_function(function, check=False) if isinstance(function, str) else function
        if isinstance(self._function, HttpReward):
            self.name = redact(self._function.url)
        else:
            self.name = str(function) if isinstance(function, str) else name_of(function)
        self.binding = check_function(self._function, self.name, dense=dense)
        """What the function gets, and how many responses it scores in one call."""
        if isinstance(self._function, HttpReward):
            self._function.reach()
            self._function = replace(self._function, within_s=_ASKED * timeout_s)
            source = pickle.dumps(self._function)
        elif isinstance(function, str):
            source = function
            if isinstance(self._function, Prepared):
                self._function = self._function.prepare()
                source = pickle.dumps(self._function)
        else:
            if isinstance(function, Prepared):
                self._function = function.prepare()
            if workers:
                source = _pickle_function(self._function, self.name)
        self.max_failed_fraction = max_failed_fraction
        self.patience_s = patience_s
        self._shown: set[FailureKind] = set()
        self._alone = threading.Lock()
        self._runner: asyncio.Runner | None = None  # event loop of an `async def` function in this process
        self._concurrency = (
            Concurrency(-(-concurrency // max(1, workers)), timeout_s) if is_async(self._function) else None
        )
        self._processes: WorkerProcesses | None = None
        if workers:
            self._processes = WorkerProcesses(
                self.name,
                source,
                workers=workers,
                timeout_s=timeout_s,
                limits=self.limits,
                concurrency=self._concurrency,
            )
            if memory_mb is not None and not limits_memory():
                logger.warning(
                    "memory_mb=%d is ignored: reward workers have no memory limit on %s.", memory_mb, sys.platform
                )

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers immediately, even during a call. A later `score` starts new workers."""
        if self._processes is not None:
            self._processes.close()
        if self._alone.acquire(blocking=False):  # else a call in this process still uses the event loop
            try:
                if self._runner is not None:
                    close = self._runner.close
                    in_thread(close) if self._thread_s is not None else close()
                    self._runner = None
            finally:
                self._alone.release()

    @property
    def note(self) -> str:
        """What the function says at launch about this machine; empty for nothing."""
        return self._function.note if isinstance(self._function, Prepared) else ""

    @property
    def cheap(self) -> bool:
        """Whether the function is plain Python code that scores one response; no server, judge or sandbox."""
        plain = self.local and not isinstance(self._function, Prepared)
        return plain and self.binding.scope is RewardScope.response

    @property
    def local(self) -> bool:
        """Whether the function asks no server and no judge, as an `async def` probably does."""
        return not isinstance(self._function, HttpReward) and self._concurrency is None

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        groups: Sequence[int] | None = None,
        ids: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
    ) -> RewardResults[float]:
        """Score all responses; response i is `responses[i]`, to `prompts[i]` of `rows[i]`.

        A reward is a bool, an int, a float, or a scalar of numpy or torch, finite in float32. If a call ends its
        worker, the other calls of its chunk are made again.

        Args:
            prompts: prompt of each response.
            responses: the responses.
            rows: row of the data of each response.
            groups: number of the prompt of each response; responses to one prompt are consecutive. None: each response
                has its own prompt. Only functions of scope `group` use it.
            ids: token ids of the prompt and of the response; needed if `binding.token_ids`.

        Raises:
            ValueError: the sequences have different lengths.
            RewardError: more than `max_failed_fraction` of the responses failed, or the workers keep dying.
            TransientError: more than `max_failed_fraction` of the responses failed, all because a server was
                unreachable.
        """
        if not len(prompts) == len(responses) == len(rows):
            raise ValueError(
                f"{len(prompts)} prompts, {len(responses)} responses and {len(rows)} rows: the numbers must be equal."
            )
        if groups is not None and len(groups) != len(responses):
            raise ValueError(f"{len(responses)} responses and {len(groups)} groups: the numbers must be equal.")
        unknown: tuple[Sequence[int], Sequence[int]] = ((), ())
        given = zip(prompts, responses, rows, ids or [unknown] * len(rows), strict=True)
        scored = [Scored(prompt, response, deepcopy(dict(row)), *own) for prompt, response, row, own in given]
        members = _members_of(self.binding.scope, len(responses), groups)
        return self._score([self._call([scored[i] for i in places]) for places in members], members)

    def _call(self, scored: Sequence[Scored]) -> RewardCall:
        """Return the call that scores these responses."""
        expected = Expected(key=self.binding.convention.result)
        if self.binding.returns_list:
            expected = Expected(len(scored), "response", gaps=True, key=expected.key)
        return RewardCall(
            *self.binding.arguments(scored), expected, self.binding.describe_missing([of.row for of in scored])
        )

    def score_tokens(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        tokens: Sequence[list[str]],
    ) -> RewardResults[list[float]]:
        """Score the tokens of all items, for a pool with `dense`: one reward per element of `tokens[i]`.

        An item whose list of rewards has another length fails.

        Raises:
            ValueError: the four sequences have different lengths.
            RewardError: see `score`.
        """
        counts = {len(x) for x in (prompts, responses, rows, tokens)}
        if len(counts) > 1:
            raise ValueError(f"prompts, responses, rows and tokens have different lengths: {sorted(counts)}.")
        items = [
            RewardCall(*self.binding.arguments([Scored(p, r, deepcopy(dict(row)))], tokens=t), Expected(len(t)))
            for p, r, row, t in zip(prompts, responses, rows, tokens, strict=True)
        ]
        return self._score(items, [[i] for i in range(len(items))])

    def _score(self, items: Sequence[RewardCall], members: Sequence[Sequence[int]]) -> RewardResults[Any]:
        """Score the items; `members` are the indices of the responses of each item."""
        n = sum(map(len, members))
        values: list[Any] = [None] * n
        failures: list[Failure] = []
        tally = present_tally()
        batch, answered = tally.parts * n, 0
        least = 2 * self._processes.workers if self._processes else 1
        # Closing it after an error cancels the calls that still run.
        asked = _patient(self._answers, items, name=self.name, patience_s=self.patience_s, least=least)
        with closing(asked) as answers:
            for index, result in answers:
                places = members[index]
                answered += len(places)
                if not isinstance(result, Problem):
                    of_responses = result if self.binding.returns_list and isinstance(result, list) else None
                    for number, place in enumerate(places):
                        values[place] = result if of_responses is None else of_responses[number]
                    continue
                message = result.message + self._withheld(result.message)
                failures += [Failure(place, result.kind, message) for place in places]
                self._show(failures[-1])
                before = tally.failures(self)  # read now, since other parts of the batch may have finished
                if before + len(failures) > self.max_failed_fraction * batch:
                    raise self._too_many(failures, answered, n, before, batch)
        tally.add(len(failures), self)
        return RewardResults(values, sorted(failures, key=lambda failure: failure.index))

    def _answers(self, items: Sequence[RewardCall]) -> Answers:
        return self._processes.answers(items) if self._processes else self._inline(items)

    def _withheld(self, message: str) -> str:
        """Return a hint if a failure message names a variable that the workers do not inherit, else an empty text."""
        if self._processes is None:
            return ""
        names = [n for n in secret_variables(os.environ, self.limits.keep_environment) if n in message]
        hint = (
            f"\nReward workers do not inherit {', '.join(names)}. To pass it, set keep_environment=[{','.join(names)}]."
        )
        return hint if names else ""

    def _show(self, failure: Failure) -> None:
        if failure.kind not in self._shown:
            self._shown.add(failure.kind)
            logger.warning(
                "reward function %s failed on item %d (%s), which gets no reward. Later failures of this kind are only "
                "counted.\n%s",
                self.name,
                failure.index,
                failure.kind.value,
                failure.message,
            )

    def _too_many(
        self, failures: Sequence[Failure], answered: int, n: int, before: int, batch: int
    ) -> RewardError | TransientError:
        """Return the error that stops the run. The log contains the first failure of each kind in full."""
        kinds = ", ".join(f"{kind.value} {count}" for kind, count in Counter(f.kind for f in failures).most_common())
        first = failures[0]
        others = f", and on {before} of the other {batch - n} items of the batch" if batch > n else ""
        unreachable = all(failure.kind is FailureKind.unreachable for failure in failures)
        return (TransientError if unreachable else RewardError)(
            f"reward function {self.name} failed on {len(failures)} of {answered} scored items ({kinds}; {n} items in "
            f"total){others}, which exceeds max_failed_fraction={self.max_failed_fraction}. First failure, on item "
            f"{first.index}: {headline(first.message)} (details: see {log_file(logger)})."
        )

    def _inline(self, items: Sequence[RewardCall]) -> Answers:
        if self._concurrency is not None:
            start = 0
            while start < len(items):
                with self._alone:
                    self._runner = self._runner or asyncio.Runner()
                    asked = answer_concurrently(self._function, items[start:], self._concurrency)
                    call = partial(self._runner.run, asked)
                    # in a thread, since the main thread of a notebook has an event loop, which runs already
                    results = call() if self._thread_s is None else in_thread(call)[0]
                yield from enumerate(results, start)
                start += len(results)
            return
        for index, item in enumerate(items):
            with self._alone:
                result = self._answer(item)
            yield index, result

    def _answer(self, item: RewardCall) -> Answer:
        if self._thread_s is None:
            return answer(self._function, item)
        for result in in_thread(lambda: answer(self._function, item), self._thread_s):
            return result
        return Problem(FailureKind.timeout, f"no answer within timeout_s={self._thread_s:g} s; its thread goes on")


def in_thread(call: Callable[[], Value], seconds: float | None = None) -> list[Value]:
    """Return the result of a call in another thread; nothing if it takes longer, while the thread goes on.

    What the call raises is raised here.
    """
    answered: Future[Value] = Future()

    def run_call() -> None:
        try:
            answered.set_result(call())
        except BaseException as error:
            answered.set_exception(error)

    # a daemon, which does not keep the process alive: nothing can end a function that hangs
    thread = threading.Thread(target=run_call, name="reward", daemon=True)
    thread.start()
    thread.join(seconds)
    return [answered.result()] if answered.done() else []


def _pickle_function(function: Callable[..., Any], name: str) -> bytes:
    try:
        pickled = pickle.dumps(function)
    except Exception as error:
        raise ConfigError(
            f"reward function {name!r} cannot be sent to a worker process ({error}). Define it at the top of a file."
        ) from error
    if b"__main__" in pickled and not hasattr(sys.modules["__main__"], "__file__"):
        raise ConfigError(f"reward function {name!r} is defined in an interactive session. Define it in a file.")
    return pickled


def _members_of(scope: RewardScope, n: int, groups: Sequence[int] | None) -> list[list[int]]:
    """Return the indices of the responses that each call scores.

    Args:
        scope: scope of the function.
        n: number of responses.
        groups: number of the prompt of each response; None: each response has its own prompt.
    """
    if scope is RewardScope.batch:
        return [list(range(n))] if n else []
    if scope is RewardScope.group and groups is not None:
        return [list(places) for _, places in groupby(range(n), key=groups.__getitem__)]
    return [[i] for i in range(n)]


class Tally:
    """Counts the failures of the latest calls that together score one batch. Threads may share a tally.

    The run stops when more than a fraction of a batch fails. If a batch is scored prompt by prompt, one bad row can
    fail a whole call, which must not count as a whole batch.
    """

    def __init__(self, parts: int) -> None:
        """Create a tally for batches that are scored in `parts` calls."""
        self.parts = parts
        self._past: dict[Hashable, deque[int]] = {}

    def add(self, failures: int, of: Hashable = None) -> None:
        """Add the number of failures of a finished call of `of`, such as one of several reward functions."""
        self._past.setdefault(of, deque(maxlen=max(0, self.parts - 1))).append(failures)

    def failures(self, of: Hashable = None) -> int:
        """Return the failures of the last `parts - 1` calls of `of`; the current call completes the batch."""
        return sum(list(self._past.get(of, ())))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the pool calls of this thread as parts of a batch, inside this context."""
        token = _PRESENT.set(self)
        try:
            yield
        finally:
            _PRESENT.reset(token)


_PRESENT: ContextVar[Tally | None] = ContextVar("tally", default=None)


def present_tally() -> Tally:
    """Return the tally of the current context. Outside any context every call counts as a whole batch."""
    return _PRESENT.get() or Tally(1)


_SILENT = (FailureKind.timeout, FailureKind.unreachable)


def _patient(
    ask: Callable[[Sequence[RewardCall]], Answers],
    items: Sequence[RewardCall],
    *,
    name: str,
    patience_s: float,
    least: int,
) -> Answers:
    """Yield the answers of `ask`, one per item; retry unreachable servers until `patience_s` is over.

    Items that a server did not answer are sent again, since the server may recover. Items that timed out fail, since
    the function may hang on them. After `patience_s` seconds without an answer, all remaining items fail.

    Args:
        ask: answers items; its generator may be closed early.
        items: the items to answer.
        name: name of the function, for messages.
        patience_s: seconds without an answer after which the remaining items fail. An exception counts as an answer.
        least: number of consecutive silent items required before giving up.
    """
    waiting = list(range(len(items)))
    last_answer_s, silent, logged = time.monotonic(), 0, False
    while waiting:
        again: list[int] = []
        last = Problem(FailureKind.unreachable, "")
        with closing(ask([items[i] for i in waiting])) as answers:
            for place, result in answers:
                # -1: answered. What remains after a break is asked again or fails below.
                index, waiting[place] = waiting[place], -1
                if not isinstance(result, Problem) or result.kind not in _SILENT:
                    last_answer_s, silent = time.monotonic(), 0
                    yield index, result
                    continue
                if not logged and result.kind is FailureKind.unreachable:
                    logged = True
                    logger.warning(
                        "%s. Unanswered items are retried for up to patience_s=%g s.", result.message, patience_s
                    )
                silent, last = silent + 1, result
                if result.kind is FailureKind.timeout:
                    yield index, result
                else:
                    again.append(index)
                if silent >= least and time.monotonic() - last_answer_s > patience_s:
                    break
        waiting = [*again, *(i for i in waiting if i >= 0)]
        if waiting and silent >= least and time.monotonic() - last_answer_s > patience_s:
            why = f"no answer for patience_s={patience_s:g} s"
            logger.warning("reward function %s: %s; %d of %d items get no reward.", name, why, len(waiting), len(items))
            yield from ((i, Problem(last.kind, f"{last.message}; {why}")) for i in waiting)
            return
