"""Render a chat template once with limits on time and memory, in a child process.

A chat template is a program. Its sandbox limits what it can reach, but not how long it runs or how much memory it
needs.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from realign.errors import DataError

DEADLINE_S = 20.0
"""Seconds that the first row may take."""
MEMORY = 1 << 30
"""Bytes of memory that the first row may need in addition to those of the process."""
CHARACTERS = 100_000_000
"""Largest number of characters of a rendered row."""


def check_first_render(render: Callable[[], str], deadline_s: float = DEADLINE_S, memory: int = MEMORY) -> None:
    """Call `render` in a forked child process, which is killed at the deadline. Without `os.fork`, do nothing.

    Errors that `render` raises are ignored, because the caller renders the row again.

    Args:
        render: Renders the first row. Everything that it imports must be imported already.
        deadline_s: Seconds until the child is killed.
        memory: Bytes that the child may allocate (Linux).

    Raises:
        DataError: The template needs more time or memory, or its text is too long.
    """
    if not hasattr(os, "fork"):
        return
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads: the child only renders
        child = os.fork()
    if child == 0:
        _render_and_exit(render, writer, memory)
    os.close(writer)
    try:
        answer = _answer(reader, deadline_s)
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if answer is None:
        raise DataError(f"the chat template did not finish the first row within {deadline_s:g} seconds. {_CURE}")
    if answer != b"done":
        raise DataError(f"the chat template needs too much memory for the first row. {_CURE}")


_CURE = "Use another tokenizer, or set template=plain."


def _answer(reader: int, deadline_s: float) -> bytes | None:
    """Return what the child wrote before it ended, or None at the deadline."""
    end = time.monotonic() + deadline_s
    while (left := end - time.monotonic()) > 0:
        if select.select([reader], [], [], left)[0]:
            return os.read(reader, 16)
    return None


def _render_and_exit(render: Callable[[], str], writer: int, memory: int) -> None:
    answer = b"done"
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _limit_memory(memory)
        if len(render()) > CHARACTERS:
            answer = b"long"
    except MemoryError:
        answer = b"memory"
    except BaseException as error:
        if isinstance(error.__cause__, MemoryError):
            answer = b"memory"
    finally:
        os.write(writer, answer)
        os._exit(0)


def _limit_memory(extra: int) -> None:
    if sys.platform != "linux":
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + extra
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
