"""`Endpoint`: the application in a thread, served by uvicorn (needs the extra `serve`)."""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import logging
import socket
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from realign.endpoint.caller import Caller
from realign.endpoint.limits import EndpointLimits, Guard
from realign.endpoint.sessions import Session, Sessions
from realign.errors import ConfigError

if TYPE_CHECKING:
    from uvicorn import Server

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
SPARE = 64
"""Connections that may be open in addition to one for each concurrent request."""
HEADERS_S = 30
"""Seconds that a client may take to send the headers of its first request."""
_BACKLOG = 2048
_END_S = 5
"""Seconds that running requests may take when an endpoint ends."""
_IDLE_S = 60
"""Seconds after a response in which the headers of the next request must arrive."""


class Endpoint:
    """An endpoint with its own event loop. `start` serves it in a thread, `run` in the calling thread.

    Args:
        sessions: the open sessions.
        limits: limits of requests.
        model: name of the model in responses.
        host: address to listen on.
        port: port to listen on; 0 chooses a free one.

    Raises:
        ConfigError: the extra `serve` is missing, or the address is in use.
    """

    def __init__(
        self, sessions: Sessions, limits: EndpointLimits, *, model: str, host: str = LOOPBACK, port: int = 0
    ) -> None:
        check_installed()
        from realign.endpoint.app import application

        self.sessions = sessions
        self._socket = _listen(host, port)
        self._host, self._port = host, self._socket.getsockname()[1]
        self._caller = Caller()
        self._server = _server(application(sessions, self._caller, limits, model), limits)
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Address of the endpoint, without `/v1`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def base_url(self, session: Session) -> str:
        """Return the base URL of an open session, for OpenAI clients."""
        return f"{self.url}/sessions/{session.id}/v1"

    def start(self) -> None:
        """Serve in a daemon thread until `close`."""
        self._thread = threading.Thread(target=self.run, name="endpoint", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Serve until `close`, or until a signal if called in the main thread."""
        self._server.run([self._socket])

    def close(self) -> None:
        """Stop serving, and end unfinished requests. Idempotent."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(2 * _END_S)
        self._socket.close()


def check_installed() -> None:
    """Check that the packages of the extra `serve` are installed.

    Raises:
        ConfigError: a package is missing.
    """
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"The endpoint needs the package {package}. Run pip install 'realign-rl[serve]'.")


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def most_connections(concurrent: int) -> int:
    """Return how many connections may be open, and raise the soft limit on descriptors if it is too low for them.

    Half of the descriptors remain for other files, since an endpoint of a run is in its process.

    Args:
        concurrent: maximum number of concurrent requests.
    """
    wanted = concurrent + SPARE
    if sys.platform == "win32":
        return wanted
    import resource

    def limit(value: int) -> float:
        return float("inf") if value == resource.RLIM_INFINITY else value

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + _BACKLOG  # as many connections as wait at a time may be accepted before any is closed
    if limit(soft) < needed:
        with suppress(ValueError, OSError):  # some systems allow less than the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(min(needed, limit(hard))), hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return int(min(wanted, limit(soft) // 2))


def _server(app: Guard, limits: EndpointLimits) -> Server:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    most = most_connections(limits.max_concurrent)
    waiting: dict[Connection, asyncio.TimerHandle] = {}  # connections without a request, oldest first

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                oldest = next(iter(waiting), self)  # a client without a request, if there is one
                oldest.transport.abort()
                # It ends in a later turn of the loop. Counted until then, it would cost another client its connection.
                self.connections.discard(oldest)
                oldest._cancel_timer()
            self._wait(HEADERS_S)

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._cancel_timer()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:  # else the client has already sent the next request
                self._wait(_IDLE_S)

        def _wait(self, seconds: float) -> None:
            """Close the connection unless the headers of a request arrive in time."""
            if not self.transport.is_closing():
                waiting[self] = self.loop.call_later(seconds, self.transport.abort)

        def _cancel_timer(self) -> None:
            if (timer := waiting.pop(self, None)) is not None:
                timer.cancel()

    class Ending(uvicorn.Server):
        warned = False

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().set_exception_handler(self.loop_failed)
            await super().startup(sockets)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.end()
            await super().shutdown(sockets)

        def loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            """Log once that connections cannot be accepted, which asyncio reports thousands of times per second."""
            error = context.get("exception")
            if "accept" not in context["message"] or not isinstance(error, OSError):
                loop.default_exception_handler(context)
            elif not self.warned:
                self.warned = True
                logger.warning("the endpoint cannot accept connections (%s). Logged once.", error)

    config = uvicorn.Config(
        app,
        http=Connection,
        log_level="error",  # uvicorn warns about each invalid request, also without a key
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_END_S,
        backlog=_BACKLOG,
    )
    return Ending(config)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"host={host}: cannot listen on this address ({error}).") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"port={port}: cannot listen on {host} ({error}). Choose another port.") from error
    return listener
