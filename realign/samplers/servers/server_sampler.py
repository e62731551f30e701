"""Samplers over inference servers: of one process, of several ranks, and `Servers`, the config node that opens them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from typing_extensions import override

from realign.api.engine import EngineCapabilities
from realign.api.generation import GenerationConfig
from realign.api.sample import SequenceSample
from realign.api.sampler import (
    PROMPTS,
    Capabilities,
    Completion,
    FutureHandle,
    Handle,
    Request,
    Sampler,
    WeightSource,
    generate_by_requests,
)
from realign.api.sampling_mask import SamplingMask
from realign.api.seeds import derive_seed
from realign.errors import ConfigError, TransientError
from realign.ranks import Ranks, current
from realign.samplers.servers.delivery import BaseModel, Delivery
from realign.samplers.servers.pool import ServerPool
from realign.samplers.servers.probe import Probe, Sampled
from realign.samplers.servers.protocol import Ask, End, ResponsePart
from realign.samplers.servers.server_settings import LoraTransport, ServerSettings, Updates
from realign.samplers.servers.weights import BASE, HasAdapter, WeightFolders, Weights

_CLOSE_S = 30.0
T = TypeVar("T")

_PROBE_TOKENS = 48
"""Length of the text by which weights are compared: tokens spread over the vocabulary."""
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}
"""Names of dtypes in the settings of servers."""


@dataclass
class _Response:
    """The tokens of a response so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)

    def add(self, part: ResponsePart, version: int) -> None:
        """Append tokens."""
        self.ids += part.ids
        self.logprobs += part.logprobs
        self.versions += [version] * len(part.ids)
        self.kept += part.kept


class _ServerSampler:
    """Implements `realign.api.Sampler`. One thread runs an event loop with all requests."""

    def __init__(
        self,
        name: str,
        settings: ServerSettings,
        source: WeightSource,
        stop_ids: Sequence[int],
        folders: WeightFolders,
        probe: Probe,
        *,
        alone: bool = True,
    ) -> None:
        """Start or connect to the servers, and send them the weights of `source` as version 0.

        Args:
            name: the role, for messages.
            settings: settings of the sampler.
            source: the weights.
            stop_ids: end tokens of the model.
            folders: writes the weights.
            probe: compares the weights of servers and trainer, if `source` can score its text.
            alone: compare the responses of `take_uncompared` with the trainer. Several ranks do this together.

        Raises:
            ConfigError: a server cannot be started, or rejects the weights.
            TransientError: no server works within `start_timeout_s`.
        """
        self._settings, self._stop_ids = settings, tuple(stop_ids)
        self._source, self._alone = source, alone
        self._setting = f"models.{name}.sampler"
        self._folders, self._probe = folders, probe
        self._folders.dtype = _DTYPES.get(settings.launch_dtype() or "")
        self._updates = 0
        rank = _check_adapter(self._setting, settings, source)
        base = None if rank is None else BaseModel(folders.root / BASE, rank)
        weights, probed = _write_update(settings, source, folders, probe, 0)
        probe.expect(probed)
        self._delivery = Delivery(self._setting, settings, probe, weights, base)
        self._pool = ServerPool(self._setting, settings, self._delivery, self._folders.root, self._end)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._error: BaseException | None = None
        self._handles: set[FutureHandle] = set()
        self._lock = threading.Lock()  # guards `_closed`, `_error` and `_handles`
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"servers of {name}", daemon=True)
        self._thread.start()
        try:
            self._wait(self._pool.open())
            self._check_sampled()
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return self._delivery.version

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
        """See `Sampler.update`. The servers sample while the weights are written.

        If no server is left, or there is no space for the weights, the next call that samples says so: the step that
        trained the weights is complete, and must not fail.
        """
        with self._lock:
            if self._error is not None:
                return
            self._check_open()
        self._updates += 1
        self._learn_dtype()
        try:
            weights, probed = _write_update(self._settings, source, self._folders, self._probe, self._updates)
        except TransientError as error:
            self._wait(self._pool.give_up(error))
            return
        self._source = source
        try:
            self._wait(self._pool.update(weights, version, probed))
        except Exception:
            if self._error is None:
                raise
            return
        self._folders.keep_only(weights.folder)
        self._check_sampled()

    def pause(self) -> None:
        """See `Sampler.pause`."""
        self._wait(self._pool.halt("paused"))

    def resume(self) -> None:
        """See `Sampler.resume`."""
        self._wait(self._pool.proceed("paused"))

    def sleep(self) -> None:
        """See `Sampler.sleep`. `ServerSettings.sleep_level` tells which memory the servers free."""
        self._wait(self._pool.sleep())

    def wake(self) -> None:
        """See `Sampler.wake`."""
        self._wait(self._pool.wake())
        self._check_sampled()

    def take_uncompared(self) -> list[Sampled]:
        """Return the responses by which servers are compared with the trainer, each once; see `Probe`."""
        if self._error is not None:  # the next call that samples raises it
            return []

        async def take() -> list[Sampled]:
            return self._pool.take_uncompared()

        return self._wait(take())

    def _check_sampled(self) -> None:
        """Compare responses of servers with the trainer, whose weights they have now."""
        if self._alone:
            self._probe.check_sampled(self._source, self.take_uncompared())

    def close(self) -> None:
        """See `Sampler.close`; ends the servers that the run started."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            handles = list(self._handles)
        for handle in handles:
            _fail(handle, self._closed_error())
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)
            if not self._thread.is_alive():
                self._loop.close()
            self._folders.remove()

    def _learn_dtype(self) -> None:
        """Send weights in the dtype in which all servers compute, or else in that of the trainer."""

        async def dtypes() -> set[str]:
            return self._pool.dtypes()

        if names := self._wait(dtypes()):
            self._folders.dtype = _DTYPES.get(names.pop()) if len(names) == 1 else None

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and wait for it."""
        with self._lock:
            try:
                self._check_open()
            except BaseException:
                coroutine.close()
                raise
            # Under the lock, because after `close` nothing may be scheduled in the loop, where it would never run.
            future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> RuntimeError:
        return RuntimeError(f"{self._setting} is closed")

    def _forget(self, handle: FutureHandle) -> None:
        with self._lock:
            self._handles.discard(handle)

    # All methods below run in the event loop.

    def _end(self, error: BaseException) -> None:
        """Fail all requests, and every later call."""
        with self._lock:
            self._error = error
            handles = list(self._handles)
        for handle in handles:
            _fail(handle, error)

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
            completion = await self._sample(handle.request)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            _fail(handle, error)
            return
        if handle.future.set_running_or_notify_cancel():
            handle.future.set_result(completion)

    async def _sample(self, request: Request) -> Completion:
        """Sample a response, in several parts if the servers are stopped meanwhile."""
        config, prompt = request.config, request.prompt_ids.tolist()
        stop_ids = self._stop_ids if config.stop_token_ids is None else tuple(config.stop_token_ids)
        key = (request.seed, request.id)
        response = _Response()
        end = End.aborted
        while end is End.aborted:
            if config.stop_strings:  # one may begin in an earlier part, where the server would not find it
                response = _Response()
            done = len(response.ids)
            rest = replace(
                config,
                max_new_tokens=config.max_new_tokens - done,
                min_new_tokens=max(0, config.min_new_tokens - done),
            )
            # With its first seed, a continuation would draw the random numbers of the first part again.
            seed = request.response_seed if not done else derive_seed(request.response_seed, "part", done)
            part, version = await self._pool.part(key, Ask([*prompt, *response.ids], rest, stop_ids, seed))
            response.add(part, version)
            end = part.end
            # Stopped just after its last token: nothing is left to ask for.
            if end is End.aborted and len(response.ids) == config.max_new_tokens:
                end = End.length
        device = request.prompt_ids.device
        return Completion(
            torch.tensor(response.ids, dtype=torch.int64, device=device),
            torch.tensor(response.logprobs, dtype=torch.float32, device=device),
            torch.tensor(response.versions, dtype=torch.int32, device=device),
            truncated=end is End.length and not config.fixed_length,
            mask=SamplingMask.of(response.kept) if config.sampling_replay else None,
        )

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # After the requests: they use the connections that this closes.
        await self._pool.close()


def _check_adapter(where: str, settings: ServerSettings, source: WeightSource) -> int | None:
    """Return the rank of the LoRA adapters that servers get alone; None if they get the weights of the whole model.

    Raises:
        ConfigError: the source has no adapters.
    """
    if settings.lora is LoraTransport.merged:
        return None
    if not isinstance(source, HasAdapter) or source.adapter_rank is None:
        raise ConfigError(
            f"{where}.lora=adapter: the engine has no LoRA adapters that it can save alone. Set trains=lora, or "
            "lora=merged. With runtime=ray, only merged is possible."
        )
    return source.adapter_rank


def _write_update(
    settings: ServerSettings, source: WeightSource, folders: WeightFolders, probe: Probe, number: int
) -> tuple[Weights, list[float]]:
    """Write what servers get in an update, and return it and what the probe measured; all ranks call it."""
    if settings.lora is LoraTransport.merged:
        weights = folders.write(source, number)
    else:
        assert isinstance(source, HasAdapter)
        if not number:
            folders.write_base(source)
        weights = folders.write_adapter(source, number)
    return weights, probe.measure(source)


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
    if config.advantage_scale:
        raise ConfigError(
            f"generation.advantage_scale={config.advantage_scale:g}: servers have no Q heads. Sample with the role's "
            "own engine, or set advantage_scale=0."
        )
    if config.sampling_replay and not config.top_k:
        raise ConfigError(
            f"generation.{config.distortions()[0]}: training normalizes over the tokens that it keeps, and servers "
            "return them only if top_k limits their number. Set generation.top_k, such as 512."
        )
    if config.stop_strings and config.fixed_length:
        raise ConfigError(
            f"generation.stop_strings={config.stop_strings}: incompatible with fixed_length. Remove one of the two."
        )


def _fail(handle: FutureHandle, error: BaseException) -> None:
    """Complete a handle with an error, unless it is complete."""
    if not handle.future.done() and handle.future.set_running_or_notify_cancel():
        handle.future.set_exception(error)


class _RankedSampler:
    """Implements `realign.api.Sampler` on several ranks. All ranks call `generate` and `update`, in the same order."""

    def __init__(
        self,
        ranks: Ranks,
        settings: ServerSettings,
        source: WeightSource,
        folders: WeightFolders,
        probe: Probe,
        open: Callable[[], _ServerSampler],
    ) -> None:
        """Open the sampler on rank 0, while the other ranks help it to write the weights of `source`.

        Args:
            ranks: the processes of the run.
            settings: settings of the sampler.
            source: the weights.
            folders: writes the weights.
            probe: measures what the sampler of rank 0 measures.
            open: constructs the sampler.
        """
        self._ranks, self._settings, self._folders, self._probe = ranks, settings, folders, probe
        self._source, self._version = source, 0
        self._updates = 0
        self._own: _ServerSampler | None = ranks.together(lambda: open() if ranks.leader else self._follow(source))
        try:
            self._check_sampled()
        except BaseException:
            self.close()
            raise

    def _follow(self, source: WeightSource) -> None:
        """Take part in what `_ServerSampler` does with the weights."""
        with suppress(TransientError):  # rank 0 has it too, and its next call that samples says so
            _write_update(self._settings, source, self._folders, self._probe, self._updates)

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return self._version

    def capabilities(self) -> Capabilities:
        """See `Sampler.capabilities`."""
        return self._settings.capabilities()

    def submit(self, request: Request) -> Handle:
        """Raise an error, since requests of single ranks would not be answered in the same order on all ranks."""
        raise RuntimeError("servers under torchrun answer calls of all ranks only: call generate.")

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `Sampler.generate`. Returns the whole batch on each rank."""
        # On the host, since it is sent to ranks with other devices.
        sample = self._ranks.lead(lambda: self._leader().generate(data.to("cpu"), config, seed=seed))
        return sample.to(data[PROMPTS].device)

    def update(self, source: WeightSource, version: int) -> None:
        """See `Sampler.update`."""
        self._ranks.together(lambda: self._update(source, version))
        self._source, self._version = source, version
        self._check_sampled()

    def _update(self, source: WeightSource, version: int) -> None:
        self._updates += 1
        if self._own is not None:
            self._own.update(source, version)
        else:
            self._follow(source)

    def pause(self) -> None:
        """See `Sampler.pause`; all ranks call it."""
        self._ranks.lead(lambda: self._leader().pause())

    def resume(self) -> None:
        """See `Sampler.resume`; all ranks call it."""
        self._ranks.lead(lambda: self._leader().resume())

    def sleep(self) -> None:
        """See `Sampler.sleep`; all ranks call it."""
        self._ranks.lead(lambda: self._leader().sleep())

    def wake(self) -> None:
        """See `Sampler.wake`; all ranks call it."""
        self._ranks.lead(lambda: self._leader().wake())
        self._check_sampled()

    def _check_sampled(self) -> None:
        """Compare responses of servers with the trainer, of which each rank may have a part."""
        sampled = self._ranks.lead(lambda: self._leader().take_uncompared())
        self._ranks.together(lambda: self._probe.check_sampled(self._source, sampled))

    def close(self) -> None:
        """See `Sampler.close`. Ranks may call it alone, since it also ends runs that failed."""
        if self._own is not None:
            self._own.close()

    def of_rank_0(self) -> Sampler:
        """See `SharedByRanks`. Its `update` stays a call of all ranks."""
        return self if self._own is None else self._own

    def _leader(self) -> _ServerSampler:
        assert self._own is not None
        return self._own


@runtime_checkable
class _KnowsModel(Protocol):
    """A source of weights that also knows their model, as an engine does."""

    def capabilities(self) -> EngineCapabilities:
        """See `PipelinableEngine.capabilities`."""
        ...


@dataclass
class Servers(ServerSettings):
    """Samples with inference servers over HTTP. Each request goes to the server with the fewest requests."""

    torchrun: ClassVar[bool] = True

    @override
    def open(self, name: str, source: WeightSource, tokenizer: object) -> Sampler:
        """Start servers if no `urls` are set, and send the weights to all servers.

        Under torchrun, rank 0 does.
        """
        stop_ids = end_tokens(name, source, tokenizer)
        _check_adapter(f"models.{name}.sampler", self, source)
        ranks = current()
        folders = WeightFolders(self.weights_dir, ranks, untie=self.untie, deltas=self.updates is Updates.delta)
        words = 0 if tokenizer is None else len(tokenizer)  # type: ignore[arg-type]
        # 7919 is prime, so all tokens differ in a vocabulary of at least 48 whose size isn't a multiple of it.
        ids = [(i * 7919 + 11) % words for i in range(_PROBE_TOKENS)] if words else []
        probe = Probe(ids, self.probe_tolerance)
        open_own = partial(_ServerSampler, name, self, source, stop_ids, folders, probe, alone=ranks.size == 1)
        return open_own() if ranks.size == 1 else _RankedSampler(ranks, self, source, folders, probe, open_own)


def end_tokens(name: str, source: WeightSource, tokenizer: Any) -> tuple[int, ...]:
    """Return the end tokens of the engine, or else of the tokenizer.

    Raises:
        ConfigError: neither has any.
    """
    if isinstance(source, _KnowsModel) and (ids := source.capabilities().eos_token_ids):
        return ids
    if (end := getattr(tokenizer, "eos_token_id", None)) is None:
        raise ConfigError(f"models.{name}: neither the engine nor the tokenizer has an end token, which servers need.")
    return (int(end),)
