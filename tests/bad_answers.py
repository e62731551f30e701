"""Servers whose answers are wrong on the wire: half, late, endless, huge, or not what was asked for."""

from __future__ import annotations

import gzip
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

Parts: TypeAlias = Iterable[bytes | float]
"""What a server sends: bytes, and seconds that it waits."""

_MB = b" " * 2**20


def answered(body: bytes, status: str = "200 OK", headers: str = "", kind: str = "application/json") -> Parts:
    """Return a complete answer."""
    named = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{headers}"
    return [f"HTTP/1.1 {status}\r\n{named}\r\n".encode() + body]


def _begun(headers: str, *rest: bytes | float, status: str = "200 OK", ever: Parts = ()) -> Parts:
    """Return an answer that begins with these headers; `ever` is repeated without an end."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{headers}\r\n".encode()
    return itertools.chain([head, *rest], itertools.cycle(ever))


CHUNKED = "Transfer-Encoding: chunked\r\n"
BAD: dict[str, Callable[[], Parts]] = {
    "nothing": lambda: [],
    "half a status": lambda: [b"HTTP/1."],
    "half a header": lambda: [b"HTTP/1.1 200 OK\r\nContent-"],
    "half a body": lambda: _begun("Content-Length: 1000\r\n", b'{"re'),
    "half a chunk": lambda: _begun(CHUNKED, b'9\r\n{"re'),
    "no chunk": lambda: _begun(CHUNKED, b"zz\r\n"),
    "html": lambda: answered(b"<html>busy</html>", kind="text/html"),
    "empty": lambda: answered(b""),
    "half a JSON": lambda: answered(b"{"),
    "deep": lambda: answered(b"[" * 100_000),
    "null": lambda: answered(b"null"),
    "a number": lambda: answered(b"7"),
    "a list": lambda: answered(b"[1]"),
    "no UTF-8": lambda: answered(b"\xff\xfe"),
    "10,000 digits": lambda: answered(b"9" * 10_000),
    "status 400": lambda: answered(b"{}", "400 Bad"),
    "status 500": lambda: answered(b"{}", "500 Broken", "Retry-After-Ms: 1\r\n"),
    "status 503": lambda: answered(b"{}", "503 Busy", "Retry-After-Ms: 1\r\n"),
    "status 429, for a day": lambda: answered(b"{}", "429 Later", "Retry-After: 86400\r\n"),
    "a redirect": lambda: answered(b"", "302 Moved", "Location: http://127.0.0.1:1/\r\n"),
    "endless headers": lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"X: y\r\n" * 1000)),
    "an endless header": lambda: itertools.chain([b"HTTP/1.1 200 OK\r\nX: "], itertools.repeat(_MB)),
    "an endless body": lambda: _begun("", ever=[_MB]),
    "endless chunks": lambda: _begun(CHUNKED, ever=[b"100000\r\n" + _MB + b"\r\n"]),
    "an endless chunk": lambda: _begun(CHUNKED, b"ffffffffff\r\n", ever=[_MB]),
    "300 MB": lambda: _begun(f"Content-Length: {300 * 2**20}\r\n", ever=[_MB]),
    "an endless error": lambda: _begun("", status="400 Bad", ever=[_MB]),
    "endlessly provisional": lambda: itertools.cycle([b"HTTP/1.1 100 Continue\r\n\r\n", 0.05]),
    "a dripping body": lambda: _begun("Content-Length: 100000\r\n", ever=[b" ", 0.1]),
    "dripping headers": lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.cycle([b"X: y\r\n", 0.1])),
    "silence": lambda: [60.0],
    "a compression bomb": lambda: answered(gzip.compress(b" " * 10 * 2**20, 1), headers="Content-Encoding: gzip\r\n"),
}
"""Answers to a request that contain no result, by what they are."""


@contextmanager
def bad_server(answer: Callable[[Any, int], Parts]) -> Iterator[str]:
    """Serve HTTP: `answer(request, number)` is sent as it is, then the connection is closed. Yields the URL.

    Args:
        answer: gets the JSON of the request, or None if it has none, and the number of earlier requests.
    """
    numbers, stop = itertools.count(), threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as request, suppress(OSError):
            if not request.readline():
                return  # somebody only connected
            headers = dict(line.rstrip().lower().split(b": ", 1) for line in iter(request.readline, b"\r\n"))
            body = request.read(int(headers.get(b"content-length", 0)))
            for part in answer(json.loads(body) if body else None, next(numbers)):
                if stop.is_set():
                    return
                if isinstance(part, float):
                    stop.wait(part)
                else:
                    connection.sendall(part)

    def accept(door: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=door.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=accept, args=[door])
        thread.start()
        try:
            yield f"http://127.0.0.1:{door.getsockname()[1]}"
        finally:
            stop.set()
            door.shutdown(socket.SHUT_RDWR)
            thread.join()
