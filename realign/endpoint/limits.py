"""`Guard`: limits on the concurrency and the time of requests; `read_body` limits the size and time of a body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from realign.endpoint.requests import ApiError
from realign.settings import Count, Positive, Settings

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_DRAINED = 8
"""A body that is too large is read and dropped up to this multiple of the limit, so that clients see the error."""


@dataclass
class EndpointLimits(Settings):
    """Limits on requests to the endpoint."""

    max_body_mb: Positive = 16.0
    """Reject request bodies larger than this, in MB (10^6 bytes), with status 413."""
    body_timeout_s: Positive = 30.0
    """Time limit for receiving a request body, in seconds; slower ones get status 408."""
    timeout_s: Positive = 600.0
    """Time limit of a whole request, in seconds, sampling and response included; longer ones get status 504."""
    max_concurrent: Count = 512
    """Answer at most this many requests at a time; more get status 429."""

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a request body in bytes."""
        return int(self.max_body_mb * 1e6)


class Guard:
    """ASGI middleware that limits the number and the time of requests."""

    def __init__(self, app: _App, limits: EndpointLimits) -> None:
        """Wrap an application."""
        self._app, self._limits = app, limits
        self._active: set[asyncio.Task[Any]] = set()
        self._ended = False

    def end(self) -> None:
        """Cancel all requests; their clients get an error. Call it on the event loop of the requests."""
        self._ended = True
        for task in self._active:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            return
        # A busy endpoint is healthy, so /health has no limit.
        if len(self._active) >= self._limits.max_concurrent and scope["path"] != "/health":
            message = f"The endpoint serves at most {self._limits.max_concurrent} concurrent requests."
            await send_json(send, 429, ApiError(429, message, code="too_many_requests").body(), {"retry-after": "1"})
            return
        started = False

        async def watch_send(event: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            await send(event)

        task = asyncio.current_task()
        assert task is not None
        self._active.add(task)
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await self._app(scope, receive, watch_send)
        except TimeoutError:
            if started:  # the server closes the connection of an incomplete response
                return
            message = f"The request took longer than {self._limits.timeout_s:g} seconds."
            await send_json(send, 504, ApiError(504, message, code="timeout").body())
        except asyncio.CancelledError:
            if not self._ended:
                raise
            if not started:
                await send_json(send, 503, ApiError(503, "The endpoint ends.", code="ended").body())
        finally:
            self._active.discard(task)


async def read_body(receive: Receive, limits: EndpointLimits) -> bytes:
    """Read the body of a request.

    Raises:
        ApiError: the body is too large or too slow.
    """
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            while True:
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise ApiError(400, "The client disconnected.", code="disconnected")
                part = event.get("body", b"")
                size += len(part)
                if size <= limits.max_body_bytes:
                    body += part
                if not event.get("more_body") or size > _DRAINED * limits.max_body_bytes:
                    break
    except TimeoutError:
        message = f"The request body was not received within {limits.body_timeout_s:g} seconds."
        raise ApiError(408, message, code="body_timeout") from None
    if size > limits.max_body_bytes:
        raise ApiError(413, f"The request body exceeds {limits.max_body_mb:g} MB.", code="body_too_large")
    return bytes(body)


async def until_disconnected(receive: Receive, work: Awaitable[None]) -> None:
    """Do some work, and cancel it when the client disconnects. The body must have been received."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return
        task.result()
    finally:
        task.cancel()
        watch.cancel()


async def send_json(send: Send, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
    """Send a whole response."""
    content = json.dumps(body).encode()
    named = {"content-type": "application/json", "content-length": str(len(content)), **(headers or {})}
    lines = [(name.encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": content})
