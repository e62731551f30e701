"""`ServerPool`: which servers are in use, and which of them gets a request."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from realign.errors import RealignError, SettingsError, TransientError
from realign.samplers.servers.delivery import Delivery, reason_of
from realign.samplers.servers.inference_server import Lost, RequestInterrupted, Server
from realign.samplers.servers.probe import Sampled
from realign.samplers.servers.protocol import Ask, End, Refused, ResponsePart, Unavailable
from realign.samplers.servers.server_settings import ServerSettings
from realign.samplers.servers.weights import Weights

logger = logging.getLogger(__name__)

_HEALTH_S = 5.0
"""Seconds between two checks of a server."""
_UNHEALTHY = 3
"""Number of failed checks after which a server is taken out of use."""
# Between two attempts to bring a server into use; the pause doubles after each.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_LONGEST_BACKOFF_S = 60.0
"""Longest pause of a request that failed, and of a server whose requests failed, before it gets the weights again."""
_FAILURES = 3
"""Number of failures without a completed request after which `patience_s` may end the run."""
_ATTEMPTS = 5
"""How often a request may fail, while others are completed, until it is given up."""
_ASLEEP = "asleep"
_DRAIN_S = 3.0
"""Seconds that the servers may take to return the tokens of their requests when they are stopped."""


@dataclass
class _Group:
    """The server of the responses to one prompt, which share its prefix cache."""

    server: Server
    requests: int = 0


class ServerPool:
    """Keeps servers in use: starts them, gives them the weights, watches them, and replaces those that fail.

    All methods are called in one event loop. A server that fails costs its requests only: they start again on another.
    """

    def __init__(
        self,
        name: str,
        settings: ServerSettings,
        delivery: Delivery,
        logs: Path,
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Describe the servers; `open` starts them.

        Args:
            name: the setting of the sampler, for messages.
            settings: settings of the sampler.
            delivery: the weights.
            logs: folder for the output of servers that the run starts.
            on_error: called once with the error after which no server can be used.
        """
        self._name, self._settings, self._delivery, self._on_error = name, settings, delivery, on_error
        self._protocol = settings.protocol()
        count = len(settings.urls) or settings.servers
        self._servers = [Server(settings, i, logs / f"server_{i}.log") for i in range(count)]
        self._lost: set[Server] = set()  # servers that are not started again
        self._groups: dict[Any, _Group] = {}
        self._halted: set[str] = set()  # reasons for not sampling
        self._asleep = False  # servers have freed their memory
        self._go = asyncio.Event()  # set if there are none
        self._go.set()
        self._active = 0  # requests that servers are working on
        self._idle = asyncio.Event()
        self._idle.set()
        self._changed = asyncio.Condition()  # a server is in use, or none will be
        self._weights_lock = asyncio.Lock()  # held while servers stop, load weights and continue
        self._none_since: float | None = time.monotonic()
        self._completed = 0  # requests
        self._failures = 0  # how often requests took servers out of use since one was completed
        self._failing_since = 0.0  # time of the first of these
        self._patience_s = settings.start_timeout_s
        self._tasks: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None

    async def open(self) -> None:
        """Wait until all servers that the run starts work, and at least one of the URLs.

        Raises:
            TransientError: none works within `start_timeout_s`.
            ConfigError: a server cannot be started, or rejects the weights.
        """
        self._tasks = [asyncio.ensure_future(self._keep(server)) for server in self._servers]
        self._tasks.append(asyncio.ensure_future(self._watch()))
        await self._any_up(lambda: all(s.up or s in self._lost or s.optional for s in self._servers))
        # Until now `start_timeout_s` applied: a server that loads a large model for the first time isn't failing.
        self._patience_s = self._settings.patience_s

    async def close(self) -> None:
        """End the servers that the run started, and disconnect from the others."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(server.close() for server in self._servers), return_exceptions=True)

    async def part(self, key: tuple[int, Hashable], ask: Ask) -> tuple[ResponsePart, int]:
        """Send a request until a server has answered it with the current weights, and return their version too.

        Args:
            key: seed and id of the prompt. Requests with the same key use the same server.
            ask: the request.

        Raises:
            SettingsError: the server rejects the request.
            TransientError: the request failed again and again, while others were completed.
        """
        attempts = 0  # that failed
        counted, completed = 0, -1  # those after which others were completed, and completed requests at the last one
        while True:
            if attempts:  # others come first: this request may be what makes servers fail
                await self._any_up()
                # By chance a little shorter, so that requests that failed together don't come back together.
                await asyncio.sleep(_backoff_s(attempts) * random.uniform(0.5, 1.0))
            await self._go.wait()
            group = await self._group(key)
            server = group.server
            group.requests += 1
            server.load += 1
            try:
                async with server.room:
                    # Waiting for room can take long: meanwhile sampling was stopped, or the server failed.
                    if not self._go.is_set() or not server.up:
                        continue
                    self._count(1)
                    try:
                        part = await self._ask(server, ask)
                    finally:
                        self._count(-1)
                    self._completed += 1
                    self._failures = server.failures = 0
                    # No `await` since the answer was checked, so `update` can't have replaced the weights: it waits for
                    # `_idle`.
                    return part, self._delivery.version
            except (RequestInterrupted, Lost):
                pass  # the request begins again
            except Unavailable as error:
                await self._fail_request(server, str(error))
                attempts += 1
                if self._completed > completed:  # otherwise, the request may not be at fault, and `patience_s` applies
                    counted, completed = counted + 1, self._completed
                if counted == _ATTEMPTS:
                    raise TransientError(
                        f"{self._name}: a request for prompt {key[1]!r} failed {attempts} times, while others were "
                        f"completed. The last time, at {server.url}: {error}"
                    ) from error
            except Refused as error:
                raise SettingsError(
                    f"{self._name}: {self._protocol.title} at {server.url} rejects a request: {error}"
                ) from error
            finally:
                server.load -= 1
                group.requests -= 1
                if not group.requests and self._groups.get(key) is group:
                    del self._groups[key]

    def dtypes(self) -> set[str]:
        """Return the dtypes in which servers compute, as far as they are known."""
        return {server.facts.dtype for server in self._servers if server.facts is not None and server.facts.dtype}

    def take_uncompared(self) -> list[Sampled]:
        """Return the responses under the current weights that were not compared with the trainer yet."""
        return [sampled for server in self._servers if (sampled := self._delivery.take_sampled(server)) is not None]

    async def update(self, weights: Weights, version: int, probed: list[float]) -> None:
        """Give all servers other weights. Servers that fail get them later, before they are used again.

        Args: see `Delivery.replace`.
        """
        await self.halt("update")
        try:
            async with self._weights_lock:
                self._delivery.replace(weights, version, probed)
                if not self._asleep:  # otherwise they get the weights when they wake
                    await self._each_up(self._delivery.send)
            await self._any_up()
        except Exception as error:  # no token may be sampled with wrong weights
            await self.give_up(error)
            raise
        await self.proceed("update")

    async def halt(self, reason: str) -> None:
        """Stop sampling for a reason, and return when no token is being sampled."""
        # Before the lock, so that no further request begins while this waits for it.
        self._halted.add(reason)
        self._go.clear()
        async with self._weights_lock:
            if not self._asleep:
                await self._each_up(self._delivery.stop)
            try:
                async with asyncio.timeout(_DRAIN_S):
                    await self._idle.wait()
            except TimeoutError:  # requests that reached the server after it was stopped wait until it continues
                for server in self._servers:
                    server.interrupt()
                await self._idle.wait()

    async def proceed(self, reason: str) -> None:
        """End a reason for not sampling, and continue if there is no other one."""
        if reason not in self._halted:
            return
        async with self._weights_lock:
            self._halted.discard(reason)
            if self._halted:
                return
            await self._each_up(self._delivery.start)
            self._go.set()

    async def sleep(self) -> None:
        """Stop sampling, and let the servers free their memory if the settings say so."""
        await self.halt(_ASLEEP)
        async with self._weights_lock:
            self._asleep = self._settings.sleep_level > 0
            if self._asleep:
                await self._each_up(self._delivery.sleep)

    async def wake(self) -> None:
        """End `sleep`: the servers get the current weights unless they have them."""
        async with self._weights_lock:
            if self._asleep:
                self._asleep = False
                await self._each_up(self._delivery.wake)
        await self.proceed(_ASLEEP)

    async def _each_up(self, call: Callable[[Server], Any]) -> None:
        """Make a call of each server in use. Those that fail are taken out of use."""

        async def attempt(server: Server) -> None:
            try:
                await call(server)
            except Unavailable as error:
                self._fail(server, str(error))

        await asyncio.gather(*(attempt(server) for server in self._servers if server.up))

    async def _ask(self, server: Server, ask: Ask) -> ResponsePart:
        """Send one request, and check that the server used the current weights."""
        ask = replace(ask, words=self._delivery.words, adapter=self._delivery.adapter)
        try:
            part = await server.call(self._protocol.sample(server.http, ask))
        except Refused:
            await self._delivery.check_rejection(server)
            raise
        if part.end is End.aborted and self._go.is_set():
            raise Unavailable("it aborted a request although it was not stopped")
        await self._delivery.check(server, part)
        return part

    def _count(self, change: int) -> None:
        self._active += change
        if self._active:
            self._idle.clear()
        else:
            self._idle.set()

    async def _group(self, key: Any) -> _Group:
        """Return the server of a prompt: the one of its other responses, or the one with the fewest requests."""
        group = self._groups.get(key)
        if group is not None and group.server.up:
            return group
        await self._any_up()
        group = self._groups.get(key)  # another response may have chosen meanwhile
        if group is None or not group.server.up:
            ready = [server for server in self._servers if server.up]
            group = self._groups[key] = _Group(min(ready, key=lambda server: server.load))
        return group

    async def _any_up(self, further: Callable[[], bool] = lambda: True) -> None:
        """Wait until a server is in use, and a further condition is true.

        Raises:
            BaseException: the error after which none will be.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._error is not None or (any(s.up for s in self._servers) and further())
            )
        if self._error is not None:
            raise self._error

    def _fail(self, server: Server, why: str) -> None:
        """Take a server out of use until `_keep` has given it the weights again."""
        if server.up:
            logger.warning("%s: the server at %s is out of use: %s", self._name, server.url, why)
        server.fail(why)
        if not any(s.up for s in self._servers) and self._none_since is None:
            self._none_since = time.monotonic()

    async def _fail_request(self, server: Server, why: str) -> None:
        """Take a server out of use since a request failed, and end the run if all fail for too long.

        A server can answer all other calls and fail each request, so that it is used again and again.
        """
        if not server.up:  # another request has
            return
        self._fail(server, why)
        server.failures += 1
        if not self._failures:
            self._failing_since = time.monotonic()
        self._failures += 1
        failing_s = time.monotonic() - self._failing_since
        if self._failures >= _FAILURES and failing_s > self._patience_s:
            await self.give_up(
                TransientError(
                    f"no server completed a request for {failing_s:.0f} seconds, in which {self._failures} failed "
                    f"(patience_s={self._patience_s:g}; {self._reasons()})."
                )
            )

    def _reasons(self) -> str:
        return "; ".join(f"{server.url}: {server.failure}" for server in self._servers)

    async def _keep(self, server: Server) -> None:
        """Watch a server: start it, give it the weights when it answers, and notice when it fails."""
        try:
            while True:
                pause_s = _FIRST_PAUSE_S
                if server.failures:  # give it the weights less and less often
                    await asyncio.sleep(_backoff_s(server.failures))
                while not server.up:
                    await self._recover(server)
                    if not server.up:
                        await asyncio.sleep(pause_s)
                        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                await self._watch_health(server)
        except asyncio.CancelledError:
            raise
        except TransientError as error:
            server.failure = str(error)
            self._lost.add(server)
            await self._notify()
            if len(self._lost) == len(self._servers):
                await self.give_up(error)
        except BaseException as error:
            await self.give_up(error)

    async def _recover(self, server: Server) -> None:
        """Make one attempt to bring a server into use."""
        server.start(self._delivery.start_folder, self._delivery.rank)
        server.connect()
        try:
            async with asyncio.timeout(_LONGEST_PAUSE_S):
                await self._protocol.check_health(server.http)
            # Under the lock up to `use`: an update between them would not reach this server, which isn't in use yet.
            async with self._weights_lock:
                if server.asleep or server.without_cache:
                    await self._delivery.wake(server)
                else:
                    await self._delivery.stop(server)
                    await self._delivery.send(server)
                # The other servers sleep, since the trainer needs their memory.
                if self._asleep:
                    await self._delivery.sleep(server)
                if not self._halted:
                    await self._delivery.start(server)
                server.use()
                self._none_since = None
        except (Unavailable, Refused, TimeoutError) as error:
            server.fail(reason_of(error))
        if server.up:
            logger.info("%s: the server at %s is in use", self._name, server.url)
        server.tried = True
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _watch_health(self, server: Server) -> None:
        """Return when a server is out of use."""
        failed = 0
        while server.up:
            with suppress(TimeoutError):
                async with asyncio.timeout(_HEALTH_S):
                    await server.failed.wait()
                return
            try:
                async with asyncio.timeout(_LONGEST_PAUSE_S):
                    await self._protocol.check_health(server.http)
                failed = 0
            except (Unavailable, Refused, TimeoutError) as error:
                failed += 1
                if server.ended or failed == _UNHEALTHY:
                    self._fail(server, f"it does not answer: {reason_of(error)}")

    async def _watch(self) -> None:
        """End the run if no server works for too long."""
        while True:
            await asyncio.sleep(_FIRST_PAUSE_S)
            if self._none_since is not None and time.monotonic() - self._none_since > self._patience_s:
                why = f"no server worked for {self._patience_s:g} seconds ({self._reasons()})."
                await self.give_up(TransientError(why))
                return

    async def give_up(self, error: BaseException) -> None:
        """Fail every later call."""
        if self._error is None:
            if isinstance(error, RealignError) and not str(error).startswith("models."):
                error = type(error)(f"{self._name}: {error}")
            self._error = error
            self._on_error(error)
        await self._notify()


def _backoff_s(failures: int) -> float:
    # The exponent has a limit too: 2.0**1024 raises an OverflowError.
    return min(_FIRST_PAUSE_S * 2.0 ** min(failures, 10), _LONGEST_BACKOFF_S)
