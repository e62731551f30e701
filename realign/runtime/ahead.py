"""`RolloutAhead`: responses are sampled and judged in threads while earlier ones are trained on.

The calls of the graph that lead to `rewards` are made for one prompt at a time (few, where there are very many), each
in a thread of its own, on a copy of the policy that is given the new weights after each step. So a reward that takes
long holds up neither the decoding of other prompts nor the training step. `Staleness` says which prompts begin and
which are trained on next.

With `max_staleness=0` a batch begins when its step does, in one call, and what is computed is what a step without a
copy computes, bit by bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from realign.api import RPC, GenerationConfig, Model, ModelSpec, SequenceSample
from realign.api.data import TOKENS
from realign.engines.shared import SharedEngine, SharedModel
from realign.rewards.tally import Tally
from realign.runtime.experiment import Experiment
from realign.runtime.refill import Refill
from realign.runtime.rollout import Async
from realign.runtime.staleness import Staleness
from realign.runtime.stream import PromptStream

MOST_CALLS = 256
"""Threads at most; with more prompts under way, several make up a call."""
LISTEN_S = 1.0
"""Seconds after which a wait looks up: a signal that comes just before a wait without an end is heard after it."""
END_S = 5.0
"""Seconds that calls under way have to end when the run does."""


class PolicyCopy(Protocol):
    """What samples ahead: an engine that may be called from many threads, wherever it runs (`StreamingEngine`)."""

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `PipelinableEngine.generate`; the result has a key `versions` [T], too."""
        ...

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample with these weights from the next decode step on."""
        ...

    def close(self) -> None:
        """Sample no more; calls that wait raise."""
        ...


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
        copies: Mapping[str, PolicyCopy],
    ) -> None:
        """Nothing begins before the first `take`.

        Args:
            experiment: its graph.
            rollout: how far to run ahead.
            models: of all roles.
            prompts: the stream.
            make: makes a call of the graph with a model on a batch; returns the batch with what it wrote.
            copies: of the models of `sampled_roles`, by role.
        """
        self._experiment, self._models, self._prompts, self._make = experiment, models, prompts, make
        self._copies = copies
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
        """A step has trained on what `take` gave: the copies get the new weights, and further prompts begin."""
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
        for copy in self._copies.values():
            copy.close()

    def join(self) -> None:
        """Wait, not for long, until no thread makes a call; after `stop`."""
        deadline = time.monotonic() + END_S
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _give_weights(self) -> None:
        versions = {role: model.version for role, model in self._models.items()}
        for role, copy in self._copies.items():
            copy.update(self._models[role].machine.weights(), versions[role])
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
        """Make one call, on the copy where the graph means the policy."""
        model = replace(self._models[rpc.model], version=version)
        owner = owner_of(self._experiment, rpc.model)
        if owner not in self._copies:
            # an engine serves one caller at a time; a rule that has none may judge for several
            alone: AbstractContextManager[Any] = nullcontext() if model.engine is None else self._locks[owner]
            with alone, self._tallies[rpc.name].counting():
                return self._make(rpc, model, batch)
        sampler = _Sampler(rpc, self._copies[owner])
        with self._tallies[rpc.name].counting():
            batch = self._make(rpc, replace(model, engine=sampler), batch)
        return sampler.with_versions(batch, version)

    def _call_metrics(self) -> dict[str, float]:
        """Of the calls that ended since the last step: the mean of their times, and their tokens."""
        calls, self._calls = self._calls, []
        now = time.perf_counter()
        seconds, self._taken_at = now - self._taken_at, now
        names = sorted({name for values in calls for name in values if name.startswith("time/")})
        found = {name: sum(values.get(name, 0.0) for values in calls) / len(calls) for name in names}
        tokens = sum(values.get("rollout_tokens", 0.0) for values in calls)
        return found | {"rollout_tokens": tokens, "rollout_tokens_per_s": tokens / seconds}


class _Sampler(SharedEngine):
    """The copy of the policy, as one call sees it: what was sampled for it is kept in mind."""

    def __init__(self, rpc: RPC, copy: Any) -> None:
        super().__init__(rpc.model, rpc.model, copy)
        self._rpc = rpc
        self._sampled: list[SequenceSample] = []

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `PolicyCopy.generate`; without `versions` where the call does not write them."""
        out = self.engine.generate(data, config, seed=seed)
        self._sampled.append(out)
        return out if "versions" in self._rpc.outputs else out.select(out.keys - {"versions"})

    def with_versions(self, batch: SequenceSample, assigned: int) -> SequenceSample:
        """`batch` with the versions that sampled its tokens, where an interface put `assigned` on all of them.

        An interface that gave each token a version of its own knew it from the engine.
        """
        versions_T = batch.get("versions")
        if versions_T is None or "versions" not in self._rpc.outputs or TOKENS not in batch:
            return batch
        if bool(((versions_T != assigned) & (versions_T != -1)).any()):
            return batch
        for out in self._sampled:
            if out.ids == batch.ids and out.lengths[TOKENS] == batch.lengths[TOKENS]:
                true_T = torch.where(versions_T >= 0, out["versions"].to(versions_T), versions_T)
                return batch.with_tokens(versions=true_T)
        return batch


def policy_copy(experiment: Experiment, rollout: Async, role: str) -> PolicyCopy:
    """A copy of the model of a role, in this process."""
    return load_copy(role, experiment.models[role], experiment.seed, recompute=rollout.recompute)


def load_copy(role: str, spec: ModelSpec, seed: int, *, recompute: bool) -> PolicyCopy:
    """What samples ahead for `role`: the model of its `spec` once more, see `StreamingEngine` for `recompute`."""
    from realign.engines.streaming import StreamingEngine

    return StreamingEngine(role, spec.for_sampling().load(role, seed=seed).machine, recompute=recompute)


def owner_of(experiment: Experiment, role: str) -> str:
    """The role whose weights a role uses: its own, or those that it shares."""
    spec = experiment.models.get(role)
    return spec.of if isinstance(spec, SharedModel) else role


def sampled_roles(experiment: Experiment) -> tuple[str, ...]:
    """The roles that are trained and take part in the calls that lead to rewards: those that need a copy."""
    trained = {rpc.model for rpc in experiment.graph.rpcs if rpc.method == "train_step"}
    owners = (owner_of(experiment, rpc.model) for rpc in experiment.graph.leading_to("rewards"))
    return tuple(dict.fromkeys(owner for owner in owners if owner in trained))
