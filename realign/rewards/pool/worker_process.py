"""Start a worker process of a reward pool, and kill it with what its function started.

A worker is the leader of a session. It is killed with the processes of its session and, on Linux, with all its
descendants; on other POSIX systems with its process group. A daemon survives: it has left the session, and its parent
has ended. Windows has no sessions, so only the worker is killed there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import connection
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any, NoReturn

WORKER_NAME = "reward_worker"
"""Name of a worker process."""
_KILL_S = 2.0
"""Seconds after which killed processes are left to end: those in a system call that can't be interrupted."""
_PAUSE_S = 0.01

# Two pools may start workers concurrently in different threads; the lock keeps hiding and restoring in order.
_main_lock = threading.Lock()


@contextmanager
def _hiding_main() -> Iterator[None]:
    """Hide the file of `__main__`, so that a process spawned inside this context does not run it again.

    By default, a spawned process executes the parent's script under another name. For a training script this costs
    seconds of imports; without a guard it starts the training again. Python has no public switch for it.
    """
    main = sys.modules["__main__"]
    with _main_lock:
        names: dict[str, Any] = vars(main)
        hidden: dict[str, Any] = {name: names[name] for name in ("__file__", "__spec__") if name in names}
        names["__spec__"] = None
        names.pop("__file__", None)
        try:
            yield
        finally:
            names.update(hidden)


def start_worker(work: Callable[..., None], arguments: tuple[Any, ...], *, with_main: bool) -> SpawnProcess:
    """Start a worker process.

    Args:
        work: what the worker does.
        arguments: its arguments.
        with_main: whether the worker needs objects of the main script of this process, and so runs it.
    """
    process = SpawnContext().Process(target=_run_worker, name=WORKER_NAME, args=(work, arguments))
    with nullcontext() if with_main else _hiding_main():
        process.start()
    return process


def _run_worker(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    if sys.platform != "win32":
        os.setsid()
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    with suppress(OSError):  # a pipe whose other end is gone
        work(*arguments)
    _end()


def _end_with_the_run() -> None:
    run = multiprocessing.parent_process()
    assert run is not None
    connection.wait([run.sentinel])
    _end()


def _end() -> NoReturn:
    """End this worker, whose run is gone, with what its function started."""
    kill_session(os.getpid())
    os._exit(1)


def kill_session(leader: int) -> None:
    """Kill a worker and what its function started."""
    if sys.platform == "win32":
        with suppress(OSError):
            os.kill(leader, signal.SIGTERM)
        return
    if leader != os.getpid():
        with suppress(OSError):
            os.kill(leader, signal.SIGSTOP)  # or it could start others meanwhile
    deadline = time.monotonic() + _KILL_S
    # again in every round, since a process can fork between the list and its end
    while (pids := _processes_started_by(leader)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    for kill in (os.killpg, os.kill):
        with suppress(OSError):
            kill(leader, signal.SIGKILL)


def _processes_started_by(leader: int) -> set[int]:
    """Return the processes of a session and the descendants of its leader, without the leader itself, on Linux."""
    started, last = {leader}, 0
    processes = list(_processes())
    while len(started) > last:  # until a round adds nothing
        last = len(started)
        started |= {pid for pid, parent, session in processes if parent in started or session == leader}
    return started - {leader}


def _processes() -> Iterator[tuple[int, int, int]]:
    """Yield id, parent and session of each process that has not ended."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            # pid (name) state ppid pgrp session ...; the name can contain any character
            state, parent, _, session = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:4]
            if state not in (b"Z", b"X"):
                yield int(folder.name), int(parent), int(session)
