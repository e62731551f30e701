"""`run`: load an experiment and train it, and continue from the last checkpoint after a worker died."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType

from rich.console import Console

from realign.api import Callback
from realign.api.sampler import samples_externally
from realign.console import lasting_console
from realign.errors import CheckpointError, ConfigError
from realign.models.files.folders import check_name, restore_interrupted_saves
from realign.ranks import Ranks, current
from realign.records.checkpoint.folder import Start
from realign.records.checkpoint.random_generators import seed_random
from realign.records.metrics.samples import show_lines, show_row
from realign.records.metrics.trackers import Tracker
from realign.runtime.checks.before_loading import check_ready, try_interfaces, used_interfaces
from realign.runtime.experiment import Experiment
from realign.runtime.local import LocalRuntime
from realign.runtime.output_folder import alone_in, check_output_folder
from realign.runtime.processes.agreement import check_same_data, check_same_settings
from realign.runtime.processes.placement import plan_groups
from realign.runtime.processes.watchdog import Watch, WorkerLost, watch_for
from realign.runtime.resume import Attempts, find_start
from realign.runtime.run_report import RunReport
from realign.runtime.runtime_spec import Ray
from realign.runtime.training import RunResult, TrainingLoop


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


def run(
    experiment: Experiment,
    *,
    console: Console | None = None,
    trackers: Iterable[Tracker] = (),
    callbacks: Mapping[str, Callback] = MappingProxyType({}),
    watch: Watch | None = None,
    command: Sequence[str] | None = None,
    begin: Callable[[], str] | None = None,
    load: Callable[[Experiment], LocalRuntime] = open_runtime,
) -> RunResult:
    """Load everything, train for `experiment.steps`, evaluate and save; see `Experiment` for the settings.

    In the main thread, a signal (`realign.signals`) stops the run after the current step, once a checkpoint is written.

    In a torch.distributed group every rank calls this with the same experiment. Rank 0 writes the files. Rank 0 also
    decides everything that depends on a clock, a disk or a signal. With runtime=ray, a run whose worker died
    continues from its last checkpoint.

    Args:
        experiment: the settings of the run.
        console: where progress is shown; None shows nothing.
        trackers: additional receivers of the metrics; the caller closes them.
        callbacks: callbacks besides those of the experiment, by name. With runtime=ray, a run that recovers from a
            lost worker continues with copies of them.
        watch: receives the current operation, and any error before resources are closed.
        command: words of the command line that started the run, for the commands that the summary suggests.
        begin: called when the checks have passed, before anything is loaded or written. It returns text for the start
            of realign.log, such as the launch table.
        load: loads the experiment; `realign fork` takes steps again with a runtime that has their recorded calls.

    Returns:
        The metrics of all steps, the output folder and held-out samples.

    Raises:
        RealignError: the experiment, its data or the checkpoint is invalid, another run is active in the same folder,
            or the run cannot continue. The message contains the cause.
        Interrupted: a signal stopped the run; the message contains the last step.
    """
    experiment = _with_callbacks(experiment, callbacks)
    ranks, watch, trackers = current(), watch or watch_for(experiment.runtime), tuple(trackers)
    check_ranks(experiment, ranks)
    check_same_settings(experiment, ranks)
    check_ready(experiment)  # first, since another output_dir would not repair a mistake in a setting
    ranks.lead(partial(check_output_folder, experiment))
    attempts = Attempts(experiment)
    training: TrainingLoop | None = None
    # the commands in the summary add `resume=auto` themselves
    report = RunReport(None if command is None else [word for word in command if not word.startswith("resume=")])
    # Only rank 0 has `begin`, but all ranks open interfaces together.
    if ranks.broadcast(begin is not None):
        try_interfaces(experiment)  # one that cannot be opened is reported before the launch table
    if begin is not None:
        report.log.write(begin())
    with lasting_console(console), report.log.capturing() if ranks.leader else nullcontext():
        while True:
            try:
                # each attempt connects to a new cluster: the failure that killed a worker may have killed the cluster
                # errors are reported before resources are closed
                with cluster_for(experiment), ExitStack() as stack, watch.report_errors():
                    training = _open_run(attempts.experiment, load, ranks, watch, console, trackers, report, stack)
                    attempts.began()
                    return training.run()
            except WorkerLost as lost:
                try:
                    attempts.recover(lost)
                except WorkerLost as last:
                    if training is not None:
                        training.report_error(last)
                    raise


def _with_callbacks(experiment: Experiment, callbacks: Mapping[str, Callback]) -> Experiment:
    """Return the experiment with further callbacks.

    Raises:
        ConfigError: a name is invalid, or the experiment has a callback of this name.
    """
    for name in callbacks:
        check_name("callbacks:", name)
        if name in experiment.callbacks:
            raise ConfigError(f"callbacks.{name}: the experiment has a callback of this name. Choose another name.")
    return dataclasses.replace(experiment, callbacks={**experiment.callbacks, **callbacks})


@contextmanager
def _status(console: Console | None, text: str) -> Iterator[None]:
    """Show what the run is doing."""
    # rich's spinner needs ipywidgets in a notebook, and warns without them
    status = None if console is None or console.is_jupyter else console.status(text)
    if status is not None:
        status.start()
    try:
        yield
    finally:
        if status is not None:
            status.stop()


def _open_run(
    experiment: Experiment,
    load: Callable[[Experiment], LocalRuntime],
    ranks: Ranks,
    watch: Watch,
    console: Console | None,
    trackers: Iterable[Tracker],
    report: RunReport,
    stack: ExitStack,
) -> TrainingLoop:
    """Lock the output folder, load the run and restore it; `stack` closes it."""

    def hold() -> None:
        stack.enter_context(alone_in(experiment.output_dir))
        restore_interrupted_saves(experiment.output_dir)

    # lock before a checkpoint is chosen; a new folder is made only after loading, so that a start that fails leaves
    # none
    if is_there := ranks.lead(experiment.output_dir.is_dir):
        ranks.lead(hold)
    start = find_start(experiment)
    _check_start(start, ranks)
    # after `begin` has opened and closed the interfaces, which may draw numbers: a run must not depend on it
    seed_random(experiment.seed)
    with _status(console if ranks.leader else None, "loading models and data"):
        runtime = load(experiment)
    stack.callback(runtime.close)
    runtime.watch = watch
    check_same_data(runtime.datasets.by_key(), ranks)
    if console is not None:
        show_row(console, runtime.first_row(), runtime.dataset.describe())
        show_lines(console, [f"Known answers: {line}" for line in runtime.known_answers])
    if experiment.cached_roles:
        with _status(console if ranks.leader else None, "scoring the rows with the reference"):
            cached = runtime.cache_references(resumed=start is not None and start.own)
        if console is not None:
            show_lines(console, [f"Reference: {line}" for line in cached])
    ranks.lead(partial(experiment.output_dir.mkdir, parents=True, exist_ok=True))
    if not is_there:
        ranks.lead(hold)
    return TrainingLoop(runtime, start, console, trackers, report, stack)


def check_ranks(experiment: Experiment, ranks: Ranks) -> None:
    """Check that the settings work under torchrun.

    Raises:
        ConfigError: several processes do not support a setting.
    """
    if ranks.size == 1:
        return
    if experiment.runtime.starts_workers:
        raise ConfigError("runtime=ray: it starts its own processes. Start the run without torchrun.")
    for rpc in experiment.graph.leading_to("rewards") if experiment.rollout.ahead else ():
        owner = experiment.owner_of(rpc.model)
        sampled = owner in experiment.sampled_roles
        if experiment.interfaces[rpc.model].needs_engine and not (
            sampled and samples_externally(experiment.models[owner])
        ):
            cure = f"Set models.{owner}.sampler=vllm or sglang" if sampled else "Set rollout=sync"
            raise ConfigError(
                f"rollout=async: under torchrun, RPC {rpc.name!r} would need all ranks for models.{owner} while they "
                f"train. {cure}, or runtime=ray."
            )
    for where, interface in used_interfaces(experiment).items():
        if interface.plan().single_requests:
            raise ConfigError(
                f"{where}: {type(interface).__name__} does not work under torchrun, because its requests to the "
                "sampler come one at a time. Start the run without torchrun, or set runtime=ray."
            )


def _check_start(start: Start | None, ranks: Ranks) -> None:
    """Check that all ranks found the same checkpoint.

    Raises:
        CheckpointError: they found different ones.
    """
    paths = ranks.gather(None if start is None else str(start.checkpoint.path))
    for rank, path in enumerate(paths):
        if path != paths[0]:
            raise CheckpointError(
                f"resume: rank 0 found checkpoint {paths[0]}, but rank {rank} found {path}. Put output_dir and the "
                "path in resume on a disk that all machines share."
            )
