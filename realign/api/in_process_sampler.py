"""`InProcessSampler`: a sampler that uses the role's own engine, between the engine's other calls.

It is in `api` since `Model` constructs it for every engine, including third-party engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from realign.api.engine import PipelinableEngine, PostHook
from realign.api.generation import GenerationConfig
from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import SequenceSample
from realign.api.sampler import PROMPTS, Capabilities, Completion, FutureHandle, Request, WeightSource
from realign.api.sampling_mask import SAMPLING_MASK, masks_of

IN_PROCESS = Capabilities(
    bitwise=True,
    logprobs_at_temperature=True,
    stop_strings=True,
    lora=True,
    abort=False,
    router_experts=True,
    sampling_replay=True,
)
"""Guarantees of an engine that samples in process."""


_GATHER_S = 0.01
"""Seconds without a further request after which the waiting ones are sampled."""
_GATHER_MOST_S = 1.0
"""Maximum seconds that a request waits for further ones."""


class GeneratingEngine(Protocol):
    """The methods of `PipelinableEngine` that sampling needs."""

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `PipelinableEngine.generate`."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """See `PipelinableEngine.load_weights`."""
        ...


class _Deferred(FutureHandle):
    """A request that is sampled when a caller waits for its result."""

    def __init__(self, request: Request, sampler: InProcessSampler) -> None:
        super().__init__(request)
        self._sampler = sampler

    def result(self, timeout_s: float | None = None) -> Completion:
        """See `Handle.result`. Samples all waiting requests in this thread. The time limit covers only the wait."""
        if not self.future.done():
            self._sampler.run(self, timeout_s)
        return self.future.result()


@dataclass(eq=False)
class _Batch:
    """Requests of one call of the engine, with equal sampling parameters and seed, and one prompt per id."""

    config: GenerationConfig
    seed: int
    prompts: dict[Hashable, Tensor] = field(default_factory=dict)
    handles: list[_Deferred] = field(default_factory=list)

    def takes(self, request: Request, config: GenerationConfig) -> bool:
        """Return whether the request fits this batch. `config` is its config with `n=1`."""
        if self.seed != request.seed or self.config != config:
            return False
        known = self.prompts.get(request.id)
        return known is None or torch.equal(known, request.prompt_ids)

    def add(self, handle: _Deferred) -> None:
        """Add a request to this batch."""
        self.prompts[handle.request.id] = handle.request.prompt_ids
        self.handles.append(handle)


class InProcessSampler:
    """Samples with a role's own engine, using the current training weights. Implements `Sampler`.

    `generate` is one call of the engine. `submit` collects requests: the first thread that waits for a result samples
    all of them in one call of the engine, when no further request has arrived for `_GATHER_S`. Since an engine samples
    whole groups, that call samples responses 0 to the highest requested index for each prompt.

    All methods are thread-safe, and serialize calls of the engine. The sampler does not track other calls of the
    engine (`train_batch`, `forward`), so callers must not run them concurrently. The engine keeps no KV cache between
    calls, so `sleep` frees no memory.
    """

    def __init__(self, engine: GeneratingEngine, *, version: int = 0, capabilities: Capabilities = IN_PROCESS) -> None:
        """Create a sampler for an engine.

        Args:
            engine: the engine.
            version: version of its weights.
            capabilities: guarantees of the engine.
        """
        self.engine = engine
        self._version = version
        self._capabilities = capabilities
        self._turn = threading.Condition(threading.RLock())  # held while sampling; guards the flags below
        self._paused = False
        self._asleep = False
        self._guard = threading.Lock()  # guards `_waiting` and `_closed`; not held while sampling
        self._waiting: list[_Deferred] = []
        self._closed = False

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return self._version

    def capabilities(self) -> Capabilities:
        """See `Sampler.capabilities`."""
        return self._capabilities

    def submit(self, request: Request) -> FutureHandle:
        """See `Sampler.submit`. Sampling starts when a caller waits for a result."""
        handle = _Deferred(request, self)
        with self._guard:
            self._check_open()
            self._waiting.append(handle)
        return handle

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `Sampler.generate`."""
        with self._turn:
            self._wait_for_turn(None)
            out = self.engine.generate(data, config, seed=seed)
            return out.with_tokens(versions=torch.where(out["loss_mask"], self._version, -1).int())

    def run(self, handle: FutureHandle, timeout_s: float | None) -> None:
        """Sample all waiting requests, unless another thread already sampled this one.

        Args:
            handle: handle of the request.
            timeout_s: seconds to wait for other calls and for the end of a pause; None waits without limit.

        Raises:
            TimeoutError: the time limit expired before sampling started.
            RuntimeError: the sampler was closed.
        """
        started = time.monotonic()
        if not self._turn.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise TimeoutError(f"another call of the sampler did not finish within {timeout_s:g} s")
        try:
            # The thread that had the turn may have sampled this request too.
            if handle.done:
                return
            self._wait_for_turn(None if timeout_s is None else timeout_s - (time.monotonic() - started))
            self._gather()
            with self._guard:
                waiting, self._waiting = self._waiting, []
            for batch in _batches([h for h in waiting if h.future.set_running_or_notify_cancel()]):
                self._sample(batch)
        finally:
            self._turn.release()

    def update(self, source: WeightSource, version: int) -> None:
        """See `Sampler.update`. Waits for running calls. If `source` is its engine, only sets the version."""
        with self._turn:
            with self._guard:
                self._check_open()
            own: object = self.engine
            if source is not own:
                self.engine.load_weights(source.weights())
            self._version = version

    def pause(self) -> None:
        """See `Sampler.pause`. Waits for running calls."""
        with self._turn:
            self._paused = True

    def resume(self) -> None:
        """See `Sampler.resume`."""
        with self._turn:
            self._paused = False
            self._turn.notify_all()

    def sleep(self) -> None:
        """See `Sampler.sleep`. Waits for running calls."""
        with self._turn:
            self._asleep = True

    def wake(self) -> None:
        """See `Sampler.wake`."""
        with self._turn:
            self._asleep = False
            self._turn.notify_all()

    def close(self) -> None:
        """See `Sampler.close`. Waits for running calls, and does not close the engine."""
        with self._guard:
            self._closed = True
            waiting, self._waiting = self._waiting, []
        # Before the turn, which a running call may hold for long.
        for handle in waiting:
            if handle.future.set_running_or_notify_cancel():
                handle.future.set_exception(_closed_error())
        with self._turn:
            self._turn.notify_all()

    def _gather(self) -> None:
        """Wait while further requests arrive, since all of them cost about as much as one."""
        known, end = -1, time.monotonic() + _GATHER_MOST_S
        # Without the guard: a count that is out of date only changes the wait.
        while len(self._waiting) != known and time.monotonic() < end:
            known = len(self._waiting)
            time.sleep(_GATHER_S)

    def _check_open(self) -> None:
        if self._closed:
            raise _closed_error()

    def _wait_for_turn(self, timeout_s: float | None) -> None:
        """Wait until neither paused nor asleep. The caller must hold the turn."""
        if not self._turn.wait_for(lambda: self._closed or not (self._paused or self._asleep), timeout_s):
            raise TimeoutError("the sampler is paused or asleep")
        self._check_open()

    def _sample(self, batch: _Batch) -> None:
        """Sample the responses of a batch. An engine error becomes the result of each of its handles."""
        n = 1 + max(handle.request.response_index for handle in batch.handles)
        data = SequenceSample.from_sequences(list(batch.prompts), {PROMPTS: [[x] for x in batch.prompts.values()]})
        try:
            out = self.engine.generate(data, replace(batch.config, n=n), seed=batch.seed)
        except BaseException as error:
            for handle in batch.handles:
                handle.future.set_exception(error)
            # Ctrl-C must also end the thread that sampled, not only reach those that wait.
            if not isinstance(error, Exception):
                raise
            return
        place = {i: number * n for number, i in enumerate(batch.prompts)}
        ids, logprobs, truncated = out.sequences("input_ids"), out.sequences("logprobs"), out["truncated"].tolist()
        masks = masks_of(out) if SAMPLING_MASK in out else [None] * len(ids)
        for handle in batch.handles:
            s, first = place[handle.request.id] + handle.request.response_index, len(handle.request.prompt_ids)
            versions_N = torch.full_like(ids[s][first:], self._version, dtype=torch.int32)
            mask = None if (whole := masks[s]) is None else whole.last(len(ids[s]) - first)
            handle.future.set_result(Completion(ids[s][first:], logprobs[s][first:], versions_N, truncated[s], mask))


class CopySampler(InProcessSampler):
    """Samples and scores with a copy of a role's engine, for rollout=async. New weights wait for the running call."""

    def __init__(self, engine: PipelinableEngine) -> None:
        """Sample with `engine`, which nobody else uses."""
        has = engine.capabilities()
        replays = replace(IN_PROCESS, router_experts=has.router_replay, sampling_replay=has.sampling_replay)
        super().__init__(engine, capabilities=replays)
        self._copy = engine

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """See `PipelinableEngine.forward`. Waits for running calls."""
        with self._turn:
            self._wait_for_turn(None)
            return self._copy.forward(data, mb_spec, post_hook)


def _batches(handles: list[_Deferred]) -> list[_Batch]:
    """Group requests into engine calls, in order of submission."""
    batches: list[_Batch] = []
    for handle in handles:
        config = handle.request.config
        config = config if config.n == 1 else replace(config, n=1)
        batch = next((b for b in batches if b.takes(handle.request, config)), None)
        if batch is None:
            batch = _Batch(config, handle.request.seed)
            batches.append(batch)
        batch.add(handle)
    return batches


def _closed_error() -> RuntimeError:
    return RuntimeError("the sampler is closed")


__all__ = ["CopySampler", "GeneratingEngine", "InProcessSampler"]
