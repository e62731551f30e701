"""`StreamingEngine`: a background decoding loop that serves many callers, and whose weights can change while it runs.

It is the in-process sampler of asynchronous rollouts. Callers wait in their own threads, or keep handles. One thread
of the engine decodes the sequences of all callers together. New weights take effect between two decode steps.
Unfinished responses continue under the new weights (interruptible generation, arXiv:2505.24298). Every token carries
the version of the weights that sampled it.

Shapes: S sequences, N tokens of the longest response, T packed tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from realign.api.in_process_sampler import IN_PROCESS
from realign.api.microbatch import MicroBatchSpec
from realign.api.model import GenerationConfig, PipelinableEngine, PostHook
from realign.api.sample import SequenceSample
from realign.api.sampler import PROMPTS, Capabilities, Completion, Request, Tokens, WeightSource
from realign.engines.network.heads import read_head
from realign.engines.network.network import Network
from realign.engines.sampling.continuous import Stream
from realign.engines.sampling.counter_rng import response_keys
from realign.engines.sampling.rollout import check_logprobs, checked_prompts, packed, prepared
from realign.engines.sampling.slots import Responses
from realign.engines.sampling.stopping import Stopping
from realign.engines.sampling.trunk import Cores, Trunk
from realign.engines.shared_model import SharedEngine
from realign.functional.logprobs import LMHead

T = TypeVar("T")


@runtime_checkable
class Samplable(PipelinableEngine, Protocol):
    """Engine over a transformers model whose layers a decoding loop can run."""

    @property
    def module(self) -> Any:
        """The transformers model."""
        ...

    @property
    def network(self) -> Network:
        """The network that training runs."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens."""
        ...

    @property
    def max_slots(self) -> int | None:
        """Maximum number of sequences decoded concurrently; None: as many as fit."""
        ...


@dataclass(eq=False)
class _Call:
    """A pending request of one caller.

    `config.n` is 1, so that calls with different numbers of responses can share a rollout.
    """

    prompts: list[Tensor]
    keys_S: Tensor
    config: GenerationConfig
    sequences_S: Tensor | None = None
    left: int = 0
    result: Future[tuple[Responses, Tensor]] = field(default_factory=Future)
    kept: tuple[Tensor, Tensor, Tensor] | None = None
    """Tokens, log-probs and versions of a canceled response."""


class StreamingHandle:
    """Handle of one response of a `StreamingEngine`. Implements `realign.api.requests.Handle`."""

    def __init__(self, request: Request, engine: StreamingEngine, call: _Call) -> None:
        """Wrap a call that has exactly one sequence."""
        self.request = request
        self._engine = engine
        self._call = call

    @property
    def done(self) -> bool:
        """See `Handle.done`."""
        return self._call.result.done()

    def tokens(self) -> Tokens:
        """See `Handle.tokens`. Waits until the current decode step ends.

        Raises:
            RuntimeError: the sampler was closed before the response ended.
        """
        if not self._call.result.done():
            return self._tokens(self._engine.so_far(self._call))
        if self._call.result.exception() is None:
            return self.result()
        return self._tokens(self._call.kept)

    def _tokens(self, found: tuple[Tensor, Tensor, Tensor] | None) -> Tokens:
        device = self.request.prompt_ids.device
        return Tokens.none(self.request.prompt_ids) if found is None else Tokens(*(x.to(device) for x in found))

    def result(self, timeout_s: float | None = None) -> Completion:
        """See `Handle.result`."""
        responses, versions_SN = self._call.result.result(timeout_s)
        count, device = int(responses.lengths[0]), self.request.prompt_ids.device
        check_logprobs(responses.logprobs)
        found = (responses.tokens, responses.logprobs, versions_SN)
        ids, logprobs, versions = (x[0, :count].to(device) for x in found)
        return Completion(ids, logprobs, versions, bool(responses.truncated[0]))

    def cancel(self) -> bool:
        """See `Handle.cancel`. The slot is free before the next decode step."""
        return self._engine.cancel(self._call)


@dataclass(eq=False)
class _Running:
    """The rollout of one config, and the call of each of its sequences."""

    stream: Stream
    calls: dict[int, _Call] = field(default_factory=dict)


class StreamingEngine(SharedEngine):
    """Samples from a dedicated engine for callers in many threads.

    Implements `realign.api.Sampler` and `realign.api.PipelinableEngine`. All methods are thread-safe. A dedicated
    thread decodes, and runs the work that other threads submit between two decode steps.

    A call that is sampled alone returns the same bits as the wrapped engine's `generate`. When calls are sampled
    concurrently, log-probs may differ by rounding. Tokens may differ where rounding changes the draw.

    Args:
        name: role of the model, used in messages.
        engine: a copy of the policy that no other component uses.
        version: policy version of its weights.
        recompute: whether a weight update recomputes the KV cache of unfinished responses; if False, they keep the
            keys and values of the old weights.

    Raises:
        ValueError: the engine cannot generate.
    """

    engine: Samplable

    def __init__(self, name: str, engine: PipelinableEngine, *, version: int = 0, recompute: bool = True) -> None:
        if not isinstance(engine, Samplable) or "logprobs" not in engine.outputs:
            raise ValueError(f"model {name!r}: {type(engine).__name__} cannot sample for several callers at once")
        super().__init__(name, name, engine)
        self._version = version
        self._recompute = recompute
        self._threads = torch.get_num_threads()
        self._cores = Cores(engine.module)
        self._changed = threading.Condition()  # guards the attributes below, except the loop's `_running`
        self._calls: list[_Call] = []
        self._paused = False
        self._asleep = False
        self._jobs: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._error: BaseException | None = None
        self._running: list[_Running] = []
        self._loop = threading.Thread(target=self._run, name=f"rollout of {name}", daemon=True)
        self._loop.start()

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return self._version

    def capabilities(self) -> Capabilities:
        """See `Sampler.capabilities`."""
        return replace(IN_PROCESS, abort=True)

    def submit(self, request: Request) -> StreamingHandle:
        """See `Sampler.submit`. Each request prefills its prompt; `generate` shares the prefill between responses."""
        prompt = SequenceSample.from_sequences([request.id], {PROMPTS: [[request.prompt_ids]]})
        keys_S = response_keys(request.seed, [request.id], request.response_index + 1)[-1:]
        return StreamingHandle(request, self, self._add(prompt, keys_S, request.config))

    def _add(self, data: SequenceSample, keys_S: Tensor, config: GenerationConfig) -> _Call:
        """Validate the prompts and queue a call for the loop."""
        prompts = [p.to(self.engine.device) for p in checked_prompts(self.engine.module, data, config)]
        call = _Call(prompts, keys_S, replace(config, n=1))
        with self._changed:
            self._check_open()
            self._calls.append(call)
            self._changed.notify_all()
        return call

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `Sampler.generate`.

        Raises:
            RuntimeError: the engine was closed, or an error ended its loop.
        """
        if not len(data):
            return self.engine.generate(data, config, seed=seed).with_tokens(versions=torch.zeros(0).int())
        call = self._add(data, response_keys(seed, data.ids, config.n), config)
        responses, versions_SN = call.result.result()
        out = packed(data, responses, config.n)
        sampled_SN = torch.arange(versions_SN.shape[1], device=versions_SN.device) < responses.lengths[:, None]
        versions_T = torch.full_like(out["input_ids"], -1, dtype=torch.int32)
        versions_T[out["loss_mask"]] = versions_SN[sampled_SN].to(versions_T.device)
        return out.with_tokens(versions=versions_T)

    def update(self, source: WeightSource, version: int) -> None:
        """See `Sampler.update`. The next decode step samples with these weights.

        Raises:
            RuntimeError: the engine was closed, or an error ended its loop.
            ValueError: names or shapes of the weights do not match the model.
        """
        weights = source.weights()

        def load() -> None:
            self.engine.load_weights(weights)
            self._version = version
            for stream in (running.stream for running in self._running):
                trunk, head = self._prepared(stream.reach)
                with self.engine.network.autocast():  # recompute under the same autocast as the first prefill
                    stream.update(trunk, head, version, recompute=self._recompute)

        self._between_steps(load)

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """See `PipelinableEngine.forward`. Decoding pauses during the call."""
        return self._between_steps(lambda: self.engine.forward(data, mb_spec, post_hook))

    def so_far(self, call: _Call) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the current tokens, log-probs and versions of a call's response; None if it has not started."""

        def read() -> tuple[Tensor, Tensor, Tensor] | None:
            if call.result.done() and call.result.exception() is None:
                responses, versions_SN = call.result.result()
                count = int(responses.lengths[0])
                return responses.tokens[0, :count], responses.logprobs[0, :count], versions_SN[0, :count]
            running = self._running_of(call)
            return call.kept if running is None else running.stream.so_far(_sequence(call))

        return self._between_steps(read)

    def cancel(self, call: _Call) -> bool:
        """Cancel the single sequence of a call; return False if it has already ended."""

        def drop() -> bool:
            if call.result.done():
                return False
            with self._changed:
                if call in self._calls:
                    self._calls.remove(call)
            running = self._running_of(call)
            if running is not None:
                call.kept = running.stream.so_far(_sequence(call))
                running.stream.remove(_sequence(call))
                del running.calls[_sequence(call)]
                self._running = [r for r in self._running if r.calls]
            call.result.set_exception(CancelledError())
            return True

        if call.result.done():
            return False
        try:
            return self._between_steps(drop)
        except RuntimeError:  # the loop has ended, so the call has ended too
            return False

    def _running_of(self, call: _Call) -> _Running | None:
        return next((r for r in self._running if call in r.calls.values()), None)

    def pause(self) -> None:
        """See `Sampler.pause`. Returns after the current decode step."""
        self._between_steps(lambda: self._set(paused=True))

    def resume(self) -> None:
        """See `Sampler.resume`."""
        self._between_steps(lambda: self._set(paused=False))

    def sleep(self) -> None:
        """See `Sampler.sleep`. Frees the KV cache of all responses, and keeps the tokens sampled so far."""

        def free() -> None:
            self._set(asleep=True)
            for running in self._running:
                running.stream.free_cache()

        self._between_steps(free)

    def wake(self) -> None:
        """See `Sampler.wake`. Recomputes the KV cache from prompts and the tokens sampled so far."""

        def fill() -> None:
            if self._asleep:
                with self.engine.network.autocast():
                    for running in self._running:
                        running.stream.fill_cache()
            self._set(asleep=False)

        self._between_steps(fill)

    def _set(self, *, paused: bool | None = None, asleep: bool | None = None) -> None:
        with self._changed:
            self._paused = self._paused if paused is None else paused
            self._asleep = self._asleep if asleep is None else asleep

    @property
    def _decodes(self) -> bool:
        return not (self._paused or self._asleep)

    def close(self) -> None:
        """Stop the loop. Calls that wait for responses raise RuntimeError."""
        with self._changed:
            self._error = self._error or RuntimeError("it was closed")
            self._changed.notify_all()
        self._loop.join()

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._ended()

    def _ended(self) -> RuntimeError:
        ended = RuntimeError(f"model {self.name!r} samples no more: {self._error}")
        ended.__cause__ = self._error
        return ended

    def _between_steps(self, work: Callable[[], T]) -> T:
        """Run `work` on the loop's thread between two decode steps, and wait for its result."""
        result: Future[T] = Future()
        with self._changed:
            self._check_open()
            self._jobs.append((work, result))
            self._changed.notify_all()
        return result.result()

    def _run(self) -> None:
        """Run the decoding loop; this is the target of the engine's thread."""
        try:
            torch.set_num_threads(self._threads)
            with torch.no_grad():
                while self._wait():
                    self._do_jobs()
                    with self.engine.network.autocast():  # entered again, since autocast caches casts of the weights
                        while self._decodes and not self._jobs and self._error is None and self._advance():
                            pass
                    self._cores.give_back()
        except BaseException as error:
            self._error = error
        with self._changed:
            ended = [result for _, result in self._jobs] + [call.result for call in self._calls]
            ended += {call.result for running in self._running for call in running.calls.values()}
        for result in ended:
            result.set_exception(self._ended())

    def _wait(self) -> bool:
        """Wait until there is work to do; return False if the engine was closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._jobs or self._error or (self._decodes and (self._calls or self._running))
            )
            return self._error is None

    def _do_jobs(self) -> None:
        with self._changed:
            jobs, self._jobs = self._jobs, []
        for work, result in jobs:
            try:
                result.set_result(work())
            except Exception as error:
                result.set_exception(error)

    def _advance(self) -> bool:
        """Start new calls, advance each rollout by one step, and deliver finished responses.

        Returns False if no work is left.
        """
        if self._calls:
            with self._changed:
                calls, self._calls = self._calls, []
            for call in calls:
                try:
                    self._begin(call)
                except Exception as error:  # for example settings that do not fit the model
                    call.result.set_exception(error)
        for running in self._running:
            running.stream.advance()
            self._hand_out(running)
        self._running = [running for running in self._running if running.calls]
        return bool(self._running or self._calls)

    def _begin(self, call: _Call) -> None:
        longest = max(map(len, call.prompts)) + call.config.max_new_tokens
        running = next((r for r in self._running if r.stream.config == call.config), None)
        if running is None:
            trunk, head = self._prepared(longest)
            stopping = Stopping(
                call.config,
                self.engine.eos_token_ids,
                self.engine.tokenizer,
                len(head.weight_VH),
                head.weight_VH.device,
            )
            stream = Stream(
                trunk,
                head,
                call.config,
                stopping,
                reach=longest,
                version=self._version,
                max_slots=self.engine.max_slots,
            )
            running = _Running(stream)
            self._running.append(running)
        elif longest > running.stream.reach:
            running.stream.reach = max(longest, 2 * running.stream.reach)
            running.stream.trunk, running.stream.head = self._prepared(running.stream.reach)
        call.sequences_S = running.stream.add(call.prompts, call.keys_S)
        call.left = len(call.keys_S)
        running.calls |= dict.fromkeys(call.sequences_S.tolist(), call)

    def _hand_out(self, running: _Running) -> None:
        """Deliver the responses of each call whose last sequence has ended."""
        stream = running.stream
        for sequence in torch.cat(stream.finished).tolist() if stream.finished else []:
            call = running.calls[sequence]
            call.left -= 1
            if not call.left:
                assert call.sequences_S is not None
                call.result.set_result(stream.take(call.sequences_S))
            del running.calls[sequence]  # last, since an error ends all calls that are still listed
        stream.finished.clear()

    def _prepared(self, length: int) -> tuple[Trunk, LMHead]:
        network = self.engine.network
        head = read_head(self.engine.module)
        assert isinstance(head, LMHead)
        with network.autocast():
            trunk, head = prepared(self.engine.module, network.limited(head), network.fusion, length)
        return self._cores.saved_by(trunk), head


def _sequence(call: _Call) -> int:
    """Return the row of the single sequence of a started call."""
    assert call.sequences_S is not None
    return int(call.sequences_S[0])
