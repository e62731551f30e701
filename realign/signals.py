"""Handle the signals that end a run: the first one stops it after the current step, the second one at once.

Ctrl-C, a closed terminal (SIGHUP), and what schedulers send before they kill a job: SIGTERM, or SIGUSR1, SIGUSR2 and
SIGXCPU. A signal that the process inherited as ignored stays ignored, as under `nohup`. SIGQUIT keeps its default,
which ends the process at once.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from realign.console import write_stderr

SIGNALS = tuple(
    number
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    if (number := getattr(signal, name, None)) is not None  # Windows has only the first two
)
_TAKEN = (signal.SIGINT, signal.SIGTERM)
"""Signals whose handlers are replaced even if they aren't Python's: Ray's for SIGTERM ends the process silently."""


class Interrupted(KeyboardInterrupt):
    """A run was stopped by a signal. The message describes its progress.

    Attributes:
        exit_code: 128 + signal number: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.
        run: `realign.Run` of `realign.train`; None if it had not begun.
    """

    run: Any = None

    def __init__(self, number: int, message: str = "interrupted") -> None:
        super().__init__(message)
        self.exit_code = 128 + number

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback."""
        return [str(self)]


class _Handler:
    """A signal handler of realign, which another one may replace."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act
        self.error: BaseException | None = None
        """What to raise instead, see `raise_in_main_thread`."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.error is not None:
            raise self.error
        self._act(number)


@contextmanager
def _handle_signals(act: Callable[[int], None], numbers: Iterable[int] = SIGNALS) -> Iterator[None]:
    """Call `act` with the number of each signal that arrives in this context.

    Python handles signals in the main thread only. In other threads this has no effect.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            now = signal.getsignal(number)
            free = number in _TAKEN or now is signal.SIG_DFL or isinstance(now, _Handler)
            if free and now is not signal.SIG_IGN:
                before[number] = signal.signal(number, _Handler(act))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_on_signals() -> AbstractContextManager[None]:
    """Raise `Interrupted` on a signal, so that it ends a run like Ctrl-C: files are closed and workers stopped."""

    def stop(number: int) -> None:
        raise Interrupted(number)

    return _handle_signals(stop, [number for number in SIGNALS if number != signal.SIGINT])


def raise_in_main_thread(error: BaseException) -> None:
    """Raise an error in the main thread, also in a blocking system call, if it handles signals."""
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, _Handler) and sys.platform != "win32":
        handler.error = error
        # to the thread itself: a signal to the process might not interrupt its system call
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


class StopSignals:
    """Signal handlers for a context: the first signal is recorded, the second raises `Interrupted`, the third kills.

    Args:
        quiet: Print no message. Use this for all ranks but one in distributed training.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self.received: int | None = None
        """Number of the first signal; None before it arrives."""
        self._handlers = _handle_signals(self._note)

    def __enter__(self) -> Self:
        self._handlers.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._handlers.__exit__(kind, value, tb)

    def _note(self, number: int) -> None:
        if self.received is not None:
            # the third signal then kills the process, even if closing the run hangs
            for handled in SIGNALS:
                if signal.getsignal(handled) is not signal.SIG_IGN:
                    signal.signal(handled, signal.SIG_DFL)
            raise Interrupted(number, "interrupted; the steps after the last checkpoint are lost")
        self.received = number
        if not self._quiet:
            # print is not reentrant, and the signal may interrupt another print
            write_stderr("\nstopping after this step; once more to end at once\n")
