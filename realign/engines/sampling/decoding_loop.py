"""`DecodingLoop`: a thread that decodes the responses of many callers, and runs their other work between two steps.

Calls that are pending at the same time, with the same sampling settings, share a rollout. All methods are thread-safe.

Shapes: S sequences, N tokens of the longest response.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from realign.api.generation import GenerationConfig
from realign.engines.sampling.calls import Call, SharedRollout
from realign.engines.sampling.continuous import Stream
from realign.engines.sampling.decoder import Decoder
from realign.engines.sampling.rollout_model import RolloutModel
from realign.engines.sampling.samplable import Samplable
from realign.engines.sampling.stopping import Stopping
from realign.engines.sampling.trunk import Cores
from realign.functional.logprobs import LMHead

T = TypeVar("T")


class DecodingLoop:
    """Decodes calls with one engine in a dedicated thread, until `close` or an error.

    Attributes:
        version: policy version of the engine's weights.
    """

    def __init__(self, name: str, engine: Samplable, *, version: int, recompute: bool) -> None:
        """Start the thread; see `StreamingEngine` for the arguments."""
        self.version = version
        self._name = name
        self._engine = engine
        self._recompute = recompute
        self._threads = torch.get_num_threads()
        self._cores = Cores(engine.module)
        self._changed = threading.Condition()  # guards the attributes below, except the thread's `_running`
        self._calls: list[Call] = []
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

    def add(self, call: Call) -> None:
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

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Continue all responses with new weights, from the next decode step on."""

        def load() -> None:
            self._engine.load_weights(weights)
            self.version = version
            for stream in self.streams:
                decoder, head = self._prepared(stream.config, stream.reach)
                with self._engine.network.autocast():  # recompute under the same autocast as the first prefill
                    stream.update(decoder, head, version, recompute=self._recompute)

        self.between_steps(load)

    def so_far(self, call: Call) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the current tokens, log-probs and versions of a call's response; None if it has not started."""

        def read() -> tuple[Tensor, Tensor, Tensor] | None:
            if call.result.done() and call.result.exception() is None:
                responses, versions_SN, _ = call.result.result()
                count = int(responses.lengths[0])
                return responses.tokens[0, :count], responses.logprobs[0, :count], versions_SN[0, :count]
            running = self._running_of(call)
            return call.kept if running is None else running.stream.so_far(call.sequence)

        return self.between_steps(read)

    def cancel(self, call: Call) -> bool:
        """Cancel the single sequence of a call; return False if it has already ended."""

        def drop() -> bool:
            if call.result.done():
                return False
            with self._changed:
                if call in self._calls:
                    self._calls.remove(call)
            running = self._running_of(call)
            if running is not None:
                running.remove(call)
                self._drop_finished()
            call.result.set_exception(CancelledError())
            return True

        if call.result.done():
            return False
        try:
            return self.between_steps(drop)
        except RuntimeError:  # the loop has ended, so the call has ended too
            return False

    def _running_of(self, call: Call) -> SharedRollout | None:
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
            self._engine.free_kept_memory()

        self.between_steps(free)

    def wake(self) -> None:
        """Continue after `sleep`: recompute the KV cache from prompts and the tokens sampled so far."""

        def fill() -> None:
            if self._asleep:
                with self._engine.network.autocast():
                    for stream in self.streams:
                        stream.fill_cache()
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
            raise self._ended()

    def _ended(self) -> RuntimeError:
        ended = RuntimeError(f"models.{self._name}: sampling stopped: {self._error}")
        ended.__cause__ = self._error
        return ended

    def _run(self) -> None:
        """Run the decoding loop; this is the target of the thread."""
        try:
            torch.set_num_threads(self._threads)
            with torch.no_grad():
                while self._wait():
                    self._do_jobs()
                    with self._engine.network.autocast():  # entered again, since autocast caches casts of the weights
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
        """Wait until there is work to do; return False if the loop was closed."""
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
        """Start new calls, advance each rollout (see `Rollout.advance`), and deliver finished responses.

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
            running.deliver()
        self._drop_finished()
        return bool(self._running or self._calls)

    def _drop_finished(self) -> None:
        """Drop rollouts without unfinished responses, and release their KV caches."""
        for running in self._running:
            if not running.calls:
                running.stream.release()
        self._running = [running for running in self._running if running.calls]

    def _begin(self, call: Call) -> None:
        longest = max(map(len, call.prompts)) + call.config.max_new_tokens
        running = next((r for r in self._running if r.stream.config == call.config), None)
        if running is None:
            running = SharedRollout(self._stream(call.config, longest))
            self._running.append(running)
        elif longest > running.stream.reach:
            running.stream.reach = max(longest, 2 * running.stream.reach)
            running.stream.decoder, running.stream.head = self._prepared(call.config, running.stream.reach)
        running.add(call)

    def _stream(self, config: GenerationConfig, reach: int) -> Stream:
        decoder, head = self._prepared(config, reach)
        weight, engine = head.weight_VH, self._engine
        stopping = Stopping(config, engine.eos_token_ids, engine.tokenizer, len(weight), weight.device)
        return Stream(decoder, head, config, stopping, engine.resources, reach=reach, version=self.version)

    def _prepared(self, config: GenerationConfig, length: int) -> tuple[Decoder, LMHead]:
        engine = self._engine
        with engine.network.autocast():
            model = RolloutModel.of(engine.network, engine.module, config)
            return model.prepared(length, self._cores, engine.resources)
