"""Worker processes of a reward pool: send chunks of items, enforce deadlines, and find the item that broke a chunk."""

from __future__ import annotations

import atexit
import logging
import math
import multiprocessing
import pickle
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeAlias

from realign.errors import RewardError
from realign.rewards.pool.limits import KEPT, WorkerLimits
from realign.rewards.pool.worker import (
    SLICE_S,
    Answer,
    Concurrency,
    Expected,
    FailureKind,
    Problem,
    RewardCall,
    check_answers,
    serve,
)
from realign.rewards.pool.worker_process import kill_session, start_worker

logger = logging.getLogger(__name__)

Answers: TypeAlias = Generator[tuple[int, Answer], None, None]

_FIRST_CHUNK = 16
_LARGEST_CHUNK = 128
# A chunk for an `async def` function has this many times the items that a worker answers at a time.
_ROUNDS = 4
_START_S = 120.0  # time that a worker may take to start and import the function
_END_S = 3.0  # time that a killed process may take to end
_PAUSE_S = 0.005
_POLL_S = 1.0
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
        self._crew: _Crew | None = None
        self._stop: Callable[[], object] | None = None

    def close(self) -> None:
        """Stop the processes immediately, even during a call. Running calls of `answers` raise an error."""
        with self._lock:
            if self._stop is not None:
                self._stop()
            self._crew = self._stop = None

    def answers(self, items: Sequence[RewardCall]) -> Answers:
        """Yield (index, answer) in order of completion, each index once. Closing the generator cancels pending items.

        If a chunk ends its worker, its items are sent again one by one, so that only the item at fault fails.

        Raises:
            RewardError: the workers keep dying, or were closed.
        """
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
        running: dict[_Reply, list[int]] = {}
        failed_starts = 0
        crew = self._start()
        try:
            while todo or running:
                # For each worker the chunk that it answers and one more, so that it is not idle between the two.
                while todo and len(running) < 2 * self.workers:
                    members = todo.next()
                    running[crew.send([pickled[i] for i in members], self._deadline_s(len(members)))] = members
                done = wait(running, return_when=FIRST_COMPLETED).done
                if crew.closed:
                    raise RewardError(f"the workers of reward function {self.name} were closed during a call.")
                # A set has no order. In the order sent, the first failure that a user reads about is the first one.
                for reply in [sent for sent in running if sent in done]:
                    members = running.pop(reply)
                    if isinstance(broken := reply.exception(), BrokenProcessPool):
                        failed_starts += 1
                        self._check_starts(failed_starts, broken)
                        todo.put_back(members)
                        continue
                    answers = self._answers_of(reply, [expected[i] for i in members])
                    if answers is None:
                        todo.suspect(members)
                        continue
                    failed_starts = 0
                    todo.mark_answered(members, len(answers))
                    # Not strict: a worker may answer only the first items, and `mark_answered` has put back the rest.
                    yield from zip(members, answers, strict=False)
        finally:
            for reply in running:  # not empty after an error, Ctrl-C or an early close
                crew.cancel(reply)

    def _start(self) -> _Crew:
        with self._lock:
            if self._crew is None:
                self._crew = _Crew(self.workers, (self.source, self.limits, self.concurrency))
                # The crew has no reference to this object, or it would never be finalized.
                self._stop = weakref.finalize(self, self._crew.close)
            return self._crew

    def _deadline_s(self, items: int) -> float:
        """Return the seconds after which the worker of a chunk is stopped."""
        if self.concurrency is None:
            # A worker begins the last item of a chunk within `SLICE_S`.
            return self.timeout_s + (0.0 if items == 1 else SLICE_S)
        return _GRACE_S + self.timeout_s * (1 if items == 1 else 2)  # the last call may start after `timeout_s`

    def _check_starts(self, failed: int, error: BrokenProcessPool) -> None:
        """Give up if processes keep dying before they are ready; the number of workers can fail at the same time."""
        if failed > self.workers + _RESTARTS:
            raise RewardError(
                f"the workers of reward function {self.name} died {failed} times in a row without an answer "
                f"({error}). See the messages of the worker processes above. If the main script defines the function, "
                "put the rest of the script under `if __name__ == '__main__':`, or define the function in another file."
            ) from error
        logger.warning("a worker of reward function %s did not start (%s). It is started again.", self.name, error)

    def _answers_of(self, reply: _Reply, expected: Sequence[Expected]) -> list[Answer] | None:
        """Return the answers of a chunk; None if it failed and the item at fault is unknown.

        Args:
            reply: what came of the chunk.
            expected: expected answer to each item of the chunk.
        """
        error = reply.exception()
        single = len(expected) == 1
        if error is None:
            returned, leaks = reply.result()
            if leaks and not self._leak_logged:
                self._leak_logged = True
                logger.warning(
                    "a worker of reward function %s kept more than %.0f%% of memory_mb=%s between two calls and was "
                    "replaced. The function probably leaks memory. No reward is lost; later replacements are not "
                    "logged.",
                    *(self.name, 100 * KEPT, self.limits.memory_mb),
                )
            answers = check_answers(returned, expected)
            if answers is None and single:
                return [Problem(FailureKind.nonsense, "the worker returned no list of answers")]
            return answers
        if not single:
            return None
        if isinstance(error, TimeoutError):
            return [Problem(FailureKind.timeout, f"no answer within timeout_s={self.timeout_s} s; worker stopped")]
        if isinstance(error, _WorkerDiedError):
            return [Problem(FailureKind.crash, f"the worker process died: {_exit_reason(error.exit_code)}")]
        return [Problem(FailureKind.nonsense, f"the worker's answer cannot be read: {type(error).__name__}: {error}")]


_Reply: TypeAlias = "Future[tuple[object, bool]]"
"""What a worker will return for a chunk, and whether it keeps too much memory."""


class _Crew:
    """Worker processes, each with a thread of the run that starts it, sends it one chunk at a time, and stops it."""

    def __init__(self, workers: int, arguments: tuple[str | bytes, WorkerLimits, Concurrency | None]) -> None:
        """Start the threads, which start the processes; `arguments` follow the pipe in those of `serve`."""
        self.closed = False
        self._arguments = arguments
        self._lock = threading.Lock()  # after `closed` is set, no process starts and no chunk is added
        self._chunks: SimpleQueue[tuple[_Reply, list[bytes], float] | None] = SimpleQueue()
        self._workers: set[_Worker] = set()
        self._at_work: dict[_Reply, _Worker] = {}
        # Before the exit handler of multiprocessing, which waits for the processes. That of `weakref` can come later.
        atexit.register(self.close)
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def send(self, chunk: list[bytes], deadline_s: float) -> _Reply:
        """Queue a chunk for the next worker that is free."""
        reply: _Reply = Future()
        with self._lock:
            if self.closed:
                reply.set_exception(BrokenProcessPool("the workers were stopped"))
            else:
                self._chunks.put((reply, chunk, deadline_s))
        return reply

    def cancel(self, reply: _Reply) -> None:
        """Drop a chunk; stop the worker that already answers it."""
        if not reply.cancel() and (worker := self._at_work.get(reply)) is not None:
            worker.kill()  # its thread waits for the end

    def close(self) -> None:
        """Stop all processes. Every reply that is still open fails."""
        with self._lock:
            self.closed = True
        atexit.unregister(self.close)
        for worker in list(self._workers):
            worker.stop()
        for _ in self._threads:
            self._chunks.put(None)

    def _run(self) -> None:
        worker: _Worker | None = None
        while True:
            if worker is None:
                with suppress(BrokenProcessPool):  # the next chunk tries again, and reports it
                    worker = self._ready_worker()
            if (queued := self._chunks.get()) is None:
                break
            reply, chunk, deadline_s = queued
            if not reply.set_running_or_notify_cancel():
                continue
            try:
                if worker is not None and not worker.process.is_alive():  # killed from outside
                    self._end(worker)
                    worker = None
                worker = worker or self._ready_worker()
                self._at_work[reply] = worker
                answered = worker.exchange(chunk, deadline_s)
                # a reward function can send anything
                answers, leaks = answered if type(answered) is tuple and len(answered) == 2 else (None, False)
                reply.set_result((answers, leaks is True))
                if leaks is not True:
                    continue
            except Exception as error:
                reply.set_exception(error)
            finally:
                self._at_work.pop(reply, None)
            # After an error or a leak: the next chunk gets a new process.
            if worker is not None:
                self._end(worker)
                worker = None
        if worker is not None:
            self._end(worker)

    def _end(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        worker.end()

    def _ready_worker(self) -> _Worker:
        """Start a process, and wait until it has loaded the function.

        Raises:
            BrokenProcessPool: it did not start, or the workers were closed.
        """
        with self._lock:
            if self.closed:
                raise BrokenProcessPool("the workers were stopped")
            try:
                worker = _Worker(self._arguments)
            except OSError as error:
                raise BrokenProcessPool(str(error)) from error
            self._workers.add(worker)
        try:
            worker.exchange(None, _START_S)
        except Exception as error:
            self._end(worker)
            raise BrokenProcessPool(str(error) or f"not ready within {_START_S:.0f} s") from error
        return worker


class _WorkerDiedError(Exception):
    """The process of a worker ended before it answered."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(_exit_reason(exit_code))
        self.exit_code = exit_code


class _Worker:
    """A process that answers chunks (`serve`), as its thread in the run sees it."""

    def __init__(self, arguments: tuple[str | bytes, WorkerLimits, Concurrency | None]) -> None:
        source = arguments[0]
        with_main = isinstance(source, bytes) and b"__main__" in source
        self._pipe, theirs = multiprocessing.Pipe()
        self.process = start_worker(serve, (theirs, *arguments), with_main=with_main)
        # Now only the worker holds this end, so reading ours fails as soon as it is gone.
        theirs.close()
        self._late = False

    def exchange(self, chunk: list[bytes] | None, within_s: float) -> Any:
        """Send a chunk (None: nothing), and return what the process sends next.

        The clock also runs while the chunk is sent and the answer is read, since the process can stop in the middle.

        Raises:
            TimeoutError: time is over; the process is stopped.
            _WorkerDiedError: the process ended.
        """
        clock = threading.Timer(within_s, self._stop_late)
        clock.daemon = True
        clock.start()
        try:
            if chunk is not None:
                self._pipe.send(chunk)
            while not self._pipe.poll(_POLL_S):
                if self.process.exitcode is not None:  # a daemon that the function has left can hold the other end
                    raise EOFError
            return self._pipe.recv()
        except (EOFError, OSError):
            self._wait()
            if self._late:
                raise TimeoutError from None
            raise _WorkerDiedError(self.process.exitcode) from None
        finally:
            clock.cancel()

    def _stop_late(self) -> None:
        self._late = True
        self.stop()

    def kill(self) -> None:
        """Kill the process and what its function started."""
        if self.process.pid is not None:
            kill_session(self.process.pid)

    def stop(self) -> None:
        """Kill the process and what its function started, and wait for its end."""
        self.kill()
        self._wait()

    def _wait(self) -> None:
        """Wait for the end of the process. `join` would also wait for a daemon that the function has left."""
        stop = time.monotonic() + _END_S
        while self.process.exitcode is None and time.monotonic() < stop:
            time.sleep(_PAUSE_S)

    def end(self) -> None:
        """Stop the process, and release what the run holds of it."""
        self.stop()
        self._pipe.close()


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
        # Toward the end, chunks shrink so that all workers have something to do.
        fair_share = math.ceil(len(self.queue) / self.workers)
        return [self.queue.popleft() for _ in range(min(self.chunk, fair_share))]

    def put_back(self, members: Iterable[int]) -> None:
        self.queue.extendleft(reversed(list(members)))

    def suspect(self, members: Iterable[int]) -> None:
        self.alone.extend(members)

    def mark_answered(self, members: Sequence[int], n: int) -> None:
        """Put back the items after the first `n`, which have answers, and adapt the chunk size."""
        self.put_back(members[n:])
        # The worker stopped after `SLICE_S`: this many items fit.
        if n < len(members):
            self.chunk = n
        elif len(members) > 1:
            self.chunk = min(2 * self.chunk, self.largest)


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
