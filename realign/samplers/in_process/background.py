"""`StreamingEngine`: the in-process sampler of asynchronous rollouts, whose weights can change while it samples.

Callers wait in their own threads, or keep handles. A `_DecodingLoop` decodes the sequences of all callers together.
Calls that are pending at the same time, with the same sampling settings, share a `Stream`. New weights take effect
between two decode steps. Unfinished responses continue under the new weights (interruptible generation,
arXiv:2505.24298). Every token carries the version of the weights that sampled it.

Shapes: S sequences, B of them being decoded, N tokens of the longest response, T packed tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from realign.api.engine import PipelinableEngine, PostHook
from realign.api.generation import GenerationConfig
from realign.api.in_process_sampler import IN_PROCESS
from realign.api.microbatch import MicroBatchSpec
from realign.api.router_experts import with_experts
from realign.api.sample import SequenceSample
from realign.api.sampler import PROMPTS, Capabilities, Completion, Request, Tokens, WeightSource
from realign.api.sampling_mask import SamplingMask, with_masks
from realign.errors import ConfigError
from realign.functional.logprobs import LMHead
from realign.models.network.decoder import Decoder
from realign.models.network.images import PromptInput, append_tokens
from realign.samplers.in_process.decode import PREFILL_TOKENS, Responses, Rollout, RowEntry, Stopping
from realign.samplers.in_process.draw import response_keys
from realign.samplers.in_process.generate import check_logprobs, check_prompts, pack_responses
from realign.samplers.in_process.rollout_model import Cores, DecodableEngine, RolloutModel, frozen_casts_kept
from realign.samplers.in_process.settings import InProcessSampling

T = TypeVar("T")


class StreamingEngine:
    """Samples from a dedicated engine for callers in many threads.

    Implements `realign.api.Sampler`, and also scores. All methods are thread-safe. A dedicated thread decodes, and
    runs the work that other threads submit between two decode steps.

    A call that is sampled alone returns the same bits as the wrapped engine's `generate`. When calls are sampled
    concurrently, log-probs may differ by rounding. Tokens may differ where rounding changes the draw.

    Args:
        name: role of the model, used in messages.
        engine: a copy of the policy that no other component uses.
        version: policy version of its weights.
        recompute: whether a weight update recomputes the KV cache of unfinished responses; if False, they keep the
            keys and values of the old weights.

    Raises:
        ConfigError: the engine cannot generate.
    """

    def __init__(self, name: str, engine: PipelinableEngine, *, version: int = 0, recompute: bool = True) -> None:
        if not isinstance(engine, DecodableEngine) or "logprobs" not in engine.capabilities().outputs:
            raise ConfigError(f"models.{name}: {type(engine).__name__} cannot sample asynchronously. Set rollout=sync.")
        if engine.capabilities().encoder_decoder:
            raise ConfigError(f"models.{name}: encoder-decoder models cannot sample asynchronously. Set rollout=sync.")
        self.engine = engine
        self.loop = _DecodingLoop(name, engine, version=version, recompute=recompute)

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return self.loop.version

    def capabilities(self) -> Capabilities:
        """See `Sampler.capabilities`."""
        return replace(IN_PROCESS, abort=True)

    def submit(self, request: Request) -> _StreamingHandle:
        """See `Sampler.submit`. Each request prefills its prompt; `generate` shares the prefill between responses."""
        prompt = SequenceSample.from_sequences([request.id], {PROMPTS: [[request.prompt_ids]]})
        # the key that this response has in a `generate` of the whole group: both draw with the same numbers
        keys_S = response_keys(request.seed, [request.id], request.response_index + 1)[-1:]
        return _StreamingHandle(request, self.loop, self._add(prompt, keys_S, request.config))

    def _add(self, data: SequenceSample, keys_S: Tensor, config: GenerationConfig) -> SamplingCall:
        """Validate the prompts and queue a call for the loop."""
        checked = check_prompts(self.engine.module, data, config, self.engine.network.abilities.images)
        with self.loop.on_stream():
            prompts = [p.to(self.engine.device) for p in checked]
        call = SamplingCall(prompts, keys_S, replace(config, n=1))
        self.loop.add(call)
        return call

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `Sampler.generate`.

        Raises:
            RuntimeError: the engine was closed, or an error ended its loop.
        """
        if not len(data):
            return self.engine.generate(data, config, seed=seed).with_tokens(versions=torch.zeros(0).int())
        call = self._add(data, response_keys(seed, data.ids, config.n), config)
        responses, versions_SN, experts, masks = call.result.result()
        with self.loop.on_stream():
            out = pack_responses(data, responses, config.n)
            sampled_SN = torch.arange(versions_SN.shape[1], device=versions_SN.device) < responses.lengths[:, None]
            versions_T = torch.full_like(out["input_ids"], -1, dtype=torch.int32)
            versions_T[out["loss_mask"]] = versions_SN[sampled_SN].to(versions_T.device)
            out = out.with_tokens(versions=versions_T)
            out = with_masks(out, masks) if config.sampling_replay else out
            return with_experts(out, experts) if config.router_replay else out

    def update(self, source: WeightSource, version: int) -> None:
        """See `Sampler.update`. The next decode step samples with these weights.

        Raises:
            RuntimeError: the engine was closed, or an error ended its loop.
            ValueError: names or shapes of the weights do not match the model.
        """
        self.loop.load_weights(source.weights(), version)

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """See `PipelinableEngine.forward`. Decoding pauses during the call."""
        return self.loop.between_steps(lambda: self.engine.forward(data, mb_spec, post_hook))

    def pause(self) -> None:
        """See `Sampler.pause`. Returns after the current decode step."""
        self.loop.pause(True)

    def resume(self) -> None:
        """See `Sampler.resume`."""
        self.loop.pause(False)

    def sleep(self) -> None:
        """See `Sampler.sleep`. Frees the KV cache of all responses, and keeps the tokens sampled so far."""
        self.loop.sleep()

    def wake(self) -> None:
        """See `Sampler.wake`. Recomputes the KV cache from prompts and the tokens sampled so far."""
        self.loop.wake()

    def close(self) -> None:
        """Stop the loop. Calls that wait for responses raise RuntimeError."""
        self.loop.close()


class _StreamingHandle:
    """Handle of one response of a `StreamingEngine`. Implements `realign.api.sampler.Handle`."""

    def __init__(self, request: Request, loop: _DecodingLoop, call: SamplingCall) -> None:
        """Wrap a call that has exactly one sequence."""
        self.request = request
        self._loop = loop
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
            return self._tokens(self._loop.so_far(self._call))
        if self._call.result.exception() is None:
            return self.result()
        return self._tokens(self._call.last_tokens)

    def _tokens(self, parts: tuple[Tensor, Tensor, Tensor] | None) -> Tokens:
        device = self.request.prompt_ids.device
        with self._loop.on_stream():
            return Tokens.none(self.request.prompt_ids) if parts is None else Tokens(*(x.to(device) for x in parts))

    def result(self, timeout_s: float | None = None) -> Completion:
        """See `Handle.result`."""
        responses, versions_SN, _, masks = self._call.result.result(timeout_s)
        with self._loop.on_stream():
            count, device = int(responses.lengths[0]), self.request.prompt_ids.device
            check_logprobs(responses.logprobs)
            parts = (responses.tokens, responses.logprobs, versions_SN)
            ids, logprobs, versions = (x[0, :count].to(device) for x in parts)
            mask = masks[0] if masks else None
            return Completion(ids, logprobs, versions, bool(responses.truncated[0]), mask)

    def cancel(self) -> bool:
        """See `Handle.cancel`. The slot is free before the next decode step."""
        return self._loop.cancel(self._call)


class _DecodingLoop:
    """Decodes calls with one engine in a dedicated thread, until `close` or an error.

    On CUDA it has its own stream, so that its kernels don't queue behind those of training in the same process. Callers
    use this stream for tensors of the sampler (`on_stream`), and pass prompts and results through host memory. Only
    published weights cross streams on the device: the loop waits for the stream that wrote them, and that stream waits
    for the copy before it writes again.

    Tests on a CPU show that the stream is entered and that both waits are queued. A GPU still has to confirm that
    decoding and training overlap, that memory kept for this stream leaves room for training, and that the responses
    are those of one stream.

    Attributes:
        version: policy version of the engine's weights.
    """

    def __init__(self, name: str, engine: DecodableEngine, *, version: int, recompute: bool) -> None:
        """Start the thread; see `StreamingEngine` for the arguments."""
        self.version = version
        self._name = name
        self._engine = engine
        self._recompute = recompute
        # set in the new thread: OpenMP starts it with its default, and some operators of torch then change that to the
        # number that any thread set last, which may be the single core of another rollout
        self._threads = torch.get_num_threads()
        self._cores = Cores(engine.module)
        self._cuda_stream: torch.cuda.Stream | None = None
        if engine.device.type == "cuda":
            self._cuda_stream = torch.cuda.Stream(engine.device)
            self._cuda_stream.wait_stream(torch.cuda.current_stream(engine.device))  # which has loaded the model
        self._changed = threading.Condition()  # guards the attributes below, except the thread's `_running`
        self._calls: list[SamplingCall] = []
        self._paused = False
        self._asleep = False
        self._jobs: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._error: BaseException | None = None
        self._running: list[SharedRollout] = []
        self._thread = threading.Thread(target=self._run, name=f"rollout of {name}", daemon=True)
        self._thread.start()

    @property
    def streams(self) -> list[Stream]:
        """Rollouts with unfinished responses. Read them in `between_steps`, since the thread changes them."""
        return [running.stream for running in self._running]

    def add(self, call: SamplingCall) -> None:
        """Queue a call. Its `result` is set when its last response ends."""
        with self._changed:
            self._check_open()
            self._calls.append(call)
            self._changed.notify_all()

    def between_steps(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread between two decode steps, and wait for its result.

        Raises:
            RuntimeError: the loop was closed, or an error ended it.
        """
        result: Future[T] = Future()
        with self._changed:
            self._check_open()
            self._jobs.append((work, result))
            self._changed.notify_all()
        return result.result()

    def on_stream(self) -> AbstractContextManager[Any]:
        """Queue the device work of a thread on the loop's stream, if it has one."""
        return nullcontext() if self._cuda_stream is None else torch.cuda.stream(self._cuda_stream)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Continue all responses with new weights, from the next decode step on."""
        publisher = None if self._cuda_stream is None else torch.cuda.current_stream(self._engine.device)

        def load() -> torch.cuda.Event | None:
            if self._cuda_stream is not None and publisher is not None:
                self._cuda_stream.wait_stream(publisher)
            self._engine.load_weights(weights)
            copied = None if self._cuda_stream is None else self._cuda_stream.record_event()
            self.version = version
            for stream in self.streams:
                decoder, head = self._prepare(stream.config, stream.reach)
                with self._engine.network.autocast():  # recompute under the same autocast as the first prefill
                    stream.update(decoder, head, version, recompute=self._recompute)
            return copied

        copied = self.between_steps(load)
        if publisher is not None and copied is not None:
            publisher.wait_event(copied)

    def so_far(self, call: SamplingCall) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the current tokens, log-probs and versions of a call's response; None if it has not started."""

        def read() -> tuple[Tensor, Tensor, Tensor] | None:
            if call.result.done() and call.result.exception() is None:
                responses, versions_SN, _, _ = call.result.result()
                count = int(responses.lengths[0])
                return responses.tokens[0, :count], responses.logprobs[0, :count], versions_SN[0, :count]
            running = self._rollout_of(call)
            return call.last_tokens if running is None else running.stream.so_far(call.sequence)

        return self.between_steps(read)

    def cancel(self, call: SamplingCall) -> bool:
        """Cancel the single sequence of a call; return False if it has already ended."""

        def drop() -> bool:
            if call.result.done():  # it has ended while this job waited
                return False
            with self._changed:
                if call in self._calls:
                    self._calls.remove(call)
            running = self._rollout_of(call)
            if running is not None:
                running.remove(call)
                self._drop_finished()
            call.result.set_exception(CancelledError())
            return True

        if call.result.done():  # also after `close`, when no job runs any more
            return False
        try:
            return self.between_steps(drop)
        except RuntimeError:  # the loop has ended, so the call has ended too
            return False

    def _rollout_of(self, call: SamplingCall) -> SharedRollout | None:
        return next((r for r in self._running if call in r.calls.values()), None)

    def pause(self, paused: bool) -> None:
        """Stop or continue decoding. Returns after the current decode step."""

        def change() -> None:
            with self._changed:
                self._paused = paused

        self.between_steps(change)

    def sleep(self) -> None:
        """Stop decoding and free the KV cache of all responses; keep the tokens sampled so far."""

        def free() -> None:
            with self._changed:
                self._asleep = True
            for stream in self.streams:
                stream.free_cache()

        self.between_steps(free)

    def wake(self) -> None:
        """Continue after `sleep`: recompute the KV cache from prompts and the tokens sampled so far."""

        def fill() -> None:
            if self._asleep:
                with self._engine.network.autocast():
                    for stream in self.streams:
                        stream.fill_cache()
            # only now: if the memory is not there, the loop stays asleep, and `wake` can be called again
            with self._changed:
                self._asleep = False

        self.between_steps(fill)

    @property
    def _decodes(self) -> bool:
        return not (self._paused or self._asleep)

    def close(self) -> None:
        """End the thread. Pending calls raise RuntimeError."""
        with self._changed:
            self._error = self._error or RuntimeError("the sampler was closed")
            self._changed.notify_all()
        self._thread.join()

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._stopped_error()

    def _stopped_error(self) -> RuntimeError:
        ended = RuntimeError(f"models.{self._name}: sampling stopped: {self._error}")
        ended.__cause__ = self._error
        return ended

    def _run(self) -> None:
        """Run the decoding loop; this is the target of the thread."""
        try:
            torch.set_num_threads(self._threads)
            with torch.no_grad(), self.on_stream():
                while self._wait():
                    self._do_jobs()
                    # entered again after new weights, since autocast keeps the casts of the old ones
                    with self._engine.network.autocast(), frozen_casts_kept(self._engine.module):
                        while self._decodes and not self._jobs and self._error is None and self._advance():
                            pass
                    # the waiting loop must not leave the process with the one core of small decode steps
                    self._cores.give_back()
        except BaseException as error:
            self._error = error  # before the lock is taken: whoever queues after this gets the error instead
        with self._changed:
            ended = {result for _, result in self._jobs} | {call.result for call in self._calls}
            ended |= {call.result for running in self._running for call in running.calls.values()}
        for result in ended:
            result.set_exception(self._stopped_error())

    def _wait(self) -> bool:
        """Wait until there is work to do; return False if the loop was closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._jobs or self._error or (self._decodes and (self._calls or self._running))
            )
            return self._error is None

    def _do_jobs(self) -> None:
        for work, result in tuple(self._jobs):
            try:
                result.set_result(work())
            except Exception as error:
                result.set_exception(error)
            with self._changed:  # not before it is done, since an error that ends the loop fails all that are listed
                self._jobs.remove((work, result))

    def _advance(self) -> bool:
        """Start new calls, advance each rollout (see `Rollout.advance`), and deliver finished responses.

        Returns False if no work is left.
        """
        for call in tuple(self._calls):
            try:
                self._begin(call)
            except Exception as error:  # for example settings that do not fit the model
                call.result.set_exception(error)
            with self._changed:
                self._calls.remove(call)
        for running in self._running:
            running.stream.advance()
            running.deliver()
        self._drop_finished()
        return bool(self._running or self._calls)

    def _drop_finished(self) -> None:
        """Drop rollouts without unfinished responses."""
        self._running = [running for running in self._running if running.calls]

    def _begin(self, call: SamplingCall) -> None:
        longest = max(map(len, call.prompts)) + call.config.max_new_tokens
        running = next((r for r in self._running if r.stream.config == call.config), None)
        if running is None:
            running = SharedRollout(self._stream(call.config, longest))
            self._running.append(running)
        elif longest > running.stream.reach:
            # twice as long, since each growth prepares the weights again, and prompts often get longer one by one
            running.stream.reach = max(longest, 2 * running.stream.reach)
            running.stream.decoder, running.stream.head = self._prepare(call.config, running.stream.reach)
        running.add(call)

    def _stream(self, config: GenerationConfig, reach: int) -> Stream:
        decoder, head = self._prepare(config, reach)
        weight, engine = head.weight_VH, self._engine
        stopping = Stopping(config, engine.capabilities().eos_token_ids, engine.tokenizer, len(weight), weight.device)
        return Stream(decoder, head, config, stopping, engine.sampling, reach=reach, version=self.version)

    def _prepare(self, config: GenerationConfig, length: int) -> tuple[Decoder, LMHead]:
        engine = self._engine
        with engine.network.autocast():
            model = RolloutModel.of(engine.network, engine.module, config, engine.fusion)
            return model.prepare(length, self._cores)


@dataclass(eq=False)
class SharedRollout:
    """The rollout of all calls with one config."""

    stream: Stream
    calls: dict[int, SamplingCall] = field(default_factory=dict)
    """The call of each unfinished sequence."""

    def add(self, call: SamplingCall) -> None:
        """Queue the sequences of a call."""
        call.sequences_S = self.stream.add(call.prompts, call.keys_S)
        call.left = len(call.keys_S)
        self.calls |= dict.fromkeys(call.sequences_S.tolist(), call)

    def deliver(self) -> None:
        """Set the result of each call whose last sequence has ended."""
        for sequence in torch.cat(self.stream.finished).tolist() if self.stream.finished else []:
            call = self.calls[sequence]
            call.left -= 1
            if not call.left:
                assert call.sequences_S is not None
                call.result.set_result(self.stream.take(call.sequences_S))
            del self.calls[sequence]  # last, since an error ends all calls that are still listed
        self.stream.finished.clear()

    def remove(self, call: SamplingCall) -> None:
        """Drop the single sequence of an unfinished call, and store its tokens in `call.last_tokens`."""
        call.last_tokens = self.stream.so_far(call.sequence)
        self.stream.remove(call.sequence)
        del self.calls[call.sequence]


@dataclass(eq=False)
class SamplingCall:
    """A pending request of one caller.

    `config.n` is 1, so that calls with different numbers of responses can share a rollout.
    """

    prompts: list[PromptInput]
    """Token ids of each prompt, with its images, on the device of the weights."""
    keys_S: Tensor
    """Keys of the random numbers, in prompt order; see `draw.response_keys`."""
    config: GenerationConfig
    sequences_S: Tensor | None = None
    """Rows of the rollout's responses; None if the call has not started."""
    left: int = 0
    """Number of unfinished sequences."""
    result: Future[_Taken] = field(default_factory=Future)
    last_tokens: tuple[Tensor, Tensor, Tensor] | None = None
    """Tokens, log-probs and versions of a canceled response."""

    @property
    def sequence(self) -> int:
        """Row of the single sequence of a started call."""
        assert self.sequences_S is not None
        return int(self.sequences_S[0])


class Stream(Rollout):
    """A rollout that accepts and releases sequences at any time, and records the policy version of every token."""

    def __init__(
        self,
        decoder: Decoder,
        head: LMHead,
        config: GenerationConfig,
        stopping: Stopping,
        sampling: InProcessSampling,
        *,
        reach: int,
        version: int,
    ) -> None:
        """Start without sequences.

        Args:
            decoder: layers of the model, see `Rollout`.
            head: last layer of the model.
            config: sampling settings.
            stopping: stop conditions.
            sampling: settings of the sampler, see `Rollout`.
            reach: positions that the decoder supports.
            version: policy version of the weights.
        """
        super().__init__(decoder, head, config, stopping, sampling)
        self.reach = reach
        """Positions that the decoder supports."""
        self.version = version
        """Policy version of the weights."""
        self.versions = torch.zeros(0, config.max_new_tokens, dtype=torch.int32, device=self.device)
        """[rows of `responses`, N] int32: policy version of each sampled token; other entries are undefined."""
        self._free: list[int] = []
        self._freed = (0, 0)  # slots and length of the freed cache

    @override
    def _new_rows(self, count: int) -> list[int]:
        # reuse released rows before adding new ones
        reused, self._free = self._free[:count], self._free[count:]
        new = super()._new_rows(count - len(reused))
        self.versions = torch.cat([self.versions, self.versions.new_zeros(len(new), self.versions.shape[1])])
        return reused + new

    @override
    def _begin_sequences(self, sequences_B: Tensor, counts_B: Tensor) -> None:
        # tokens that are there already keep their version: the response was interrupted, or the weights changed
        later_BN = torch.arange(self.versions.shape[1], device=self.device) >= counts_B[:, None]
        self.versions[sequences_B] = self.versions[sequences_B].masked_fill(later_BN, self.version)

    def take(self, sequences_S: Tensor) -> _Taken:
        """Return finished sequences, and release their rows."""
        # indexing with a tensor copies, so the rows can be released below
        responses = Responses(*(x[sequences_S] for x in self.responses))
        experts: list[Tensor] = []
        if self.experts is not None:
            experts = self.experts.of(sequences_S.tolist(), responses.lengths.tolist())
        masks = [] if self.masks is None else self.masks.of(sequences_S.tolist())
        taken = _Taken(responses, self.versions[sequences_S], experts, masks)
        self._forget(sequences_S.tolist())
        return taken

    def _forget(self, sequences: list[int]) -> None:
        """Release rows of `responses`."""
        self._free += sequences
        if self.experts is not None:
            self.experts.forget(sequences)
        if self.masks is not None:
            self.masks.forget(sequences)
        for sequence in sequences:
            del self._texts[sequence]

    def so_far(self, sequence: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return copies of the tokens, log-probs and versions [N] of an unfinished sequence."""
        row = self._row(sequence)
        count = self.waiting.count_sampled(sequence) if row is None else int(self.rows[RowEntry.COUNT, row])
        parts = (self.responses.tokens, self.responses.logprobs, self.versions)
        tokens_N, logprobs_N, versions_N = (x[sequence, :count].clone() for x in parts)
        return tokens_N, logprobs_N, versions_N

    def remove(self, sequence: int) -> None:
        """Drop an unfinished sequence; release its slot and its row of `responses`."""
        row = self._row(sequence)
        if row is not None:
            self._retire([row])
        else:
            self.waiting.remove(sequence)
        self._forget([sequence])

    def _row(self, sequence: int) -> int | None:
        """Return the slot of a sequence that is being decoded; None if it waits."""
        slots = (self._entry(RowEntry.SEQUENCE) == sequence).nonzero()
        return int(slots[0]) if len(slots) else None

    def free_cache(self) -> None:
        """Free the KV cache of all sequences. Decoding is not allowed until `fill_cache`."""
        self.waiting.forget_prefills()
        if self.cache is not None:
            self._freed = (self.cache.slots, self.cache.length)
            self.cache = None

    def fill_cache(self) -> None:
        """Allocate the KV cache that `free_cache` freed, and recompute its contents."""
        if self.active:
            self._read_again()

    def update(self, decoder: Decoder, head: LMHead, version: int, *, recompute: bool) -> None:
        """Continue with new weights, those of `decoder` and `head`.

        Args:
            decoder: new layers, for the same number of positions.
            head: new last layer, for the same vocabulary.
            version: policy version of the new weights.
            recompute: whether to recompute the KV cache under the new weights; if False, old keys and values are
                kept. Ignored while the cache is freed, since `fill_cache` recomputes everything.
        """
        self.decoder, self.head, self.version = decoder, head, version
        self.waiting.forget_prefills()
        if not self.active:
            return
        # the tokens from here on get the new version
        self._begin_sequences(self._entry(RowEntry.SEQUENCE), self._entry(RowEntry.COUNT))
        if recompute and self.cache is not None:
            self._read_again()

    def _read_again(self) -> None:
        """Recompute the KV cache of all rows from prompts and responses.

        The newest token of each row is excluded, since the next decode step writes it.
        """
        sequences, counts = self._entry(RowEntry.SEQUENCE).tolist(), self._entry(RowEntry.COUNT).tolist()
        texts = [
            append_tokens(self._texts[sequence], self.responses.tokens[sequence, : count - 1])
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        first = 0
        while first < len(texts):
            last, total = first + 1, len(texts[first])
            while last < len(texts) and total + len(texts[last]) <= PREFILL_TOKENS:
                total += len(texts[last])
                last += 1
            _, states = self.decoder.prefill(texts[first:last])
            for row, state in enumerate(states, first):
                if self.cache is None:
                    self.cache = self.decoder.new_cache(state, *self._freed, self._cache_limit)
                self.cache.fill(row, row + 1, state)
            first = last


class _Taken(NamedTuple):
    """Finished sequences, in the order of the call."""

    responses: Responses
    versions_SN: Tensor
    """Policy version of each sampled token."""
    experts: list[Tensor]
    """See `ExpertRecord.of`; empty if the rollout does not record experts."""
    masks: list[SamplingMask]
    """See `MaskRecord.of`; empty if the rollout does not record them."""
