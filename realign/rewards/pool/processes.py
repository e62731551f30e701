"""Worker processes of a reward pool: send chunks of items, enforce deadlines, and find the item that broke a chunk."""

from __future__ import annotations

import logging
import math
import pickle
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import TypeAlias

from pebble import ProcessExpired, ProcessPool

from realign.errors import RewardError
from realign.rewards.pool.keeper import SpawnKept, SpawnWithoutMain
from realign.rewards.pool.limits import KEPT, RETIRED, WorkerLimits
from realign.rewards.pool.worker import (
    Answer,
    Concurrency,
    Expected,
    FailureKind,
    Problem,
    RewardCall,
    answer_some,
    answer_some_async,
    checked_answers,
    start_worker,
)

logger = logging.getLogger(__name__)

Answers: TypeAlias = Generator[tuple[int, Answer], None, None]

# A worker returns its answers after this time, so that a failed chunk loses little work and slow items spread evenly.
_SLICE_S = 0.1
_FIRST_CHUNK = 16
_LARGEST_CHUNK = 128
# A chunk for an `async def` function has this many times the items that a worker answers at a time.
_ROUNDS = 4
# Seconds that a worker may take to start and import the function before the pool counts as stuck.
_START_S = 120.0
# Seconds that an `async def` function has to end after its cancellation, before its worker is stopped.
_GRACE_S = 5.0
_RESTARTS = 3


class WorkerProcesses:
    """Processes that answer items, started at the first call of `answers`. Several threads may call `answers`.

    Args:
        name: name of the function, for messages.
        source: import string or pickle of the function.
        workers: number of processes.
        timeout_s: deadline of one item in seconds.
        limits: resource limits of each process.
        concurrency: how each process calls an `async def` function; None for other functions.
    """

    def __init__(
        self,
        name: str,
        source: str | bytes,
        *,
        workers: int,
        timeout_s: float,
        limits: WorkerLimits,
        concurrency: Concurrency | None = None,
    ) -> None:
        self.name = name
        self.source = source
        self.workers = workers
        self.timeout_s = timeout_s
        self.limits = limits
        self.concurrency = concurrency
        self._leak_logged = False
        self._lock = threading.Lock()  # guards the attributes below
        self._closed = 0
        self._heard = 0.0
        self._futures: set[Future[object]] = set()
        self._pool: ProcessPool | None = None
        self._stop: Callable[[], object] | None = None

    def close(self) -> None:
        """Stop the processes immediately, even during a call. Running calls of `answers` raise an error."""
        with self._lock:
            self._closed += 1
            self._stop_all()

    def _stop_all(self) -> None:
        if self._stop is not None:
            self._stop()
        self._pool = self._stop = None
        for future in list(self._futures):  # a stopped pool never resolves them, and callers wait for them
            with suppress(InvalidStateError):
                future.set_exception(BrokenProcessPool("the workers were stopped"))

    def answers(self, items: Sequence[RewardCall]) -> Answers:
        """Yield (index, answer) in order of completion, each index once. Closing the generator cancels pending items.

        If a chunk ends its worker, its items are sent again one by one, so that only the item at fault fails.

        Raises:
            RewardError: the workers keep dying, or were closed.
        """
        closed = self._closed
        pickled: list[bytes] = []
        sendable: list[int] = []
        for index, item in enumerate(items):
            try:
                pickled.append(pickle.dumps(item))
                sendable.append(index)
            except Exception as error:
                pickled.append(b"")
                yield index, Problem(FailureKind.exception, f"the row cannot be sent to a worker process: {error!r}")
        expected = [item.expected for item in items]
        todo = _Todo(sendable, self.workers, 0 if self.concurrency is None else self.concurrency.calls)
        running: dict[Future[object], list[int]] = {}
        restarts = retired = 0
        try:
            while todo or running:
                pool = self._started(closed)
                while todo and len(running) < 2 * self.workers:
                    members = todo.next()
                    running[self._submit(pool, [pickled[i] for i in members])] = members
                try:
                    done = self._wait(running)
                except BrokenProcessPool as error:
                    restarts += 1
                    todo.put_back(i for members in running.values() for i in members)
                    running.clear()
                    self._restart(pool, error, restarts)
                    continue
                # A set has no order. In the order sent, the first failure that a user reads about is the first one.
                for future in [sent for sent in running if sent in done]:
                    members = running.pop(future)
                    # a function can use the same exit code, and would then be called forever
                    if self._retired(future) and retired < self.workers + _RESTARTS:
                        retired += 1
                        todo.again(members)
                        continue
                    answers = self._answers_of(future, [expected[i] for i in members])
                    if answers is None:
                        todo.suspect(members)
                        continue
                    restarts = retired = 0
                    todo.answered(members, len(answers))
                    yield from zip(members, answers, strict=False)
        finally:
            for future in running:  # not empty after an error, Ctrl-C or an early close
                future.cancel()

    def _started(self, closed: int) -> ProcessPool:
        """Return the processes, started if necessary. `closed` is the number of `close` calls when the caller began."""
        with self._lock:
            if self._closed != closed:
                raise RewardError(f"the workers of reward function {self.name} were closed during a call.")
            if self._pool is None:
                with_main = isinstance(self.source, bytes) and b"__main__" in self.source
                self._pool = ProcessPool(
                    max_workers=self.workers,
                    initializer=start_worker,
                    initargs=(self.source, self.limits),
                    context=SpawnKept() if with_main else SpawnWithoutMain(),
                )
                self._stop = weakref.finalize(self, _stop_pool, self._pool)  # also runs when this process exits
            return self._pool

    def _submit(self, pool: ProcessPool, pickled: list[bytes]) -> Future[object]:
        deadline = self._deadline_s(len(pickled))
        work: Callable[..., object] = answer_some
        how: tuple[object, ...] = (self.source, pickled, _SLICE_S, self.limits.cpu_s)
        if self.concurrency is not None:
            work, how = answer_some_async, (self.source, pickled, self.concurrency, self.limits.cpu_s)
        try:
            with self._lock:  # add no future while the workers are being stopped
                future: Future[object] = pool.schedule(work, how, timeout=deadline)
                self._futures.add(future)
        except RuntimeError as error:  # the pool broke; `_wait` raises the error
            broken: Future[object] = Future()
            broken.set_exception(BrokenProcessPool(str(error)))
            return broken
        future.add_done_callback(self._futures.discard)
        return future

    def _deadline_s(self, items: int) -> float:
        """Return the seconds after which the worker of a chunk is stopped."""
        if self.concurrency is None:
            return self.timeout_s + (0.0 if items == 1 else _SLICE_S)
        return _GRACE_S + self.timeout_s * (1 if items == 1 else 2)  # the last call may start after `timeout_s`

    def _wait(self, running: Iterable[Future[object]]) -> set[Future[object]]:
        patience, began = self._deadline_s(2) + _START_S, time.monotonic()
        done: set[Future[object]] = set()
        while not done:
            # items of other callers may be first in the queue, so their answers count as progress too
            left = max(began, self._heard) + patience - time.monotonic()
            if left <= 0:
                raise BrokenProcessPool(f"no answer within {patience:.0f} s")
            done = wait(running, timeout=left, return_when=FIRST_COMPLETED).done
        self._heard = time.monotonic()
        for future in done:
            if isinstance(error := future.exception(), BrokenProcessPool):
                raise error
        return done

    def _retired(self, future: Future[object]) -> bool:
        """Return whether the worker exited before starting its items, because of a memory leak. Logs the first one."""
        error = future.exception()
        if not isinstance(error, ProcessExpired) or error.exitcode != RETIRED:
            return False
        if not self._leak_logged:
            self._leak_logged = True
            logger.warning(
                "a worker of reward function %s kept more than %.0f%% of memory_mb=%s between two calls and was "
                "replaced. The function probably leaks memory. No reward is lost; later replacements are not logged.",
                self.name,
                100 * KEPT,
                self.limits.memory_mb,
            )
        return True

    def _answers_of(self, future: Future[object], expected: Sequence[Expected]) -> list[Answer] | None:
        """Return the answers of a chunk; None if it failed and the item at fault is unknown.

        Args:
            future: a finished chunk.
            expected: expected answer to each item of the chunk.
        """
        error = future.exception()
        single = len(expected) == 1
        if error is None:
            answers = checked_answers(future.result(), expected)
            if answers is None and single:
                return [Problem(FailureKind.nonsense, "the worker returned no list of answers")]
            return answers
        if not single:
            return None
        if isinstance(error, TimeoutError):
            return [Problem(FailureKind.timeout, f"no answer within timeout_s={self.timeout_s} s; worker stopped")]
        if isinstance(error, ProcessExpired):
            return [Problem(FailureKind.crash, f"the worker process died: {_exit_reason(error.exitcode)}")]
        kind = FailureKind.memory if isinstance(error, MemoryError) else FailureKind.exception
        return [Problem(kind, f"{type(error).__name__}: {error}")]

    def _restart(self, pool: ProcessPool, error: BrokenProcessPool, restarts: int) -> None:
        with self._lock:
            first = self._pool is pool  # else another caller restarted them, or they were closed
            if first:
                self._stop_all()
        if restarts > _RESTARTS:
            raise RewardError(
                f"the workers of reward function {self.name} died {restarts} times in a row without an answer "
                f"({error}). See the messages of the worker processes above. If the main script defines the function, "
                "put the rest of the script under `if __name__ == '__main__':`, or define the function in another file."
            ) from error
        if first:
            logger.warning(
                "the workers of reward function %s stopped (%s). They restart, and scoring continues.", self.name, error
            )


class _Todo:
    """Queue of the items to send, with the size of the next chunk."""

    def __init__(self, indices: Iterable[int], workers: int, calls: int = 0) -> None:
        """Create the queue; `calls` is how many items of a chunk a worker answers at a time, 0 for one by one."""
        self.queue = deque(indices)
        self.alone: deque[int] = deque()
        self.workers = workers
        self.chunk = max(_FIRST_CHUNK, _ROUNDS * calls)
        self.largest = max(_LARGEST_CHUNK, _ROUNDS * calls)

    def __bool__(self) -> bool:
        return bool(self.queue or self.alone)

    def next(self) -> list[int]:
        if self.alone:
            return [self.alone.popleft()]
        fair_share = math.ceil(len(self.queue) / self.workers)
        return [self.queue.popleft() for _ in range(min(self.chunk, fair_share))]

    def put_back(self, members: Iterable[int]) -> None:
        self.queue.extendleft(reversed(list(members)))

    def again(self, members: Sequence[int]) -> None:
        """Put back items that no worker started. A single item stays alone, since it may be under suspicion."""
        if len(members) == 1:
            self.alone.extend(members)
        else:
            self.put_back(members)

    def suspect(self, members: Iterable[int]) -> None:
        self.alone.extend(members)

    def answered(self, members: Sequence[int], n: int) -> None:
        """Put back the items after the first `n`, which have answers, and adapt the chunk size."""
        self.put_back(members[n:])
        if n < len(members):
            self.chunk = n
        elif len(members) > 1:
            self.chunk = min(2 * self.chunk, self.largest)


def _stop_pool(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


_CAUSES = {
    "SIGKILL": ", probably because the system ran out of memory",
    "SIGXCPU": ": the call used more CPU time than cpu_s",
}


def _exit_reason(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"signal {-code} ({name}){_CAUSES.get(name, '')}"
