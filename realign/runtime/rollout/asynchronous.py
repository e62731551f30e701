"""`RolloutAhead`: responses are sampled and judged in threads while earlier ones are trained on.

The calls of the graph that lead to `rewards` are made for one prompt at a time (few, where there are very many), each
in a thread of its own, with a sampler that gets the new weights after each step. So a slow reward delays neither the
decoding of other prompts nor the training step. `Staleness` says which prompts begin and which are trained on next.

With `max_staleness=0` a batch begins when its step does, in one call, and what is computed is what a step without a
copy computes, bit by bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from realign.api import RPC, GenerationConfig, MicroBatchSpec, Model, PipelinableEngine, SequenceSample
from realign.api.model import PostHook
from realign.api.sampler import Sampler, SamplesInBackground
from realign.engines.shared_model import SharedEngine, SharedModel
from realign.rewards.pool.failure_count import Tally
from realign.runtime.experiment import Experiment
from realign.runtime.rollout.prompts import PromptStream
from realign.runtime.rollout.refill import Refill
from realign.runtime.rollout.spec import Async
from realign.runtime.rollout.staleness import Staleness

MOST_CALLS = 256
"""Threads at most; with more prompts under way, several make up a call."""
LISTEN_S = 1.0
"""Seconds after which a wait looks up: a signal that comes just before a wait without an end is heard after it."""
END_S = 5.0
"""Seconds that calls under way have to end when the run does."""


@dataclass(frozen=True)
class _Judged:
    """A prompt that is ready."""

    sample: SequenceSample
    version: int
    """Training steps of the policy when it began."""


class RolloutAhead:
    """The prompts of a run that are under way, from their place in the stream to the batch of a step."""

    def __init__(
        self,
        experiment: Experiment,
        rollout: Async,
        models: Mapping[str, Model],
        prompts: PromptStream,
        make: Callable[[RPC, Model, SequenceSample], SequenceSample],
        samplers: Mapping[str, Sampler],
    ) -> None:
        """Nothing begins before the first `take`.

        Args:
            experiment: its graph.
            rollout: how far to run ahead.
            models: of all roles.
            prompts: the stream.
            make: makes a call of the graph with a model on a batch; returns the batch with what it wrote.
            samplers: what samples while the engine trains, for each of `sampled_roles`.
        """
        self._experiment, self._models, self._prompts, self._make = experiment, models, prompts, make
        self._samplers = samplers
        self._leading = experiment.graph.leading_to("rewards")
        self.staleness = Staleness(experiment.batch_prompts, rollout.max_staleness, experiment.steps)
        under_way = (rollout.max_staleness + 1) * experiment.batch_prompts
        self._together = experiment.batch_prompts == under_way
        self._prompts_per_call = under_way if self._together else -(-under_way // MOST_CALLS)
        self._refill = None if experiment.dynamic_sampling is None else Refill(experiment)
        parts = max(1, experiment.batch_prompts // self._prompts_per_call)
        self._tallies = {rpc.name: Tally(parts) for rpc in self._leading}
        self._locks = {owner_of(experiment, rpc.model): threading.Lock() for rpc in self._leading}
        self._torch_threads = torch.get_num_threads()
        self._versions: dict[str, int] = {}  # of the models; empty before the first `take`
        self._training: list[int] = []
        self._taken_at = time.perf_counter()
        self._changed = threading.Condition()  # guards what follows, and `staleness`
        self._judged: dict[int, _Judged] = {}
        self._calls: list[dict[str, float]] = []  # metrics of those that ended since the last `take`
        self._threads: set[threading.Thread] = set()
        self._error: BaseException | None = None
        self._closed = False

    def take(self, step: int, values: dict[str, float]) -> SequenceSample:
        """The judged batch of a step (counted from 1); waits for it. Adds metrics to `values`.

        Raises:
            BaseException: what a call in a thread has raised, the first of them.
        """
        started = time.perf_counter()
        if not self._versions:
            self.staleness.version = step - 1
            self._give_weights()
        with self._changed:
            self._begin()
            while (batch := self._choose()) is None and self._error is None:
                self._changed.wait(LISTEN_S)
            if batch is None:
                assert self._error is not None
                raise self._error
            self._training = batch
            judged = [self._judged.pop(place) for place in batch]
            values |= {
                "rollout/ready_prompts": float(len(self.staleness.ready) - len(batch)),
                "rollout/running_prompts": float(len(self.staleness.begun) - len(self.staleness.ready)),
            }
            if self._refill is not None:
                values |= self._refill.metrics(len(batch))
            values |= self._call_metrics()
            self._prompts.drawn = -(-self.staleness.next_place // self._prompts.batch_prompts)
        values["rollout/wait_s"] = time.perf_counter() - started
        values["rollout/version_lag"] = sum(self.staleness.version - one.version for one in judged) / len(judged)
        return SequenceSample.gather([one.sample for one in judged])

    def advance(self) -> None:
        """A step has trained on what `take` gave: samplers get the new weights, and further prompts begin."""
        self._give_weights()
        with self._changed:
            self.staleness.train(self._training)
            self._training = []
            if not self._together:
                self._begin()

    def state_dict(self) -> dict[str, Any]:
        """See `Staleness.state_dict`; between two steps."""
        with self._changed:
            return self.staleness.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; before the first `take`."""
        self.staleness.load_state_dict(state)

    def start_at(self, place: int) -> None:
        """Go on after a run that did not sample ahead, at this place of the stream."""
        self.staleness.next_place = place

    def stop(self) -> None:
        """Begin nothing any more, and let the calls that sample end."""
        with self._changed:
            self._closed = True
        for sampler in self._samplers.values():
            sampler.close()

    def join(self) -> None:
        """Wait, not for long, until no thread makes a call; after `stop`."""
        deadline = time.monotonic() + END_S
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _give_weights(self) -> None:
        versions = {role: model.version for role, model in self._models.items()}
        for role, sampler in self._samplers.items():
            if sampler is not self._models[role].external_sampler:  # which the model keeps up to date
                sampler.update(self._models[role].machine, versions[role])
        with self._changed:
            self._versions = versions

    def _choose(self) -> list[int] | None:
        """The batch of the next step, as soon as there is one."""
        if (batch := self.staleness.choose()) is not None or self._refill is None:
            return batch
        return self._refill.short_batch(self.staleness)

    def _begin(self) -> None:
        """Begin what may begin; the lock is held."""
        if self._closed or self._error is not None or (self._together and self._threads):
            return
        places = []
        while self.staleness.may_begin() and (self._refill is None or self._refill.may_sample()):
            places.append(self.staleness.begin())
            if self._refill is not None:
                self._refill.begun += 1
        for first in range(0, len(places), self._prompts_per_call):
            part = places[first : first + self._prompts_per_call]
            arguments = (part, self._prompts.at(part), self.staleness.version, dict(self._versions))
            thread = threading.Thread(target=self._walk, args=arguments, name=f"rollout {part[0]}", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _walk(self, places: Sequence[int], batch: SequenceSample, version: int, versions: Mapping[str, int]) -> None:
        """Make the calls that lead to rewards for some prompts; a thread's work."""
        try:
            values: dict[str, float] = {}
            torch.set_num_threads(self._torch_threads)
            for rpc in self._leading:
                started = time.perf_counter()
                batch = self._called(rpc, batch, versions[rpc.model])
                values[f"time/{rpc.name}_s"] = time.perf_counter() - started
                if rpc.method == "generate" and "loss_mask" in rpc.outputs:
                    values["rollout_tokens"] = float(batch["loss_mask"].sum())
            with self._changed:
                self._threads.discard(threading.current_thread())
                self._calls.append(values)
                self._keep(places, batch, version)
                self._begin()
        except BaseException as error:
            with self._changed:
                self._threads.discard(threading.current_thread())
                self._error = self._error or error  # nobody looks at it once the run has ended
        with self._changed:
            self._changed.notify_all()

    def _keep(self, places: Sequence[int], judged: SequenceSample, version: int) -> None:
        """Prompts that are ready; those that do not pass the filter make room. The lock is held."""
        passed = range(len(places)) if self._refill is None else self._refill.chosen(judged)
        for i, (place, one) in enumerate(zip(places, judged.unpack(), strict=True)):
            if i in passed:
                self._judged[place] = _Judged(one, version)
                self.staleness.finish(place)
            else:
                self.staleness.drop(place)

    def _called(self, rpc: RPC, batch: SequenceSample, version: int) -> SequenceSample:
        """Make one call, with the background sampler where the graph means the policy."""
        model = replace(self._models[rpc.model], version=version)
        owner = owner_of(self._experiment, rpc.model)
        if owner not in self._samplers:
            # an engine serves one caller at a time; a rule that has none may judge for several
            alone: AbstractContextManager[Any] = nullcontext() if model.engine is None else self._locks[owner]
            with alone, self._tallies[rpc.name].counting():
                return self._make(rpc, model, batch)
        sampler = self._samplers[owner]
        # A copy of the model in this process is an engine, too: it can score.
        copy: Any = sampler
        engine = copy if isinstance(copy, SharedEngine) else _SamplesOnly(rpc.model, owner, model.machine, sampler)
        with self._tallies[rpc.name].counting():
            return self._make(rpc, replace(model, engine=engine, external_sampler=sampler), batch)

    def _call_metrics(self) -> dict[str, float]:
        """Of the calls that ended since the last step: the mean of their times, and their tokens."""
        calls, self._calls = self._calls, []
        now = time.perf_counter()
        seconds, self._taken_at = now - self._taken_at, now
        names = sorted({name for values in calls for name in values if name.startswith("time/")})
        found = {name: sum(values.get(name, 0.0) for values in calls) / len(calls) for name in names}
        tokens = sum(values.get("rollout_tokens", 0.0) for values in calls)
        return found | {"rollout_tokens": tokens, "rollout_tokens_per_s": tokens / seconds}


class _SamplesOnly(SharedEngine):
    """The engine of a policy that trains meanwhile, as calls ahead of training see it: they may only sample."""

    def __init__(self, name: str, of: str, engine: PipelinableEngine, sampler: Sampler) -> None:
        super().__init__(name, of, engine)
        self._sampler = sampler

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """Raise an error: the engine trains meanwhile."""
        raise ValueError(
            f"models.{self.name}: {type(self._sampler).__name__} samples ahead of training and cannot score. Use "
            "rollout=sync."
        )

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `PipelinableEngine.generate`: the sampler samples, not the engine."""
        return self._sampler.generate(data, config, seed=seed)


def background_sampler(experiment: Experiment, rollout: Async, role: str) -> Sampler:
    """A sampler of a copy of the role's model, in this process."""
    return load_background_sampler(role, experiment.models[role], experiment.seed, recompute=rollout.recompute)


def load_background_sampler(role: str, spec: object, seed: int, *, recompute: bool) -> Sampler:
    """A sampler of a copy of the model of `spec`; see `SamplesInBackground`.

    Raises:
        ValueError: the spec cannot construct one.
    """
    if not isinstance(spec, SamplesInBackground):
        raise ValueError(
            f"models.{role}: {type(spec).__name__} has no background_sampler, which rollout=async needs. Use "
            "rollout=sync, or a model such as realign.engines.TransformersModel."
        )
    return spec.background_sampler(role, seed=seed, recompute=recompute)


def owner_of(experiment: Experiment, role: str) -> str:
    """The role whose weights a role uses: its own, or those that it shares."""
    spec = experiment.models.get(role)
    return spec.of if isinstance(spec, SharedModel) else role


def sampled_roles(experiment: Experiment) -> tuple[str, ...]:
    """The roles that are trained and take part in the calls that lead to rewards: those that need a copy."""
    trained = {rpc.model for rpc in experiment.graph.rpcs if rpc.method == "train_step"}
    owners = (owner_of(experiment, rpc.model) for rpc in experiment.graph.leading_to("rewards"))
    return tuple(dict.fromkeys(owner for owner in owners if owner in trained))
