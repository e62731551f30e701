"""`Delivery`: the weights that all servers must sample with, and how a server gets them.

Weights have a label that contains the run and the number of the update. After each answer, the server's label is
compared with that of the weights it was sent. A server that restarted, or that another run updated, has another label:
its tokens are discarded, and it gets the weights again before it is used.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from realign.engines.servers.probe import Probe
from realign.engines.servers.protocol import Part, Refused, ServerProtocol, Unavailable
from realign.engines.servers.server import Server
from realign.errors import ConfigError

logger = logging.getLogger(__name__)

_PREFIX = "realign-"


class Delivery:
    """Sends the current weights to servers. All methods but `replace` are called in the event loop of the sampler."""

    def __init__(self, name: str, protocol: ServerProtocol, probe: Probe, timeout_s: float, folder: Path) -> None:
        """Use the weights of `folder` as version 0.

        Args:
            name: the setting of the sampler, for messages.
            protocol: calls of the servers.
            probe: compares log-probs of servers and trainer.
            timeout_s: seconds that a call other than sampling may take.
            folder: the weights.
        """
        self._name, self._protocol, self._probe, self._timeout_s = name, protocol, probe, timeout_s
        self._run = f"{_PREFIX}{uuid.uuid4().hex[:12]}"
        self._updates = 0
        self.version = 0
        self.folder = folder

    @property
    def label(self) -> str:
        """The label of the current weights. Two updates with the same version have different labels."""
        return f"{self._run}-{self._updates}"

    def replace(self, folder: Path, version: int, probed: list[float]) -> None:
        """Use other weights from now on.

        Args:
            folder: the weights.
            version: their version.
            probed: see `Probe.expect`.
        """
        self.folder, self.version = folder, version
        self._updates += 1
        self._probe.expect(probed)

    async def send(self, server: Server) -> None:
        """Send the current weights to a server that is stopped, and check that it uses them.

        Raises:
            Unavailable: the server failed.
            ConfigError: the server computes other log-probs than the trainer.
        """
        await self._call("loading weights", self._load(server))
        server.checked_at = time.monotonic()
        if self._probe.active:
            await self._call("comparing weights", self._score(server))

    async def check(self, server: Server, part: Part) -> None:
        """Check that a server sampled with the current weights.

        Raises:
            Unavailable: it did not.
            ConfigError: another run sent it weights.
        """
        if part.label is not None:
            self._compare(server, part.label)
            return
        ended = time.monotonic()
        async with server.check_lock:  # one check is valid for all answers before it
            if server.checked_at <= ended:
                began = time.monotonic()
                self._compare(server, await server.call(self._protocol.label(server.http)))
                server.checked_at = began

    async def stop(self, server: Server) -> None:
        """Let a server return the tokens of its requests, and hold later requests.

        Raises:
            Unavailable: the server failed.
        """
        await self._call("stopping", server.call(self._protocol.stop(server.http)))

    async def start(self, server: Server) -> None:
        """Let a server that is stopped continue.

        Raises:
            Unavailable: the server failed.
        """
        await self._call("continuing", server.call(self._protocol.start(server.http)))

    async def _call(self, what: str, call: Coroutine[Any, Any, None]) -> None:
        """Make a call within the time limit."""
        try:
            await asyncio.wait_for(call, self._timeout_s)
        except (Unavailable, Refused, TimeoutError) as error:
            raise Unavailable(f"{what} failed: {reason_of(error)}") from error

    async def _load(self, server: Server) -> None:
        """Let a server load the current weights."""
        await server.call(self._protocol.load(server.http, self.folder, self.label))
        self._compare(server, await server.call(self._protocol.label(server.http)))

    def _compare(self, server: Server, label: str | None) -> None:
        """Compare the label of a server with that of the current weights."""
        if label == self.label:
            return
        if label is not None and label.startswith(_PREFIX) and not label.startswith(self._run):
            raise ConfigError(
                f"{self._name}: the server at {server.url} got weights from another run. Give each run its own servers."
            )
        raise Unavailable(f"it has other weights ({label!r}), so it was restarted")

    async def _score(self, server: Server) -> None:
        """Compare the log-probs of a server that is stopped with those of the trainer."""
        await server.call(self._protocol.start(server.http))
        found = await server.call(self._protocol.score(server.http, self._probe.ids))
        await server.call(self._protocol.stop(server.http))
        where = f"{self._name}: the server at {server.url}"
        gap = self._probe.check(found, first=not self._updates, where=where)
        if not self._updates:
            logger.info("%s: its log-probs differ from those of the trainer by %.2g nats on average", where, gap)


def reason_of(error: BaseException) -> str:
    """Return the text of an error, or its type if it has none."""
    return str(error) or type(error).__name__
