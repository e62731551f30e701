"""`ServerSampler`: a `Sampler` over inference servers.

Every sampled token has the version of the weights that sampled it:

- An update first stops all servers. They return the tokens that they have, and the sampler notes their version.
  Responses that are not finished continue under the new weights, as new requests with these tokens in their prompt.
- Weights have a label that contains the run and the version. After each answer, the sampler compares the server's label
  with that of the weights it sent. A server that restarted, or that another run updated, has another label: the tokens
  are discarded, and the server gets the weights again before it is used.

A server that fails costs its requests only: they start again on another server.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from realign.api.generation import GenerationConfig
from realign.api.requests import Completion, FutureHandle, Request
from realign.api.sample import SequenceSample
from realign.api.sampler import Capabilities, WeightSource, generate_by_requests
from realign.api.seeds import derive_seed
from realign.engines.servers.probe import Probe
from realign.engines.servers.protocol import Ask, End, Part, Refused, Unavailable
from realign.engines.servers.server import Interrupted, Server
from realign.engines.servers.settings import ServerSettings
from realign.engines.servers.weights import WeightFolders
from realign.errors import ConfigError, RealignError, TransientError

logger = logging.getLogger(__name__)

_HEALTH_S = 5.0
"""Seconds between two checks of a server."""
_UNHEALTHY = 3
"""Number of failed checks after which a server is taken out of use."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_CLOSE_S = 30.0
_DRAIN_S = 3.0
"""Seconds that the servers may take to return the tokens of their requests when they are stopped."""
_PREFIX = "realign-"

T = TypeVar("T")


@dataclass
class _Group:
    """The server of the responses to one prompt, which share its prefix cache."""

    server: Server
    requests: int = 0


@dataclass
class _Response:
    """The tokens of a response so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add(self, part: Part, version: int) -> None:
        """Append tokens."""
        self.ids += part.ids
        self.logprobs += part.logprobs
        self.versions += [version] * len(part.ids)


class ServerSampler:
    """Implements `realign.api.Sampler`. One thread runs an event loop with all requests."""

    def __init__(
        self,
        name: str,
        settings: ServerSettings,
        source: WeightSource,
        stop_ids: Sequence[int],
        probe_ids: Sequence[int] = (),
    ) -> None:
        """Start or connect to the servers, and send them the weights of `source` as version 0.

        Args:
            name: the role, for messages.
            settings: settings of the sampler.
            source: the weights.
            stop_ids: end tokens of the model.
            probe_ids: text by which the weights of servers and trainer are compared, if `source` can score it.

        Raises:
            ConfigError: a server cannot be started, or rejects the weights.
            TransientError: no server works within `start_timeout_s`.
        """
        self._name, self._settings, self._stop_ids = name, settings, tuple(stop_ids)
        self._protocol = settings.protocol()
        self._run = f"{_PREFIX}{uuid.uuid4().hex[:12]}"
        self._folders = WeightFolders(settings.weights_dir, untie=settings.untie)
        self._probe = Probe(probe_ids, settings.probe_tolerance)
        self._probe.expect(self._probe.measure(source))
        self._version = self._updates = 0
        self._folder = self._folders.write(source, 0)
        self._servers: list[Server] = []
        self._lost: set[Server] = set()  # servers that are not started again
        self._groups: dict[tuple[int, Any], _Group] = {}
        self._halted: set[str] = set()  # reasons for not sampling
        self._go = asyncio.Event()  # set if there are none
        self._go.set()
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._changed = asyncio.Condition()  # a server is in use, or all are lost
        self._weights_lock = asyncio.Lock()  # held while servers stop, load weights and continue
        self._none_since: float | None = time.monotonic()
        self._patience_s = settings.start_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._error: BaseException | None = None
        self._handles: set[FutureHandle] = set()
        self._lock = threading.Lock()  # guards `_closed`, `_error` and `_handles`
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"servers of {name}", daemon=True)
        self._thread.start()
        try:
            self._wait(self._open())
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return self._version

    def capabilities(self) -> Capabilities:
        """See `Sampler.capabilities`."""
        return self._settings.capabilities()

    def submit(self, request: Request) -> FutureHandle:
        """See `Sampler.submit`."""
        check_config(request.config)
        handle = FutureHandle(request)
        with self._lock:
            self._check_open()
            self._handles.add(handle)
        handle.future.add_done_callback(lambda future: self._forget(handle))
        self._loop.call_soon_threadsafe(self._begin, handle)
        return handle

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `Sampler.generate`."""
        return generate_by_requests(self.submit, data, config, seed=seed)

    def update(self, source: WeightSource, version: int) -> None:
        """See `Sampler.update`. The servers sample while the weights are written."""
        with self._lock:
            self._check_open()
        folder = self._folders.write(source, self._updates + 1)
        self._wait(self._update(folder, version, self._probe.measure(source)))
        self._folders.keep_only(folder)

    def pause(self) -> None:
        """See `Sampler.pause`."""
        self._wait(self._halt("paused"))

    def resume(self) -> None:
        """See `Sampler.resume`."""
        self._wait(self._continue("paused"))

    def sleep(self) -> None:
        """See `Sampler.sleep`. The servers keep their memory."""
        self._wait(self._halt("asleep"))

    def wake(self) -> None:
        """See `Sampler.wake`."""
        self._wait(self._continue("asleep"))

    def close(self) -> None:
        """See `Sampler.close`; ends the servers that the run started."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            handles = list(self._handles)
        for handle in handles:
            _fail(handle, RuntimeError(f"the sampler of models.{self._name} is closed"))
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)
            if not self._thread.is_alive():
                self._loop.close()
            self._folders.remove()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and wait for it."""
        with self._lock:
            try:
                self._check_open()
            except BaseException:
                coroutine.close()
                raise
            future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError(f"the sampler of models.{self._name} is closed")

    def _forget(self, handle: FutureHandle) -> None:
        with self._lock:
            self._handles.discard(handle)

    # All methods below run in the event loop.

    async def _open(self) -> None:
        """Create the servers. Wait until all that the run starts work, and at least one of the URLs."""
        count = len(self._settings.urls) or self._settings.servers
        logs = self._folders.root
        self._servers = [Server(self._settings, i, logs / f"server_{i}.log") for i in range(count)]
        self._tasks |= {asyncio.ensure_future(self._keep(server)) for server in self._servers}
        self._tasks.add(asyncio.ensure_future(self._watch()))
        await self._any_up(lambda: all(s.up or s in self._lost or s.optional for s in self._servers))
        self._patience_s = self._settings.patience_s

    def _begin(self, handle: FutureHandle) -> None:
        """Start the task of a request."""
        if handle.future.done():
            return
        task = asyncio.ensure_future(self._complete(handle))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        handle.future.add_done_callback(lambda future: self._loop.call_soon_threadsafe(task.cancel))

    async def _complete(self, handle: FutureHandle) -> None:
        """Sample the response of a handle, and complete the handle."""
        try:
            completion = await self._sampled(handle.request)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            _fail(handle, error)
            return
        if handle.future.set_running_or_notify_cancel():
            handle.future.set_result(completion)

    async def _sampled(self, request: Request) -> Completion:
        """Sample a response, in several parts if the servers are stopped meanwhile."""
        config, prompt = request.config, request.prompt_ids.tolist()
        stop_ids = self._stop_ids if config.stop_token_ids is None else tuple(config.stop_token_ids)
        key = (request.seed, request.id)
        found = _Response()
        end = End.aborted
        while end is End.aborted:
            if config.stop_strings:  # one may begin in an earlier part, where the server would not find it
                found = _Response()
            done = len(found.ids)
            rest = replace(
                config,
                max_new_tokens=config.max_new_tokens - done,
                min_new_tokens=max(0, config.min_new_tokens - done),
            )
            seed = request.response_seed if not done else derive_seed(request.response_seed, "part", done)
            part, version = await self._part(key, Ask([*prompt, *found.ids], rest, stop_ids, seed))
            found.add(part, version)
            end = part.end
            if end is End.aborted and len(found.ids) == config.max_new_tokens:
                end = End.length
        device = request.prompt_ids.device
        return Completion(
            torch.tensor(found.ids, dtype=torch.int64, device=device),
            torch.tensor(found.logprobs, dtype=torch.float32, device=device),
            torch.tensor(found.versions, dtype=torch.int32, device=device),
            truncated=end is End.length and not config.fixed_length,
        )

    async def _part(self, key: tuple[int, Any], ask: Ask) -> tuple[Part, int]:
        """Send a request until a server with the current weights has answered it."""
        while True:
            await self._go.wait()
            group = await self._group(key)
            server = group.server
            group.requests += 1
            server.load += 1
            try:
                async with server.room:
                    if not self._go.is_set() or not server.up:
                        continue
                    self._count(1)
                    try:
                        return await self._ask(server, ask), self._version
                    finally:
                        self._count(-1)
            except Interrupted:
                pass  # the request begins again
            except Unavailable as error:
                self._fail(server, str(error))
            except Refused as error:
                raise ValueError(
                    f"models.{self._name}.sampler: {self._protocol.title} at {server.url}: {error}"
                ) from error
            finally:
                server.load -= 1
                group.requests -= 1
                if not group.requests and self._groups.get(key) is group:
                    del self._groups[key]

    async def _ask(self, server: Server, ask: Ask) -> Part:
        """Send one request, and check that the server used the current weights.

        Raises:
            Unavailable: the server failed, or has other weights.
            Refused: the server rejects the request.
        """
        part = await server.call(self._protocol.sample(server.http, ask))
        if part.end is End.aborted and self._go.is_set():
            raise Unavailable("it aborted a request although it was not stopped")
        if part.label is not None:
            self._check_label(server, part.label)
            return part
        ended = time.monotonic()
        async with server.check_lock:  # one check is valid for all answers before it
            if server.checked_at <= ended:
                began = time.monotonic()
                self._check_label(server, await server.call(self._protocol.label(server.http)))
                server.checked_at = began
        return part

    def _check_label(self, server: Server, label: str | None) -> None:
        if label == self._label():
            return
        if label is not None and label.startswith(_PREFIX) and not label.startswith(self._run):
            raise ConfigError(
                f"models.{self._name}.sampler: the server at {server.url} got weights from another run. Give each run "
                "its own servers."
            )
        raise Unavailable(f"it has other weights ({label!r}), so it was restarted")

    def _label(self) -> str:
        """Return the label of the current weights. Two updates with the same version have different labels."""
        return f"{self._run}-{self._updates}"

    def _count(self, change: int) -> None:
        """Count the requests that servers are working on."""
        self._active += change
        if self._active:
            self._idle.clear()
        else:
            self._idle.set()

    async def _group(self, key: tuple[int, Any]) -> _Group:
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

    async def _update(self, folder: Path, version: int, probed: list[float]) -> None:
        """Give all servers new weights. Servers that fail get them later, before they are used again."""
        await self._halt("update")
        try:
            async with self._weights_lock:
                self._version, self._folder = version, folder
                self._updates += 1
                self._probe.expect(probed)
                ready = [server for server in self._servers if server.up]
                await asyncio.gather(*map(self._load, ready))
            await self._any_up()
        except Exception as error:  # no token may be sampled with wrong weights
            await self._give_up(error)
            raise
        await self._continue("update")

    async def _load(self, server: Server) -> None:
        """Send the current weights to a server that is stopped."""
        try:
            loading = self._protocol.load(server.http, self._folder, self._label())
            await asyncio.wait_for(server.call(loading), self._settings.update_timeout_s)
            self._check_label(server, await server.call(self._protocol.label(server.http)))
            server.checked_at = time.monotonic()
            if self._probe.active:
                await asyncio.wait_for(self._compare(server), self._settings.update_timeout_s)
        except (Unavailable, Refused, TimeoutError) as error:
            self._fail(server, f"loading weights failed: {_reason(error)}")

    async def _compare(self, server: Server) -> None:
        """Compare the weights of a server that is stopped with those of the trainer."""
        await server.call(self._protocol.start(server.http))
        found = await server.call(self._protocol.score(server.http, self._probe.ids))
        await server.call(self._protocol.stop(server.http))
        where = f"models.{self._name}.sampler: the server at {server.url}"
        gap = self._probe.check(found, first=not self._updates, where=where)
        if not self._updates:
            logger.info("%s: its log-probs differ from those of the trainer by %.2g nats on average", where, gap)

    async def _halt(self, reason: str) -> None:
        """Stop sampling for a reason, and return when no token is being sampled."""
        self._halted.add(reason)
        self._go.clear()
        async with self._weights_lock:
            await asyncio.gather(*(self._stop(server) for server in self._servers if server.up))
            try:
                await asyncio.wait_for(self._idle.wait(), _DRAIN_S)
            except TimeoutError:  # requests that reached the server after it was stopped wait until it continues
                for server in self._servers:
                    server.interrupt()
                await self._idle.wait()

    async def _stop(self, server: Server) -> None:
        try:
            await asyncio.wait_for(server.call(self._protocol.stop(server.http)), self._settings.update_timeout_s)
        except (Unavailable, Refused, TimeoutError) as error:
            self._fail(server, f"stopping failed: {_reason(error)}")

    async def _continue(self, reason: str) -> None:
        """End a reason for not sampling, and continue if there is no other one."""
        if reason not in self._halted:
            return
        async with self._weights_lock:
            self._halted.discard(reason)
            if self._halted:
                return
            await asyncio.gather(*(self._start(server) for server in self._servers if server.up))
            self._go.set()

    async def _start(self, server: Server) -> None:
        try:
            await asyncio.wait_for(server.call(self._protocol.start(server.http)), self._settings.update_timeout_s)
        except (Unavailable, Refused, TimeoutError) as error:
            self._fail(server, f"continuing failed: {_reason(error)}")

    def _fail(self, server: Server, why: str) -> None:
        """Take a server out of use until `_keep` has given it the weights again."""
        if server.up:
            logger.warning("models.%s.sampler: the server at %s is out of use: %s", self._name, server.url, why)
        server.fail(why)
        if not any(s.up for s in self._servers) and self._none_since is None:
            self._none_since = time.monotonic()

    async def _keep(self, server: Server) -> None:
        """Watch a server: start it, give it the weights when it answers, and notice when it fails."""
        try:
            while True:
                pause_s = _FIRST_PAUSE_S
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
                await self._give_up(error)
        except BaseException as error:
            await self._give_up(error)

    async def _recover(self, server: Server) -> None:
        """Make one attempt to bring a server into use."""
        server.start(self._folder)
        server.connect()
        try:
            await asyncio.wait_for(self._protocol.check_health(server.http), _LONGEST_PAUSE_S)
            async with self._weights_lock:
                server.failure = ""
                await self._stop(server)
                if not server.failure:
                    await self._load(server)
                if not server.failure and not self._halted:
                    await self._start(server)
                if not server.failure:
                    server.use()
                    self._none_since = None
        except (Unavailable, Refused, TimeoutError) as error:
            server.failure = _reason(error)
        if server.up:
            logger.info("models.%s.sampler: the server at %s is in use", self._name, server.url)
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
                await asyncio.wait_for(server.failed.wait(), _HEALTH_S)
                return
            try:
                await asyncio.wait_for(self._protocol.check_health(server.http), _LONGEST_PAUSE_S)
                failed = 0
            except (Unavailable, Refused, TimeoutError) as error:
                failed += 1
                if server.ended or failed == _UNHEALTHY:
                    self._fail(server, f"it does not answer: {_reason(error)}")

    async def _watch(self) -> None:
        """End the run if no server works for too long."""
        while True:
            await asyncio.sleep(_FIRST_PAUSE_S)
            if self._none_since is not None and time.monotonic() - self._none_since > self._patience_s:
                reasons = "; ".join(f"{server.url}: {server.failure}" for server in self._servers)
                await self._give_up(
                    TransientError(
                        f"models.{self._name}.sampler: no server worked for {self._patience_s:g} seconds ({reasons})."
                    )
                )
                return

    async def _give_up(self, error: BaseException) -> None:
        """Fail all requests, and every later call."""
        if isinstance(error, RealignError) and not str(error).startswith("models."):
            error = type(error)(f"models.{self._name}.sampler: {error}")
        with self._lock:
            self._error = self._error or error
            handles = list(self._handles)
        for handle in handles:
            _fail(handle, self._error)
        await self._notify()

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(server.close() for server in self._servers), return_exceptions=True)


def check_config(config: GenerationConfig) -> None:
    """Check that servers can serve a request.

    Raises:
        ValueError: they cannot.
    """
    if config.greedy and config.temperature != 1:
        raise ValueError(
            f"generation.temperature={config.temperature:g}: with greedy=true, servers report log-probs at temperature "
            "1. Set temperature=1."
        )
    if config.stop_strings and config.fixed_length:
        raise ConfigError(
            f"generation.stop_strings={config.stop_strings}: incompatible with fixed_length. Remove one of the two."
        )


def _fail(handle: FutureHandle, error: BaseException) -> None:
    """Complete a handle with an error, unless it is complete."""
    if not handle.future.done() and handle.future.set_running_or_notify_cancel():
        handle.future.set_exception(error)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
