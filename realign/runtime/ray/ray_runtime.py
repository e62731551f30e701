"""`RayRuntime`: the training loop of `LocalRuntime` in the driver, with the models in worker processes of Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from typing_extensions import override

from realign.api import RPC, Model, ModelSpec, SequenceSample
from realign.api.sampler import Sampler, samples_externally
from realign.errors import ConfigError, TransientError
from realign.runtime.checks.auto_memory import with_memory_choices
from realign.runtime.experiment import Experiment
from realign.runtime.local import CallResult, LocalRuntime
from realign.runtime.models import load_models
from realign.runtime.processes.placement import ROLLOUT, RoleGroup, plan_groups
from realign.runtime.processes.watchdog import WorkerLost
from realign.runtime.ray.host import Loaded
from realign.runtime.ray.proxies import RayEngine, RemoteSampler
from realign.runtime.ray.workers import Setup, WorkerGroup, counting_hops
from realign.runtime.rollout.asynchronous import MOST_CALLS
from realign.runtime.rollout.spec import Async
from realign.runtime.runtime_spec import Ray
from realign.runtime.steps_together import StepsTogether, steps_together


class RayRuntime(LocalRuntime):
    """Runtime that loads models into worker groups, and runs independent calls of the graph concurrently.

    Use it inside of `cluster.connected`.
    """

    def __init__(self, experiment: Experiment, spec: Ray) -> None:
        """Start the workers, and load models and data.

        Args:
            experiment: Experiment to run.
            spec: The experiment's `runtime` config.
        """
        self._spec = spec
        self._workers = ExitStack()
        self._threads = ThreadPoolExecutor(len(experiment.graph.rpcs), thread_name_prefix="rpc")
        self._waits: dict[str, float] = {}
        self._rollout: WorkerGroup | None = None
        super().__init__(experiment)

    def _load_models(self) -> dict[str, Model]:
        return load_models(with_memory_choices(self.experiment), self._load_own)

    def _load_own(self, specs: Mapping[str, ModelSpec], seed: int) -> dict[str, Model]:
        """Start a worker group for each set of roles that share processes, and load their models concurrently."""
        ahead = self.experiment.sampled_roles
        rollout = self.experiment.rollout
        copied: dict[str, ModelSpec] = {}
        if isinstance(rollout, Async):
            copied = {role: specs[role] for role in ahead if not samples_externally(specs[role])}
        groups: list[WorkerGroup] = []
        for group in plan_groups(self.experiment):
            if group.name != ROLLOUT:
                # start all groups before waiting for any, so that their imports overlap
                groups.append(self._start_workers(group, {role: specs[role] for role in group.roles}, seed))
            elif copied:
                self._rollout = self._start_workers(group, copied, seed, callers=MOST_CALLS)
                groups.append(self._rollout)
        list(self._threads.map(WorkerGroup.ready, groups))

        def load(group: WorkerGroup) -> list[Model]:
            if group is self._rollout and isinstance(rollout, Async):
                group.load_copies(copied, seed, recompute=rollout.recompute)
                return []
            loaded = group.load({role: specs[role] for role in group.group.roles}, seed)
            return [_model(role, group, ranks, seed) for role, ranks in loaded.items()]

        models = {model.name: model for loaded in self._threads.map(load, groups) for model in loaded}
        return {role: models[role] for role in specs}

    def _background_sampler(self, rollout: Async, role: str) -> Sampler:
        if (external := self.models[role].external_sampler) is not None:
            return external
        assert self._rollout is not None
        return RemoteSampler(role, self._rollout)

    def _start_workers(
        self, group: RoleGroup, specs: Mapping[str, ModelSpec], seed: int, *, callers: int = 1
    ) -> WorkerGroup:
        """Start the processes for the models of `specs`, and return without waiting for them."""
        gpu = _wants_gpu(list(specs.values()))
        room = reserve(group, self._spec, gpu=gpu)
        # released after the workers are killed: a stack runs the last callback first
        self._workers.callback(remove_placement_group, room)
        # a single process gets as many threads as the driver, so that its sums round as with runtime=local
        threads = torch.get_num_threads() if callers > 1 else max(1, torch.get_num_threads() // group.devices)
        setup = Setup(os.getcwd(), tuple(sys.path), threads, seed, callers)
        workers = WorkerGroup(group, self._spec, room, setup, gpu=gpu)
        self._workers.callback(workers.kill)
        return workers

    @override
    def _calls(
        self, rpcs: Sequence[RPC], batch: SequenceSample, values: dict[str, float], draw: int = 0
    ) -> SequenceSample:
        """Start each call as soon as its dependencies are done.

        Results are merged in the order of the graph, independent of completion order. The calls of one role run one
        after another, because its interface may be stateful.
        """
        waits_for = _dependencies(rpcs, self.experiment.graph.edges)
        results: dict[str, CallResult] = {}
        running: dict[Future[CallResult], RPC] = {}

        def batch_so_far() -> SequenceSample:
            """Return the batch with all keys so far, in the order in which `LocalRuntime` adds them."""
            merged = batch
            for rpc in rpcs:
                if rpc.name in results and rpc.outputs:
                    merged = merged.merge(results[rpc.name].batch.select(rpc.outputs))
            return merged

        with ExitStack() as stack:
            steps: dict[str, StepsTogether] = {}
            for calls in steps_together(rpcs) if self.experiment.skip_together else []:
                names = [rpc.name for rpc in calls]
                if len(calls) > 1:
                    steps |= dict.fromkeys(names, stack.enter_context(StepsTogether(names, in_turns=False)))

            def make_call(rpc: RPC, batch: SequenceSample) -> CallResult:
                if rpc.name not in steps:
                    return self._call(rpc, batch, draw)
                with steps[rpc.name].join(rpc.name, self.models[rpc.model].engine):
                    return self._call(rpc, batch, draw)

            while len(results) < len(rpcs):
                started = {rpc.name for rpc in running.values()} | results.keys()
                ready = [rpc for rpc in rpcs if rpc.name not in started and waits_for[rpc.name] <= results.keys()]
                if len(ready) == 1 and not running:  # in this thread, so that breakpoints in interfaces work
                    results[ready[0].name] = make_call(ready[0], batch_so_far())
                    continue
                running |= {self._threads.submit(make_call, rpc, batch_so_far()): rpc for rpc in ready}
                done = wait(running, return_when=FIRST_COMPLETED).done
                # raise the cause first
                for future in sorted(done, key=lambda f: isinstance(f.exception(), WorkerLost)):
                    results[running.pop(future).name] = future.result()
        # in the order of the graph again, so that metrics have one order however the calls finished
        for rpc in rpcs:
            self._note(rpc, results[rpc.name], values)
        return batch_so_far()

    def _call(self, rpc: RPC, batch: SequenceSample, draw: int = 0) -> CallResult:
        with counting_hops(rpc.name) as hops:
            result = super()._call(rpc, batch, draw)
        self._waits[rpc.name] = hops.seconds
        return result

    @override
    def _make(self, rpc: RPC, model: Model, batch: SequenceSample) -> SequenceSample:
        """Add the name of the call to the error messages of workers."""
        with counting_hops(rpc.name):
            return super()._make(rpc, model, batch)

    def _note(self, rpc: RPC, made: CallResult, values: dict[str, float]) -> None:
        super()._note(rpc, made, values)
        if self.models[rpc.model].has_engine:
            key = f"time/{rpc.name}_wait_s"
            values[key] = values.get(key, 0.0) + self._waits[rpc.name]

    def close(self) -> None:
        """Kill the workers, and release the resources of the interfaces."""
        try:
            # first: threads of the run that wait for a worker end with an error then, and nothing below waits for them
            self._workers.close()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            super().close()


def reserve(group: RoleGroup, spec: Ray, *, gpu: bool) -> PlacementGroup:
    """Reserve resources of the cluster for all processes of a group, on as few machines as possible.

    Raises:
        ConfigError: The cluster does not have the resources. The message lists required and available resources.
        TransientError: Other jobs on a shared cluster use the resources.
    """
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if gpu else {})
    room = placement_group([bundle] * group.devices, strategy="PACK")
    if room.wait(spec.placement_timeout_s):
        return room
    remove_placement_group(room)
    asked = ", ".join(f"{n * group.devices:g} {name}" for name, n in bundle.items())
    total, free = ray.cluster_resources(), ray.available_resources()
    has = ", ".join(f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in ("CPU", "GPU"))
    message = (
        f"runtime.placement.{group.name}: {group.describe()} needs {asked}, but the cluster has {has} after "
        f"runtime.placement_timeout_s={spec.placement_timeout_s:g}."
    )
    if spec.address is not None and all(total.get(name, 0) >= n * group.devices for name, n in bundle.items()):
        raise TransientError(f"{message} Wait until other jobs release resources.")
    raise ConfigError(f"{message} Use fewer devices, or a larger cluster.")


def _wants_gpu(specs: Sequence[ModelSpec]) -> bool:
    """Return whether a process with these models needs a GPU."""
    devices = [spec.facts().device or "cpu" for spec in specs]
    if any(device.startswith("cuda") for device in devices):
        return True
    return "auto" in devices and ray.cluster_resources().get("GPU", 0) > 0


def _model(role: str, group: WorkerGroup, ranks: Sequence[Loaded], seed: int) -> Model:
    first = ranks[0]
    engine = RayEngine(role, group, ranks)
    return Model(role, engine, first.tokenizer, seed, saved=first.saved, saved_views=first.saved_views)


def _dependencies(rpcs: Sequence[RPC], edges: Mapping[str, Mapping[str, Any]]) -> dict[str, set[str]]:
    """Return the dependencies of each call in `rpcs`: those of the graph and the previous call of the same role."""
    names = {rpc.name for rpc in rpcs}
    dependencies: dict[str, set[str]] = {}
    last_of: dict[str, str] = {}
    for rpc in rpcs:
        dependencies[rpc.name] = edges[rpc.name].keys() & names
        if rpc.model in last_of:
            dependencies[rpc.name].add(last_of[rpc.model])
        last_of[rpc.model] = rpc.name
    return dependencies
