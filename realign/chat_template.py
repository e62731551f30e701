"""Render chat templates in a child process with limits on time and memory.

A chat template is a program of its tokenizer. Its sandbox limits what it can reach, but not how long it runs or how
much memory it needs.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from realign.errors import DataError

Render: TypeAlias = Callable[[Any, Sequence[Mapping[str, Any]], Mapping[str, Any]], str]

_CURE = "Use a tokenizer with another chat template, or plain text"
_HEADER = struct.Struct("<cQ")
_LONGEST_MESSAGE = 2000


@dataclass(frozen=True)
class Bounds:
    """Limits of one `ChatTemplate`."""

    row_s: float = 20.0
    """Seconds that one rendering may take."""
    mean_s: float = 0.05
    """Seconds per rendering that all renderings together may take in addition to `row_s`."""
    memory: int = 1 << 30
    """Bytes of memory that a rendering may need in addition to those of the process (Linux)."""
    characters: int = 100_000_000
    """Number of characters that a rendering may have."""


BOUNDS = Bounds()


class ChatTemplate:
    """The chat template of a tokenizer, rendered in a child process that is forked by the first rendering.

    The child process ends when this object is deleted, when the process ends, or when a rendering exceeds a limit. In
    the latter case every later call raises the same error. A system without `os.fork` has no limits.

    Args:
        tokenizer: Tokenizer of transformers with a chat template.
        bounds: Limits of the renderings.
    """

    def __init__(self, tokenizer: Any, bounds: Bounds | None = None) -> None:
        self._tokenizer = tokenizer
        self._bounds = bounds or BOUNDS
        self._budget_s = self._bounds.row_s
        self._connection: socket.socket | None = None
        self._child: Callable[[], object] | None = None
        self._problem = ""
        self._lock = threading.Lock()

    @property
    def ended(self) -> bool:
        """Whether a rendering exceeded a limit, so that all later calls raise its error."""
        return bool(self._problem)

    def render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: Messages with role and content.
            options: Further arguments of `tokenizer.apply_chat_template`.
            add_generation_prompt: Whether the text ends where the next answer begins.

        Raises:
            DataError: The template failed, or exceeded a limit.
        """
        return self.ask(_rendered, messages, {"add_generation_prompt": add_generation_prompt, **options})

    def ask(self, render: Render, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Call a function in the child process, and return its text.

        Args:
            render: Function of a module, called with the tokenizer, `messages` and `options`.
            messages: Messages with role and content.
            options: Any further arguments.

        Raises:
            DataError: The template failed, or exceeded a limit.
        """
        if not hasattr(os, "fork"):
            return _guarded(render, self._tokenizer, messages, options)
        try:
            question = pickle.dumps((render, messages, options))
        except Exception as error:  # such as values nested too deeply, or objects of a local class
            raise DataError(
                f"the messages cannot be sent to the process that renders the chat template: {type(error).__name__}: "
                f"{error}"
            ) from error
        with self._lock:
            kind, text = self._answer(question)
        if kind != b"t":
            raise DataError(text)
        return text

    def _answer(self, question: bytes) -> tuple[bytes, str]:
        """Return the kind of the child's answer and its text; a child that exceeded a limit is stopped."""
        if self._problem:
            return b"x", self._problem
        bounds = self._bounds
        self._budget_s += bounds.mean_s
        most_s = min(bounds.row_s, self._budget_s)
        started = time.monotonic()
        try:
            connection = self._connection or self._fork()
            connection.settimeout(None)
            connection.sendall(_HEADER.pack(b"q", len(question)) + question)
            kind, answer = _received(connection, started + most_s)
        except TimeoutError:
            limit = f"{bounds.row_s:g} seconds" if most_s == bounds.row_s else f"{bounds.mean_s:g} seconds on average"
            kind, answer = b"x", f"the chat template did not finish within {limit}".encode()
        except (EOFError, ConnectionError):  # killed, by the system for its memory for example
            kind, answer = b"x", b"the process that renders the chat template ended"
        except BaseException:  # an interrupt: the answer may still come, and belongs to no later question
            self._close()
            raise
        self._budget_s -= time.monotonic() - started
        if kind == b"x":
            self._close()
            self._problem = f"{answer.decode()}. {_CURE}"
            return kind, self._problem
        return kind, answer.decode(errors="surrogatepass")

    def _close(self) -> None:
        if self._child is not None:
            self._child()
        self._child = self._connection = None

    def _fork(self) -> socket.socket:
        _import_renderer(self._tokenizer)
        here, there = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads: the child only renders
            child = os.fork()
        if child == 0:
            _serve(there, self._tokenizer, self._bounds)
        there.close()
        self._connection = here
        self._child = weakref.finalize(self, _end, here, child, os.getpid())
        return here


def _end(connection: socket.socket, child: int, parent: int) -> None:
    connection.close()
    if os.getpid() == parent:  # another fork of the process has no such child
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def _received(connection: socket.socket, end: float) -> tuple[bytes, bytes]:
    """Return the kind and the content of the next message.

    Raises:
        TimeoutError: It is incomplete at the monotonic time `end`.
        EOFError: The connection was closed.
    """

    def read(size: int) -> bytes:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            if end != float("inf"):
                connection.settimeout(max(end - time.monotonic(), 1e-3))
            if not (count := connection.recv_into(rest)):
                raise EOFError
            rest = rest[count:]
        return bytes(data)

    kind, size = _HEADER.unpack(read(_HEADER.size))
    return kind, read(size)


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _guarded(render: Render, tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    try:
        return render(tokenizer, messages, options)
    except Exception as error:  # templates are programs: they can raise any exception
        message = str(error)
        shown = message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."
        raise DataError(f"the chat template failed: {type(error).__name__}: {shown}") from error


def _import_renderer(tokenizer: Any) -> None:
    """Import what rendering needs, because a forked process should not import.

    This does not compile the tokenizer's own template: constants such as `'x' * 10**10` are computed when a template
    is compiled.
    """
    tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template="-", tokenize=False)


def _serve(connection: socket.socket, tokenizer: Any, bounds: Bounds) -> NoReturn:
    """Answer requests until the connection is closed. Runs in the child process, which never returns."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # sent to the group of a run, which may finish its step
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        # close locks and pipes of the run, which must end with it
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, 1 << 16)
        _limit_memory(bounds.memory)
        while True:
            _, question = _received(connection, float("inf"))
            signal.setitimer(signal.ITIMER_REAL, bounds.row_s + 1)  # in case the parent was killed
            kind, text = _result(tokenizer, question, bounds)
            signal.setitimer(signal.ITIMER_REAL, 0)
            answer = text.encode(errors="surrogatepass")
            connection.sendall(_HEADER.pack(kind, len(answer)) + answer)
    finally:
        os._exit(0)


def _result(tokenizer: Any, question: bytes, bounds: Bounds) -> tuple[bytes, str]:
    """Return the kind and the text of an answer: the rendering (t), an error (e) or an exceeded limit (x)."""
    try:
        render, messages, options = pickle.loads(question)
        text = _guarded(render, tokenizer, messages, options)
    except MemoryError:
        return b"x", "the chat template needs too much memory"
    except DataError as error:
        if isinstance(error.__cause__, MemoryError):
            return b"x", "the chat template needs too much memory"
        return b"e", str(error)
    if len(text) > bounds.characters:
        return b"x", f"the chat template wrote more than {bounds.characters} characters"
    return b"t", text


def _limit_memory(extra: int) -> None:
    if sys.platform != "linux":
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + extra
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
