"""`StreamingEngine`: one decoding loop for the responses of many callers, whose weights change while it runs.

Each caller waits in its own thread for its own responses; a thread of the engine decodes the sequences of all of them
together. New weights take effect between two decode steps: what is being sampled goes on under them (interruptible
generation, arXiv:2505.24298), and every token carries the version that sampled it.

Shapes: S sequences, N tokens of the longest response, T packed tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from realign.api.data import SequenceSample
from realign.api.microbatch import MicroBatchSpec
from realign.api.model import GenerationConfig, PipelinableEngine, PostHook
from realign.engines.decoding import Responses
from realign.engines.engine import TransformersEngine
from realign.engines.generation import checked_prompts, packed, prepared
from realign.engines.heads import read_head
from realign.engines.noise import response_keys
from realign.engines.shared import SharedEngine
from realign.engines.stopping import Stopping
from realign.engines.stream import Stream
from realign.engines.trunk import Cores, Trunk
from realign.functional.logprobs import LMHead

T = TypeVar("T")


@dataclass(eq=False)
class _Call:
    """What one caller waits for."""

    prompts: list[Tensor]
    keys_S: Tensor
    config: GenerationConfig
    sequences_S: Tensor | None = None
    left: int = 0
    result: Future[tuple[Responses, Tensor]] = field(default_factory=Future)


@dataclass(eq=False)
class _Running:
    """The rollout of one config, and whose its sequences are."""

    stream: Stream
    calls: dict[int, _Call] = field(default_factory=dict)


class StreamingEngine(SharedEngine):
    """Samples from an engine of its own for callers in many threads. Implements `realign.api.PipelinableEngine`.

    A call that comes when nothing else is being sampled gives what the engine's own `generate` gives, bit by bit.
    Beside other calls its log-probs may differ from those by rounding, and its tokens where that decides.

    Args:
        name: the role, for messages.
        engine: a copy of the policy that nobody else uses.
        version: of its weights.
        recompute: whether responses that are being sampled when the weights change are read anew under the new ones;
            else their old keys and values are kept.

    Raises:
        ValueError: the engine cannot generate.
    """

    engine: TransformersEngine

    def __init__(self, name: str, engine: PipelinableEngine, *, version: int = 0, recompute: bool = True) -> None:
        super().__init__(name, name, engine)
        if not isinstance(engine, TransformersEngine) or "logprobs" not in engine.outputs:
            raise ValueError(f"model {name!r}: {type(engine).__name__} cannot sample for several callers at once")
        self.version = version
        """Of the weights that sample now."""
        self._recompute = recompute
        self._threads = torch.get_num_threads()
        self._cores = Cores(engine.module)
        self._changed = threading.Condition()  # guards what follows, up to `_running`, which is the loop's own
        self._calls: list[_Call] = []
        self._jobs: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._error: BaseException | None = None
        self._running: list[_Running] = []
        self._loop = threading.Thread(target=self._run, name=f"rollout of {name}", daemon=True)
        self._loop.start()

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `PipelinableEngine.generate`; the result has a key `versions` [T] int32, too: -1 on given tokens.

        Raises:
            RuntimeError: the engine was closed, or an error has ended its loop.
        """
        if not len(data):
            return self.engine.generate(data, config, seed=seed).with_tokens(versions=torch.zeros(0).int())
        prompts = [p.to(self.engine.device) for p in checked_prompts(self.engine.module, data, config)]
        call = _Call(prompts, response_keys(seed, data.ids, config.n), config)
        with self._changed:
            self._check_open()
            self._calls.append(call)
            self._changed.notify_all()
        responses, versions_SN = call.result.result()
        out = packed(data, responses, config.n)
        sampled_SN = torch.arange(versions_SN.shape[1], device=versions_SN.device) < responses.lengths[:, None]
        versions_T = torch.full_like(out["input_ids"], -1, dtype=torch.int32)
        versions_T[out["loss_mask"]] = versions_SN[sampled_SN].to(versions_T.device)
        return out.with_tokens(versions=versions_T)

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample with these weights from the next decode step on; returns when they are in place.

        Args:
            weights: see `PipelinableEngine.load_weights`.
            version: which every token sampled with them gets.

        Raises:
            ValueError: names or shapes of the weights are not those of the model.
        """

        def load() -> None:
            self.engine.load_weights(weights)
            self.version = version
            for stream in (running.stream for running in self._running):
                trunk, head = self._prepared(stream.reach)
                with self.engine.network.autocast():  # what is read again is read as it was the first time
                    stream.update(trunk, head, version, recompute=self._recompute)

        self._between_steps(load)

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """See `PipelinableEngine.forward`; decoding waits meanwhile."""
        return self._between_steps(lambda: self.engine.forward(data, mb_spec, post_hook))

    def close(self) -> None:
        """End the loop; calls that wait for responses raise."""
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
        """Let the loop do this between two decode steps, and wait for it."""
        result: Future[T] = Future()
        with self._changed:
            self._check_open()
            self._jobs.append((work, result))
            self._changed.notify_all()
        return result.result()

    def _run(self) -> None:
        """The loop of the engine's thread."""
        try:
            torch.set_num_threads(self._threads)
            with torch.no_grad():
                while self._wait():
                    self._do_jobs()
                    with self.engine.network.autocast():  # anew: it keeps casts of the weights
                        while not self._jobs and self._error is None and self._advance():
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
        """Wait until there is something to do; False when the engine was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._jobs or self._running or self._error)
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
        """Take in new calls, make a step of each rollout, and hand out what has ended; False if nothing is left."""
        if self._calls:
            with self._changed:
                calls, self._calls = self._calls, []
            for call in calls:
                try:
                    self._begin(call)
                except Exception as error:  # such as settings that do not fit the model
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
            running = _Running(Stream(trunk, head, call.config, stopping, reach=longest, version=self.version))
            self._running.append(running)
        elif longest > running.stream.reach:
            running.stream.reach = max(longest, 2 * running.stream.reach)
            running.stream.trunk, running.stream.head = self._prepared(running.stream.reach)
        call.sequences_S = running.stream.add(call.prompts, call.keys_S)
        call.left = len(call.keys_S)
        running.calls |= dict.fromkeys(call.sequences_S.tolist(), call)

    def _hand_out(self, running: _Running) -> None:
        """Give the callers whose last sequence has ended their responses."""
        stream = running.stream
        for sequence in torch.cat(stream.finished).tolist() if stream.finished else []:
            call = running.calls[sequence]
            call.left -= 1
            if not call.left:
                assert call.sequences_S is not None
                call.result.set_result(stream.take(call.sequences_S))
            del running.calls[sequence]  # not before: an error ends the calls that stand there
        stream.finished.clear()

    def _prepared(self, length: int) -> tuple[Trunk, LMHead]:
        network = self.engine.network
        head = read_head(self.engine.module)
        assert isinstance(head, LMHead)
        with network.autocast():
            trunk, head = prepared(self.engine.module, network.limited(head), network.fusion, length)
        return self._cores.saved_by(trunk), head
