"""How the processes of a reward pool start and end: each has a keeper, which kills everything its function started.

The process that the pool starts becomes the keeper. It forks the worker, and never runs a user's code. The worker can
end by an exit, a crash or SIGKILL. Then, or when the pool or the run ends, the keeper kills all descendants of the
worker. Finally, it ends like the worker.

On Linux the keeper is a child subreaper: descendants whose parent ends become its children, also after a double fork or
in another session or process group. On other POSIX systems it kills the process group of the worker. Windows has no
`fork`, so workers have no keeper there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import connection
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Killed processes end within milliseconds. Processes in an uninterruptible system call can take longer: they end as
# soon as the call returns. The pool kills the keeper itself 3 s after SIGTERM.
_KILL_S = 2.0
_PAUSE_S = 0.01


WORKER_NAME = "reward_worker"
"""Name of a worker process."""


def become_worker(parent: int) -> int | None:
    """Fork: return in the worker, and stay in the keeper until the worker and all its descendants have ended.

    Args:
        parent: file descriptor that becomes readable when the run ends.

    Returns:
        A file descriptor that becomes readable when the keeper has ended; None on a platform without keepers.
    """
    if sys.platform == "win32":
        return None
    os.setpgid(0, 0)  # signals to the group of the run do not reach the keeper: it acts when the run ends
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    keeper = os.getpid()
    ended, held = os.pipe()  # `held` is closed when the keeper ends
    worker = os.fork()
    if worker:
        _keep(worker, parent, held)
    os.close(held)
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The keeper may have ended before the line above took effect.
    if os.getppid() != keeper:
        os._exit(1)
    return ended


def _keep(worker: int, parent: int, held: int) -> NoReturn:
    """Wait until the worker ends, SIGTERM arrives or the run ends. Then kill every descendant, and exit."""
    status = 0
    try:
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        stopped: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
        # The wake-up descriptor is written only for signals with a handler in Python.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        _close_others({0, 1, 2, parent, held, read, write})
        while not stopped:
            # Before the wait: the worker may have ended before there was a handler for SIGCHLD.
            ended = _reaped(worker)
            if ended is not None:
                status = ended
                break
            ready = connection.wait([parent, read])
            if parent in ready:
                break
            os.read(read, 4096)
        else:
            status = signal.SIGTERM  # as `waitpid` reports a process that SIGTERM ended
    finally:
        _kill_descendants(worker)
        _end_like(status)


def _reaped(worker: int) -> int | None:
    """Reap all children that have ended, and return the wait status of the worker if it is one of them."""
    status = None
    with suppress(ChildProcessError):
        while True:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == worker:
                status = ended
    return status


def _kill_descendants(worker: int) -> None:
    """Kill the worker's process group and all descendants of this process, until none is left or time is over."""
    deadline = time.monotonic() + _KILL_S
    with suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    while True:
        # Again in every round, since a process can fork between the list and its end.
        for pid in _descendants():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # no child is left, and orphans would be children
            return
        if time.monotonic() > deadline:
            return
        time.sleep(_PAUSE_S)


def _descendants() -> list[int]:
    """Return the pids of all descendants of this process, on Linux."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    descendants = list(children.get(os.getpid(), ()))
    for pid in descendants:  # grows during the loop
        descendants.extend(children.get(pid, ()))
    return descendants


def _parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            # pid (name) state ppid ...; the name can contain any character
            yield int(folder.name), int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])


def _end_like(status: int) -> NoReturn:
    """End this process with the exit code or the signal of a wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError, ValueError):
            import resource

            # The worker crashed, not this process: no core file of it.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(1)
    os._exit(os.WEXITSTATUS(status))


def _close_others(fds: set[int]) -> None:
    """Close all file descriptors except `fds`, so that the pipes of the pool belong to the worker only."""
    start = 0
    for fd in [*sorted(fds), min(os.sysconf("SC_OPEN_MAX"), 2**16)]:
        if start < fd:  # `closerange(0, 0)` would close every descriptor
            os.closerange(start, fd)
        start = fd + 1


def _prctl(option: int, value: int) -> None:
    """Set an option of this process on Linux. A system that forbids it has fewer guarantees, but workers run."""
    if sys.platform != "linux":
        return
    import ctypes

    call: Callable[..., Any] = ctypes.CDLL(None).prctl
    call(option, ctypes.c_ulong(value), 0, 0, 0)


# Two pools may start workers concurrently in different threads; the lock keeps hiding and restoring in order.
_main_lock = threading.Lock()


@contextmanager
def _hidden_main() -> Iterator[None]:
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


def start_kept(work: Callable[..., None], arguments: tuple[Any, ...], *, with_main: bool) -> SpawnProcess:
    """Start a worker process with a keeper; the keeper is the process that is returned.

    Args:
        work: what the worker does.
        arguments: its arguments.
        with_main: whether the worker needs objects of the main script of this process, and so runs it.
    """
    process = SpawnContext().Process(target=_run_kept, name=WORKER_NAME, args=(work, arguments))
    with nullcontext() if with_main else _hidden_main():
        process.start()
    return process


def _run_kept(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    ends = [parent.sentinel]
    # Before any thread starts: a fork copies one thread only, and locks that others hold would stay locked.
    if (keeper := become_worker(parent.sentinel)) is not None:
        ends.append(keeper)
    threading.Thread(target=_exit_after, args=(ends,), daemon=True).start()
    work(*arguments)


def _exit_after(ends: Sequence[int]) -> None:
    """Exit when the run or the keeper of this worker is gone. The keeper then kills what the function started."""
    connection.wait(ends)
    os._exit(1)
