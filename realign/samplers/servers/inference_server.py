"""`Server`: one inference server, its process if the run starts it, its connection and its state."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from realign.errors import ConfigError, TransientError
from realign.own_files import open_regular
from realign.samplers.servers.probe import Sampled
from realign.samplers.servers.protocol import ServerFacts, Unavailable
from realign.samplers.servers.server_settings import LOCAL, ServerSettings
from realign.samplers.servers.weights import GUARD

KEYS = "REALIGN_SERVER_KEYS"
"""Environment variable with the API keys of servers: `host=key`, separated by commas. A key is sent to its host only,
so a config from another user cannot send it to a server."""

_CONNECT_S = 10.0
T = TypeVar("T")
# More than `guard.END_S`, so that the guard can end the server's group before it is killed itself.
_END_S = 15.0
_LAST_LINES = 12


class RequestInterrupted(Exception):
    """A call was ended by `Server.interrupt`."""


class Lost(Unavailable):
    """A call was ended since the server failed in another one."""


class Server:
    """A server. All methods are called in the event loop of the sampler."""

    def __init__(self, settings: ServerSettings, index: int, log: Path | None) -> None:
        """Describe a server; `connect` connects to it.

        Args:
            settings: settings of the sampler.
            index: index among the URLs, or among the servers to start.
            log: file for the output of a server that the run starts.
        """
        self._settings, self._index, self._log = settings, index, log
        self.url = settings.urls[index] if settings.urls else ""
        self.up = False
        """Whether the server has the current weights and takes requests."""
        self.tried = False
        """Whether an attempt to use the server has ended."""
        self.load = 0
        """Number of requests that wait for or use this server."""
        self.room = asyncio.Semaphore(settings.concurrency)
        self.failure = "not started"
        """Why the server does not work."""
        self.failed = asyncio.Event()
        """Set while the server is out of use."""
        self.checked_at = 0.0
        """Time at which the last successful check of its weights began."""
        self.check_lock = asyncio.Lock()
        self.facts: ServerFacts | None = None
        """What the server says about itself, once it was asked."""
        self.adapter: str | None = None
        """Name of the LoRA adapter that was loaded last."""
        self.has_base = False
        """Whether the server has the base model of the run's LoRA adapters."""
        self.asleep = False
        """Whether the server has freed its memory, and not allocated that of the weights again."""
        self.without_cache = False
        """Whether the server has freed its memory, and not allocated that of the KV cache again."""
        self.failures = 0
        """How often requests took the server out of use since one was completed."""
        self.sampled: Sampled | None = None
        """Response to the start of the probe under the current weights, until it is compared with the trainer."""
        self._process: _LaunchedServer | None = None
        self._starts = 0
        self._calls: set[asyncio.Task[Any]] = set()
        self.http: Any = None

    @property
    def launched(self) -> bool:
        """Whether the run starts this server."""
        return not self._settings.urls

    @property
    def ended(self) -> bool:
        """Whether the run started the server and it ended."""
        return self._process is not None and self._process.ended

    @property
    def optional(self) -> bool:
        """Whether the run may begin without this server: it is running elsewhere, and did not answer."""
        return self.tried and not self.launched

    def start(self, model: Path, rank: int | None) -> None:
        """Start the process, if the run starts this server and it is not running.

        Args:
            model: folder of the weights.
            rank: rank of the LoRA adapters that the server gets; None if it gets none.

        Raises:
            TransientError: the server ended too often.
            ConfigError: the command is invalid.
        """
        if not self.launched or (self._process is not None and not self._process.ended):
            return
        assert self._log is not None
        if self._starts > self._settings.restarts:
            assert self._process is not None
            raise TransientError(
                f"the server ended {self._starts} times, the last time {self._process.exit}. Its last output "
                f"({self._log}):\n{self._process.last_lines()}"
            )
        # Another process can take the port before the server does. The server then ends, and is started again.
        port = free_port()
        command = self._settings.command_line("launch", model, port, rank)
        self.url = f"http://127.0.0.1:{port}"
        self._process = _LaunchedServer(command, self._settings.server_variables(self._index), self._log)
        self._starts += 1
        # The port is another one now, and nothing that the last process said or had is true of this one.
        if self.http is not None:
            self.http.base_url = self.url
        self.facts = self.adapter = None
        self.has_base = rank is not None
        self.asleep = self.without_cache = False

    def connect(self) -> None:
        """Create the client, unless it exists."""
        if self.http is not None:
            return
        from httpx2 import AsyncClient, Limits, Timeout

        host = urlsplit(self.url).hostname or ""
        pairs = (pair.strip().partition("=") for pair in os.environ.get(KEYS, "").split(","))
        key = {name: value for name, equals, value in pairs if equals and value}.get(host)
        self.http = AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=Timeout(self._settings.request_timeout_s, connect=_CONNECT_S),
            # `room` limits the requests. Health checks and updates must not wait for a free connection.
            limits=Limits(max_connections=None),
            follow_redirects=False,
            trust_env=host not in LOCAL,  # no proxy for this machine
        )

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a call of the server; `fail` ends it.

        Raises:
            Unavailable: the server failed in this call.
            Lost: it failed in another one.
            RequestInterrupted: the call was interrupted.
        """
        # A task of its own, so that `fail` can cancel the call without canceling the request that waits for it.
        task = asyncio.ensure_future(coroutine)
        self._calls.add(task)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:  # of the caller: the request is not wanted any more
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            self._calls.discard(task)
        if task.cancelled():
            raise RequestInterrupted if self.up else Lost(self.failure)
        return task.result()

    def use(self) -> None:
        """Take the server into use."""
        self.up = True
        self.failed.clear()

    def fail(self, why: str) -> None:
        """Take the server out of use, and end its calls."""
        self.up, self.failure = False, why
        self.failed.set()
        for task in self._calls:
            task.cancel()

    def interrupt(self) -> None:
        """End all calls of a server that works."""
        for task in self._calls:
            task.cancel()

    async def close(self) -> None:
        """Disconnect, and end the process if the run started it."""
        self.up = False
        if self.http is not None:
            await self.http.aclose()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)


class _LaunchedServer:
    """A server process. It ends when this process ends, also by SIGKILL; see `guard`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start the command.

        Args:
            command: program and arguments.
            environment: further environment variables.
            log: file for its output.

        Raises:
            ConfigError: the program cannot be started.
        """
        self.log = log
        try:
            with open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, str(GUARD), *command],
                    # The guard ends the server at the end of this input, which also comes if this process is killed.
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                    # Ctrl-C in the terminal of the run must not reach it.
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"the server cannot be started: {error}") from error

    @property
    def ended(self) -> bool:
        """Whether the server ended."""
        return self._process.poll() is not None

    @property
    def exit(self) -> str:
        """How the server ended, for messages."""
        code = self._process.returncode
        return f"by signal {code - 128}" if code > 128 else f"with exit code {code}"

    def last_lines(self) -> str:
        """Return the last lines of its output."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(line[:300] for line in lines[-_LAST_LINES:])

    def stop(self) -> None:
        """End the server and all its processes, and wait until they ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def free_port() -> int:
    """Return a port of this machine that no process uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
