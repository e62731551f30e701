"""`Endpoint`: the application in a thread, served by uvicorn (needs the extra `serve`)."""

from __future__ import annotations

import importlib.util
import ipaddress
import socket
import threading
from typing import TYPE_CHECKING

from realign.endpoint.calls import Caller
from realign.endpoint.limits import EndpointLimits, Guard
from realign.endpoint.sessions import Session, Sessions
from realign.errors import ConfigError

if TYPE_CHECKING:
    from uvicorn import Server

LOOPBACK = "127.0.0.1"
_END_S = 5
"""Seconds that running requests may take when an endpoint ends."""
_IDLE_S = 60
"""Seconds after which an idle connection is closed."""


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
        self._socket = _listening(host, port)
        self._host, self._port = host, self._socket.getsockname()[1]
        self._caller = Caller()
        self._server = _server(application(sessions, self._caller, limits, model))
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
        self._caller.close()


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


def _server(app: Guard) -> Server:
    import uvicorn

    class Ending(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.end()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_END_S,
        backlog=2048,
    )
    return Ending(config)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"host={host}: cannot listen on this address ({error}).") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"port={port}: cannot listen on {host} ({error}). Choose another port.") from error
    return listener
