"""Open the runtime of an experiment: in this process, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from realign.runtime.experiment import Experiment
from realign.runtime.processes.placement import plan_groups
from realign.runtime.runtime_spec import Ray
from realign.runtime.step import LocalRuntime


@contextmanager
def cluster_for(experiment: Experiment) -> Iterator[None]:
    """Provide what `open_runtime` needs: a cluster connection with runtime=ray, otherwise nothing.

    Raises:
        ValueError: no cluster answers at `runtime.address`.
    """
    if not isinstance(experiment.runtime, Ray):
        yield
        return
    from realign.runtime.ray import connected

    processes = sum(group.devices for group in plan_groups(experiment))
    with connected(experiment.runtime.address, processes):
        yield


def open_runtime(experiment: Experiment) -> LocalRuntime:
    """Load the experiment and return its runtime, ready for the first step."""
    if isinstance(experiment.runtime, Ray):
        from realign.runtime.ray import RayRuntime

        return RayRuntime(experiment, experiment.runtime)
    return LocalRuntime(experiment)
