"""`RolloutAhead`: asynchronous rollout, which samples and scores responses in threads during training.

Each thread executes the RPCs that lead to `rewards` for one prompt, or for a few prompts if very many are running.
The sampler gets the new weights after each step. A slow reward therefore delays neither the decoding of other prompts
nor the training step. `Staleness` decides which prompts start and which are trained on next.

With `max_staleness=0` a batch starts when its step starts, in one call. The result is bitwise identical to
synchronous rollout.

Under torchrun only rank 0 has threads, since threads of several ranks would not call collectives in the same order. It
samples from servers, and sends each batch to the other ranks.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from realign.api import (
    RPC,
    DataflowGraph,
    GenerationConfig,
    MicroBatchSpec,
    Model,
    PipelinableEngine,
    SequenceSample,
)
from realign.api.engine import PostHook, Scores
from realign.api.sampler import Sampler
from realign.engines.shared_model import SharedEngine
from realign.errors import ConfigError
from realign.ranks import current
from realign.rewards.pool.pool import Tally
from realign.runtime.rollout.dynamic_sampling import DynamicSampling, Sampled
from realign.runtime.rollout.prompts import PromptStream
from realign.runtime.rollout.spec import Async
from realign.runtime.rollout.staleness import Staleness


class SamplingEngine(SharedEngine):
    """Engine of a policy in training for calls of asynchronous rollout, which uses the sampler instead."""

    def __init__(self, name: str, of: str, engine: PipelinableEngine, sampler: Sampler) -> None:
        super().__init__(name, of, engine)
        self._sampler = sampler

    @override
    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """Score with the sampler, because the engine is in use by training.

        Raises:
            ConfigError: the sampler cannot score.
        """
        if isinstance(self._sampler, Scores):
            return self._sampler.forward(data, mb_spec, post_hook)
        raise ConfigError(
            f"models.{self.name}: with rollout=async, {type(self._sampler).__name__} can sample but not score. Set "
            "rollout=sync."
        )

    @override
    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Sample with the sampler, not with the engine."""
        return self._sampler.generate(data, config, seed=seed)


class _AsyncDynamicSampling:
    """Filters scored prompts, and counts them between steps."""

    def __init__(self, sampling: DynamicSampling, prompts_at_once: int, batch_prompts: int) -> None:
        """Filter prompts that are sampled `prompts_at_once` at a time, for steps of `batch_prompts` prompts."""
        self._sampling = sampling
        self._most = sampling.max_batches * prompts_at_once
        self._batch_prompts = batch_prompts
        self.started = 0
        """Prompts started since the last step; at most the prompts of `max_batches` batches."""
        self._sampled = Sampled(sampling)

    def may_sample(self) -> bool:
        """Return whether one more prompt may start before the next step."""
        return self.started < self._most

    def choose(self, judged: SequenceSample) -> set[int]:
        """Return the indices of the prompts that pass the filter."""
        return set(self._sampled.add(judged))

    def short_batch(self, staleness: Staleness, best: float | None) -> list[int] | None:
        """Return an incomplete batch once `max_batches` batches were sampled and scored for the step; otherwise None.

        Raises:
            RunError: no prompt passed the filter; see `Sampled.nothing`, also for `best`.
        """
        if self.may_sample() or len(staleness.ready) < len(staleness.started):
            return None
        if not staleness.ready:
            raise self._sampled.nothing(self._sampling.max_batches, best)
        # all that have started are ready here, so this is the order of their start, as in `Staleness.choose`
        return list(staleness.started)[: self._batch_prompts]

    def metrics(self, batch: int) -> dict[str, float]:
        """Return metrics of the prompts scored since the last step, and reset the counts.

        Args:
            batch: number of prompts that the step trains on.
        """
        values = self._sampled.metrics() | {"missing_prompts": float(self._batch_prompts - batch)}
        self.started, self._sampled = 0, Sampled(self._sampling)
        return {f"dynamic_sampling/{name}": value for name, value in values.items()}


MOST_CALLS = 256
"""Maximum number of threads; with more running prompts, each call processes several prompts."""
_LISTEN_S = 1.0
"""Timeout in seconds of each wait, so that Python can handle signals between waits."""
END_S = 5.0
"""Seconds to wait for running calls when the run ends."""


@dataclass(frozen=True)
class _Judged:
    """A scored prompt, ready for training."""

    sample: SequenceSample
    version: int
    """Policy version (training steps made) when the prompt was started."""


class RolloutAhead:
    """The running prompts, from their place in the prompt stream to the batch of a step."""

    def __init__(
        self,
        rollout: Async,
        graph: DataflowGraph,
        models: Mapping[str, Model],
        prompts: PromptStream,
        make: Callable[[RPC, Model, SequenceSample], SequenceSample],
        samplers: Mapping[str, Sampler],
        *,
        owners: Mapping[str, str],
        batch_prompts: int,
        steps: int,
        dynamic_sampling: DynamicSampling | None,
    ) -> None:
        """Prepare asynchronous rollout; no prompt is started before the first `take`. All ranks call each method.

        Args:
            rollout: settings of asynchronous rollout, such as the maximum staleness.
            graph: the graph of the run.
            models: models of all roles.
            prompts: the prompt stream.
            make: executes an RPC with a model on a batch; returns the batch with the outputs of the RPC.
            samplers: for each trained role that is sampled, the sampler to use while the engine trains.
            owners: the role that owns the weights of each role: itself, or the role whose model it shares.
            batch_prompts: prompts of a step.
            steps: steps of the run.
            dynamic_sampling: filter of the prompts; None trains on all of them.
        """
        self._models, self._prompts, self._make = models, prompts, make
        self._ranks = current()
        self._samplers, self._owners = samplers, owners
        self._leading = graph.leading_to("rewards")
        self.staleness = Staleness(batch_prompts, rollout.max_staleness, steps)
        under_way = (rollout.max_staleness + 1) * batch_prompts
        # max_staleness=0: one call for the batch, as in synchronous rollout, so that the results have the same bits
        self._together = batch_prompts == under_way
        self._prompts_per_call = under_way if self._together else -(-under_way // MOST_CALLS)
        self._refill: _AsyncDynamicSampling | None = None
        if dynamic_sampling is not None:
            self._refill = _AsyncDynamicSampling(dynamic_sampling, prompts.batch_prompts, batch_prompts)
        parts = max(1, batch_prompts // self._prompts_per_call)
        self._tallies = {rpc.name: Tally(parts) for rpc in self._leading}
        # by owner: roles that share a model share its engine
        self._locks = {owners[rpc.model]: threading.Lock() for rpc in self._leading}
        # set again in the thread of each call: OpenMP starts it with its own default, and another number of threads
        # rounds sums differently
        self._torch_threads = torch.get_num_threads()
        self._versions: dict[str, int] = {}  # by role; empty before the first `take`
        self._training: list[int] = []
        self._taken_at = time.perf_counter()
        self._changed = threading.Condition()  # guards the fields below and `staleness`
        self._judged: dict[int, _Judged] = {}
        self._calls: list[dict[str, float]] = []  # metrics of the calls finished since the last `take`
        self._threads: set[threading.Thread] = set()
        self._error: BaseException | None = None
        self._closed = False

    def take(self, step: int, values: dict[str, float], best: float | None = None) -> SequenceSample:
        """Wait for the scored batch of a step (counted from 1) and return it; adds metrics to `values`.

        `best` is the highest reward that was trained on, see `Sampled.nothing`.

        Raises:
            BaseException: the first exception that a thread raised.
        """
        batch, metrics = self._ranks.lead(lambda: self._wait_for_batch(step, best))
        values |= metrics
        return batch

    def _wait_for_batch(self, step: int, best: float | None) -> tuple[SequenceSample, dict[str, float]]:
        """Wait for the batch of a step, and return it with its metrics; on rank 0."""
        started = time.perf_counter()
        values: dict[str, float] = {}
        if not self._versions:
            # a run that resumes from synchronous rollout, or with resume_skip=[counters], has restored no version or
            # another one
            self.staleness.version = step - 1
            self._read_versions()
        with self._changed:
            self._begin()
            while (batch := self._choose(best)) is None and self._error is None:
                self._changed.wait(_LISTEN_S)
            if batch is None:
                assert self._error is not None
                raise self._error
            self._training = batch
            judged = [self._judged.pop(place) for place in batch]
            values |= {
                "rollout/ready_prompts": float(len(self.staleness.ready) - len(batch)),
                "rollout/running_prompts": float(len(self.staleness.started) - len(self.staleness.ready)),
            }
            if self._refill is not None:
                values |= self._refill.metrics(len(batch))
            values |= self._call_metrics()
            # rounded up: prompts are taken one by one, and the checkpoint's position counts batches
            self._prompts.drawn = -(-self.staleness.next_place // self._prompts.batch_prompts)
        values["rollout/wait_s"] = time.perf_counter() - started
        values["rollout/version_lag"] = sum(self.staleness.version - prompt.version for prompt in judged) / len(judged)
        return SequenceSample.gather([prompt.sample for prompt in judged]), values

    def advance(self) -> None:
        """Start further prompts after a training step on the batch of `take`, whose weights the samplers have."""
        self._read_versions()
        # all ranks get an error of rank 0, or they would wait for it in their next collective
        self._ranks.lead(self._count_trained)

    def _count_trained(self) -> None:
        """Count the batch of `take` as trained, and start further prompts; on rank 0."""
        with self._changed:
            self.staleness.train(self._training)
            self._training = []
            # with max_staleness=0 the next batch starts in `take`, when its step starts
            if not self._together:
                self._begin()

    def paused(self) -> AbstractContextManager[object]:
        """Return a context in which no prompt starts or ends."""
        return self._changed

    def state_dict(self) -> dict[str, Any]:
        """See `Staleness.state_dict`; between two steps."""
        with self._changed:
            return self.staleness.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; call it before the first `take`."""
        self.staleness.load_state_dict(state)

    def start_at(self, place: int) -> None:
        """Continue at this place of the prompt stream, after a run with synchronous rollout."""
        self.staleness.next_place = place

    def stop(self) -> None:
        """Start no further prompts, and close the samplers, which ends their running calls."""
        with self._changed:
            self._closed = True
        for sampler in self._samplers.values():
            sampler.close()

    def join(self) -> None:
        """Wait up to `END_S` seconds for all threads to finish; call `stop` first."""
        deadline = time.monotonic() + END_S
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _read_versions(self) -> None:
        versions = {role: model.version for role, model in self._models.items()}
        with self._changed:
            self._versions = versions

    def _choose(self, best: float | None) -> list[int] | None:
        """Return the batch of the next step; None if it is not complete."""
        if (batch := self.staleness.choose()) is not None or self._refill is None:
            return batch
        return self._refill.short_batch(self.staleness, best)

    def _begin(self) -> None:
        """Start all prompts that may start; the caller holds the lock."""
        if self._closed or self._error is not None or (self._together and self._threads):
            return
        places = []
        while self.staleness.may_begin() and (self._refill is None or self._refill.may_sample()):
            places.append(self.staleness.begin())
            if self._refill is not None:
                self._refill.started += 1
        for first in range(0, len(places), self._prompts_per_call):
            part = places[first : first + self._prompts_per_call]
            # versions are fixed here: all calls for a prompt seed their random numbers with those of its start
            arguments = (part, self._prompts.at(part), self.staleness.version, dict(self._versions))
            thread = threading.Thread(target=self._walk, args=arguments, name=f"rollout {part[0]}", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _walk(self, places: Sequence[int], batch: SequenceSample, version: int, versions: Mapping[str, int]) -> None:
        """Execute the RPCs that lead to rewards for some prompts; target of a thread."""
        try:
            values: dict[str, float] = {}
            torch.set_num_threads(self._torch_threads)
            for rpc in self._leading:
                started = time.perf_counter()
                batch = self._execute(rpc, batch, versions[rpc.model])
                values[f"time/{rpc.name}_s"] = time.perf_counter() - started
                if rpc.method == "generate" and "loss_mask" in rpc.outputs:
                    values["rollout_tokens"] = float(batch["loss_mask"].sum())
            with self._changed:
                # before `_begin`, which starts nothing with max_staleness=0 while a thread is listed
                self._threads.discard(threading.current_thread())
                self._calls.append(values)
                self._keep(places, batch, version)
                self._begin()
        except BaseException as error:
            with self._changed:
                self._threads.discard(threading.current_thread())
                self._error = self._error or error  # ignored once the run has ended
        with self._changed:
            self._changed.notify_all()

    def _keep(self, places: Sequence[int], judged: SequenceSample, version: int) -> None:
        """Store the prompts that pass the filter and drop the others; the caller holds the lock."""
        passed = range(len(places)) if self._refill is None else self._refill.choose(judged)
        for i, (place, sample) in enumerate(zip(places, judged.unpack(), strict=True)):
            if i in passed:
                self._judged[place] = _Judged(sample, version)
                self.staleness.finish(place)
            else:
                self.staleness.drop(place)
                self._prompts.record(sample)

    def _execute(self, rpc: RPC, batch: SequenceSample, version: int) -> SequenceSample:
        """Execute one RPC, with the background sampler if the RPC uses the policy."""
        # a collective in this thread would mix with those of training
        model = self._models[rpc.model].replaced(version=version, lead=operator.call)
        owner = self._owners[rpc.model]
        if owner not in self._samplers:
            # an engine serves one caller at a time; interfaces without an engine may run concurrently
            alone: AbstractContextManager[Any] = self._locks[owner] if model.has_engine else nullcontext()
            with alone, self._tallies[rpc.name].counting():
                return self._make(rpc, model, batch)
        sampler = self._samplers[owner]
        engine = SamplingEngine(rpc.model, owner, model.engine, sampler)
        with self._tallies[rpc.name].counting():
            return self._make(rpc, model.replaced(engine=engine, external_sampler=sampler), batch)

    def _call_metrics(self) -> dict[str, float]:
        """Return the mean times and the token counts of the calls finished since the last step."""
        calls, self._calls = self._calls, []
        now = time.perf_counter()
        seconds, self._taken_at = now - self._taken_at, now
        names = sorted({name for values in calls for name in values if name.startswith("time/")})
        times = {name: sum(values.get(name, 0.0) for values in calls) / len(calls) for name in names}
        tokens = sum(values.get("rollout_tokens", 0.0) for values in calls)
        return times | {"rollout_tokens": tokens, "rollout_tokens_per_s": tokens / seconds}
