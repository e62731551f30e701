"""`RewardPool`: runs a user's reward function on many items, each of which can only fail alone.

A function may raise, hang, crash its process or eat all memory. Workers are spawned processes with a deadline and a
memory limit (`pebble`), so every other item is answered, and the failed ones say why.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Generic, TypeVar

from realign.rewards.pool.failure_count import present_tally
from realign.rewards.pool.functions import (
    ARGUMENTS,
    DENSE_ARGUMENTS,
    DenseRewardFunction,
    RewardFunction,
    check_function,
    load_function,
)
from realign.rewards.pool.http import HttpReward
from realign.rewards.pool.limits import Limits, limits_memory, secret_variables
from realign.rewards.pool.processes import Answers, RewardError, WorkerProcesses
from realign.rewards.pool.timeouts import patient
from realign.rewards.pool.worker import FailureKind, Item, Problem, answer
from realign.settings import Fraction, NonNegative, NonNegativeInt, Positive, checked

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

# A server has answered, or is known to be silent, before the deadline of an item stops its worker.
_ASKED = 0.9


@dataclass(frozen=True)
class Failure:
    """An item without reward: its index in the call of `score`, why, and a traceback or explanation."""

    index: int
    kind: FailureKind
    message: str


@dataclass(frozen=True)
class RewardResults(Generic[Value]):
    """Rewards in the order of the items: None where the function abstained (returned None) or failed."""

    values: list[Value | None]
    failures: list[Failure]

    @property
    def abstained(self) -> int:
        """Items for which the function itself gave None."""
        return self.values.count(None) - len(self.failures)


class RewardPool:
    """Worker processes for one reward function `(prompt, response, row) -> float | None`.

    With `dense` it is called as `(prompt, response, row, tokens)` and gives a list with one number per token, or None.

    The workers start at the first `score` and stay until `close` (or the end of a `with` block, or of this process).
    They import the function anew, but not this process's main script (unless the function is defined in it), so a
    script needs no `if __name__ == "__main__"` guard. Processes that the function started end with their worker when
    it is stopped. Several threads may use it at once; with `workers=0` they take turns.

    With `workers=0` the function runs in this process: breakpoints work and a cheap function loses no time, but
    nothing protects the run from a hang, a crash or a memory blow-up; exceptions are still caught one by one.

    Args:
        function: `package.module:function`, `path/to/file.py:function`, a URL, or a callable that can be pickled.
        workers: number of processes; 0 runs inline.
        timeout_s: seconds that one item may take before its worker is stopped. Kept to within about 0.2 s.
        memory_mb: MiB of address space that a worker may take beyond what it holds once the function is imported;
            None sets no limit. Linux only; elsewhere a warning says that it has no effect.
        max_failed_fraction: `score` raises once more than this fraction of its items has failed; of a call that is one
            of several parts of a batch (`Tally`), this fraction of a batch of such calls.
        patience_s: seconds without any answer after which the rest of the items is given up, and has failed. Until then
            items that a server (a function that is a URL) did not answer are asked for again.
        dense: the function rewards every token; then `score_tokens` takes the place of `score`.
        cpu_s: CPU seconds, of all threads together, that one call may use before its worker is ended; None sets no
            limit.
        open_files: file descriptors that a worker may hold; None leaves the system's limit.
        keep_environment: variables that the workers inherit although they look like secrets (`secret_variables`).

    Raises:
        ValueError: the function is not found or cannot be used, or a setting is out of range.
    """

    def __init__(
        self,
        function: str | RewardFunction | DenseRewardFunction,
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
    ) -> None:
        checked("workers", workers, NonNegativeInt)
        checked("timeout_s", timeout_s, Positive)
        checked("patience_s", patience_s, NonNegative)
        checked("max_failed_fraction", max_failed_fraction, Fraction)
        self.limits = Limits(memory_mb, cpu_s, open_files, keep_environment)
        if workers and multiprocessing.current_process().name == "pebble_pool_worker":
            raise RuntimeError(
                "a reward worker tried to start a pool of its own: the file of the reward function starts one when it "
                "is imported. Put that part under `if __name__ == '__main__':`"
            )
        arguments = DENSE_ARGUMENTS if dense else ARGUMENTS
        source: str | bytes = b""
        if isinstance(function, str):
            self.name = source = function
            self._function = load_function(function, arguments)
            if isinstance(self._function, HttpReward):
                self._function.reach()
                self._function = replace(self._function, within_s=_ASKED * timeout_s)
                source = pickle.dumps(self._function)
        else:
            self.name = getattr(function, "__qualname__", type(function).__qualname__)
            self._function = function
            check_function(function, self.name, arguments)
            if workers:
                source = _pickled_function(function, self.name)
        self.max_failed_fraction = max_failed_fraction
        self.patience_s = patience_s
        self._shown: set[FailureKind] = set()
        self._alone = threading.Lock()
        self._processes: WorkerProcesses | None = None
        if workers:
            self._processes = WorkerProcesses(
                self.name, source, workers=workers, timeout_s=timeout_s, limits=self.limits
            )
            if memory_mb is not None and not limits_memory():
                logger.warning("memory_mb=%d has no effect on reward workers on %s", memory_mb, sys.platform)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers at once, whatever they are doing. A later `score` starts new ones."""
        if self._processes is not None:
            self._processes.close()

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResults[float]:
        """Rewards of all items; each is `prompts[i], responses[i], rows[i]`.

        A number is a bool, an int, a float, or a scalar of numpy or torch, finite in float32. Items that shared a
        chunk with one that ended the worker are called again.

        Raises:
            ValueError: the three have different lengths.
            RewardError: more than `max_failed_fraction` of the items failed, or workers do not stay alive.
        """
        if not len(prompts) == len(responses) == len(rows):
            raise ValueError(f"found {len(prompts)} prompts, {len(responses)} responses and {len(rows)} rows")
        return self._score([(p, r, dict(row)) for p, r, row in zip(prompts, responses, rows, strict=True)])

    def score_tokens(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        tokens: Sequence[list[str]],
    ) -> RewardResults[list[float]]:
        """As `score`, of a pool with `dense`: of each item as many rewards as it has `tokens`.

        Raises:
            ValueError: the four have different lengths.
            RewardError: as `score`; a list of another length is a failure of its item.
        """
        counts = {len(x) for x in (prompts, responses, rows, tokens)}
        if len(counts) > 1:
            raise ValueError(f"prompts, responses, rows and tokens are of different lengths: {sorted(counts)}")
        items = zip(prompts, responses, rows, tokens, strict=True)
        return self._score([(p, r, dict(row), t) for p, r, row, t in items])

    def _score(self, items: Sequence[Item]) -> RewardResults[Any]:
        values: list[Any] = [None] * len(items)
        failures: list[Failure] = []
        tally = present_tally()
        whole = tally.parts * len(items)
        least = 2 * self._processes.workers if self._processes else 1
        asked = patient(self._answers, items, name=self.name, patience_s=self.patience_s, least=least)
        with closing(asked) as answers:
            for answered, (index, found) in enumerate(answers, 1):
                if not isinstance(found, Problem):
                    values[index] = found
                    continue
                failures.append(Failure(index, found.kind, found.message + self._withheld(found.message)))
                self._show(failures[-1])
                before = tally.failures  # asked now: other parts of the batch may have ended meanwhile
                if before + len(failures) > self.max_failed_fraction * whole:
                    raise RewardError(self._too_many(failures, answered, len(items), before, whole))
        tally.add(len(failures))
        return RewardResults(values, sorted(failures, key=lambda failure: failure.index))

    def _answers(self, items: Sequence[Item]) -> Answers:
        return self._processes.answers(items) if self._processes else self._inline(items)

    def _withheld(self, message: str) -> str:
        """What to add where a failure may come from a variable that the workers do not inherit."""
        if self._processes is None:
            return ""
        names = [n for n in secret_variables(os.environ, self.limits.keep_environment) if n in message]
        hint = f"\n(reward workers do not inherit {', '.join(names)}; keep_environment names what they may)"
        return hint if names else ""

    def _show(self, failure: Failure) -> None:
        if failure.kind not in self._shown:
            self._shown.add(failure.kind)
            logger.warning(
                "reward function %s failed on item %d (%s; shown once, later ones are only counted):\n%s",
                self.name,
                failure.index,
                failure.kind.value,
                failure.message,
            )

    def _too_many(self, failures: Sequence[Failure], answered: int, n: int, before: int, whole: int) -> str:
        kinds = ", ".join(f"{kind.value} {count}" for kind, count in Counter(f.kind for f in failures).most_common())
        first = failures[0]
        others = f", and on {before} of the other {whole - n} items of a batch" if whole > n else ""
        return (
            f"reward function {self.name} failed on {len(failures)} of the {answered} items answered so far, {n} in "
            f"all ({kinds}){others}: above max_failed_fraction={self.max_failed_fraction}. The first failure was item "
            f"{first.index} ({first.kind.value}):\n{first.message}"
        )

    def _inline(self, items: Sequence[Item]) -> Answers:
        for index, item in enumerate(items):
            with self._alone:
                found = answer(self._function, item)
            yield index, found


def _pickled_function(function: Callable[..., Any], name: str) -> bytes:
    try:
        pickled = pickle.dumps(function)
    except Exception as error:
        raise ValueError(
            f"reward function {name!r} cannot be sent to a worker process ({error}): define it at the top of a file"
        ) from error
    if b"__main__" in pickled and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(f"reward function {name!r} is defined in an interactive session: put it into a file")
    return pickled
