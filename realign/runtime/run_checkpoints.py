"""Save the state of a run as one tree, and restore it.

The tree contains everything that a step changes, so a resumed run matches an uninterrupted one (bitwise on CPU). It
does not contain frozen weights: models that never change, and the initial policy used as a reference. A resumed run
loads frozen weights from their original path and compares their hash with the saved one.
"""

from __future__ import annotations

import copy
import json
import platform
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch

from realign.api import Model
from realign.engines.cached_logprobs import CachedEngine
from realign.engines.shared_model import ReferenceEngine
from realign.errors import CheckpointError, TransientError
from realign.ranks import current
from realign.records.checkpoint.folder import CHECKPOINTS, CheckpointWriter, Start, describe_failed_write
from realign.records.checkpoint.random_generators import random_state, restore_random
from realign.records.checkpoint.saved_models import FINAL, Saves, hashes_of
from realign.records.checkpoint.schema import MISFIT, load_state, refuse_misfit
from realign.records.checkpoint.serialize import hash_of, tensors_of
from realign.records.metrics.records import Records
from realign.runtime.callbacks.run_callbacks import RunCallbacks
from realign.runtime.checks.before_loading import used_interfaces
from realign.runtime.experiment import CheckpointPart, Experiment
from realign.runtime.local import Counters, LocalRuntime
from realign.runtime.out_of_memory import SMALLER, memory_limited
from realign.version import installed_version, version_of


def run_state(
    runtime: LocalRuntime, frozen: Mapping[str, Any], loop: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the state of a run, without its records and saves.

    Args:
        runtime: Runtime between two steps.
        frozen: Result of `frozen_weights` before the first step.
        loop: Earlier result of `_loop_state`; None for that of now.
    """
    loop = loop or _loop_state(runtime)
    return {
        "realign": installed_version(),
        "environment": environment(),
        "config": config_of(runtime.experiment),
        # a sync changes the weights of a role that does not train, so they are in the checkpoint and not frozen
        "frozen": {role: origin for role, origin in frozen.items() if role not in runtime.sync.syncs},
        "models": {role: _model_state(model, role in runtime.sync.syncs) for role, model in runtime.models.items()},
        **loop,
        "data": loop["data"] | {"sha256": runtime.data_sha256},
    }


def _loop_state(runtime: LocalRuntime) -> dict[str, Any]:
    """Return the part of the state that a step changes before it trains: all but the models."""
    # rollout threads end prompts meanwhile, and a prompt must not be waiting in one of the two states only
    with nullcontext() if runtime.ahead is None else runtime.ahead.paused():
        data = runtime.prompts.state_dict()
        rollout = None if runtime.ahead is None else runtime.ahead.state_dict()
    return {
        "interfaces": interface_states(runtime),
        "random": random_state(),
        "data": data,
        "counters": runtime.counters.state_dict(),
        "rollout": rollout,
    }


def continue_from(
    start: Start, runtime: LocalRuntime, frozen: Mapping[str, Any], skip: Iterable[str] = (), *, ahead: bool = True
) -> None:
    """Let a freshly loaded runtime continue after the step of a checkpoint.

    Args:
        start: the checkpoint.
        runtime: runtime before its first step.
        frozen: result of `frozen_weights`.
        skip: parts of the checkpoint to leave unchanged.
        ahead: whether asynchronous rollout continues; otherwise the steps get their batches from elsewhere.

    Raises:
        CheckpointError: models or data are not those of the checkpoint.
    """
    check_frozen(start.state["frozen"], frozen)
    with memory_limited("restoring the checkpoint", SMALLER):
        restore(runtime, start.state if ahead else {**start.state, "rollout": None}, skip)
    runtime.batches_ahead = runtime.prompts.drawn - start.step


def restore(runtime: LocalRuntime, state: Mapping[str, Any], skip: Iterable[str] = ()) -> None:
    """Restore a freshly loaded runtime to the state that `run_state` returned.

    Args:
        runtime: Runtime before its first step.
        state: Result of `run_state`.
        skip: Parts to leave unchanged.

    Raises:
        CheckpointError: Models or data do not match the state. The message names the mismatch.
    """
    skipped = set(skip)
    _restore_models(runtime, state, skipped)
    if CheckpointPart.interfaces not in skipped:
        _restore_interfaces(runtime, state["interfaces"])
    if CheckpointPart.data not in skipped:
        if state["data"]["sha256"] != runtime.data_sha256:
            raise CheckpointError(
                "data: the rows differ from those of the run that wrote the checkpoint. Use the same file, or set "
                "resume_skip=[data] to start at the beginning of this one."
            )
        with refuse_misfit("data", CheckpointPart.data):
            _restore_place(runtime, state["data"], state["rollout"])
    if CheckpointPart.counters not in skipped:
        runtime.counters = Counters.from_state(state["counters"])
    if CheckpointPart.random not in skipped:  # last, because the code above may draw random numbers
        with refuse_misfit("random", CheckpointPart.random):
            restore_random(state["random"])


def _model_state(model: Model, synced: bool) -> dict[str, Any]:
    trained = model.has_engine and model.engine.capabilities().trainable
    own = {"version": model.version, "engine": model.engine.state_dict() if trained else None}
    return own | ({"weights": model.engine.weights()} if synced else {})


def _restore_models(runtime: LocalRuntime, saved: Mapping[str, Any], skipped: set[str]) -> None:
    states, configs = saved["models"], (saved["config"], config_of(runtime.experiment))
    if differing := sorted(states.keys() ^ runtime.models.keys()):
        where = "the checkpoint" if differing[0] in states else "this run"
        raise CheckpointError(f"models.{differing[0]} is only in {where}. Resume with the same roles.")
    for role, model in runtime.models.items():
        state, trained = states[role], model.has_engine and model.engine.capabilities().trainable
        if (state["engine"] is not None) != trained:
            now, then = ("trains", "did not") if trained else ("does not train", "did")
            raise CheckpointError(
                f"models.{role} {now} in this run, but {then} in the run that wrote the checkpoint. Resume with the "
                "same trained roles."
            )
        if trained:
            with _matching_model(role, *configs):
                model.engine.load_state_dict(state["engine"], weights_only=CheckpointPart.optimizer in skipped)
        if "weights" in state:  # a role that is synced from a trained role
            with _matching_model(role, *configs):
                model.engine.load_weights(state["weights"])
        if CheckpointPart.counters not in skipped:
            model.version = state["version"]
        if model.has_engine:
            # also if `counters` is skipped, since the weights are new
            model.publish_weights(model.version)


def _restore_place(runtime: LocalRuntime, data: Mapping[str, Any], rollout: Mapping[str, Any] | None) -> None:
    """Restore the position in the data, and the prompts that were sampled but not trained on."""
    place = data["drawn"] * data["batch_prompts"] if rollout is None else rollout["next_place"]
    runtime.prompts.load_state_dict(data, place, cut=runtime.ahead is not None)
    if runtime.ahead is not None and rollout is not None:
        runtime.ahead.load_state_dict(rollout)
    elif runtime.ahead is not None:
        runtime.ahead.start_at(place)
    elif rollout is not None and rollout["untrained"]:
        raise CheckpointError(
            f"rollout=sync: the checkpoint contains {len(rollout['untrained'])} prompts of asynchronous rollout that "
            "were not trained on. Keep rollout=async, or set resume_skip=[data] to start at the beginning of the data."
        )


def interface_states(runtime: LocalRuntime) -> dict[str, Any]:
    """Return the state of the interface of each role and of each evaluation."""
    return {name: interface.state_dict() for name, interface in used_interfaces(runtime.experiment).items()}


def _restore_interfaces(runtime: LocalRuntime, states: Mapping[str, Any]) -> None:
    for name, interface in used_interfaces(runtime.experiment).items():
        if name in states or name.startswith("interfaces."):  # an evaluation may be new (resume_allow)
            if name not in states:
                raise CheckpointError(f"{name}: the checkpoint has no state of it. {_skip(CheckpointPart.interfaces)}")
            load_state(name, interface, states[name], skip=CheckpointPart.interfaces)


@contextmanager
def _matching_model(
    role: str, saved: Mapping[str, Any] = MappingProxyType({}), present: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[None]:
    """Name the role of a model that does not match its state in the checkpoint, and its settings that were changed."""
    try:
        yield
    except MISFIT as error:
        before, now = dict(config_leaves(saved)), dict(config_leaves(present))
        changed = [
            f"{key} was {before.get(key, '(none)')}, is {now.get(key, '(none)')}"
            for key in sorted(before.keys() | now.keys())
            if key.startswith(f"models.{role}.") and before.get(key) != now.get(key)
        ]
        detail = "; ".join([*changed, " ".join(f"{type(error).__name__}: {error}".split())[:300]])
        raise CheckpointError(
            f"models.{role} does not match the checkpoint ({detail}). {_skip(CheckpointPart.optimizer)} "
            "Weights cannot be skipped."
        ) from error


def _skip(part: CheckpointPart) -> str:
    return f"Set resume_skip=[{part}] to resume without it."


def config_of(experiment: Experiment) -> dict[str, Any]:
    """Return the config that a resumed run is compared with: the resolved config and the settings of the data order.

    An experiment built in Python has no resolved config.
    """
    own = {"seed": experiment.seed, "batch_prompts": experiment.batch_prompts, "shuffle": experiment.shuffle}
    return own | dict(experiment.resolved)


def config_leaves(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and value (as JSON) of each leaf of a config. An empty mapping is a leaf."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from config_leaves(value, f"{path}.{key}" if path else str(key))
    else:
        # as JSON, so that a value just composed equals the same value read from a checkpoint: a tuple is a list there
        yield path, json.dumps(node, default=str, sort_keys=True)


def environment() -> dict[str, Any]:
    """Return the versions and hardware facts that can change floating-point rounding."""
    # a package without metadata, such as one on PYTHONPATH, has no version
    packages = {name: version_of(name) or "unknown" for name in ("torch", "transformers")}
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        **packages,
        "python": platform.python_version(),
        "device": where,
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
    }


@cache
def _cpu_model() -> str:
    """Return the CPU and the instructions that torch uses on it, which round sums differently."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def frozen_weights(runtime: LocalRuntime) -> dict[str, Any]:
    """Return path and hash of the frozen weights, which checkpoints do not contain.

    The hash of a reference whose log-probs are cached is that of its files, since its weights may not be loaded. If the
    initial policy of a model also serves as a separate frozen role, the hash covers all its weights. Call this
    before the first step and before `restore`.
    """
    origins = {}
    for role, model in runtime.models.items():
        if not model.has_engine:
            continue
        origin = any(isinstance(view.engine, ReferenceEngine) for view in model.views)
        tree = {"fixed": model.engine.fixed_weights(), "trained": model.engine.state_dict() if origin else {}}
        if any(True for _ in tensors_of(tree)):
            path = runtime.experiment.models[role].facts().path
            of_files = {"of_files": True} if isinstance(model.engine, CachedEngine) else {}
            origins[role] = {"path": path, "sha256": hash_of(tree), **of_files}
    return origins


def check_frozen(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Check that the frozen weights are those that the run started with.

    Raises:
        CheckpointError: Weights differ. The message names the role and the path.
    """
    for role, then in saved.items():
        now = present.get(role)
        if now is not None and now.get("of_files") != then.get("of_files"):
            warnings.warn(
                f"models.{role}: its weights are not compared with those that the run started with, since "
                "cache_reference was changed.",
                stacklevel=2,
            )
        elif now is None or now["sha256"] != then["sha256"]:
            where = "" if now is None or now["path"] is None else f" from {now['path']!r}"
            origin = "" if then["path"] is None else f", from {then['path']!r}"
            raise CheckpointError(
                f"models.{role}: the weights loaded{where} differ from those that the run started with (sha256 "
                f"{then['sha256'][:12]}{origin}). Checkpoints do not contain frozen weights. Restore "
                "the original model folder."
            )


class RunCheckpoints:
    """Writes the checkpoints of a run until the context ends. In distributed training each method is a collective.

    Args:
        runtime: Runtime whose state is saved.
        records: Record files of the run, on rank 0. Resuming truncates them to their size at the checkpoint.
        saves: Saved folders of models.
        callbacks: Callbacks of the run.
        frozen: Result of `frozen_weights` before the first step.
    """

    def __init__(
        self,
        runtime: LocalRuntime,
        records: Records | None,
        saves: Saves,
        callbacks: RunCallbacks,
        frozen: Mapping[str, Any],
    ) -> None:
        self._runtime, self._records, self._saves, self._frozen = runtime, records, saves, frozen
        self._callbacks = callbacks
        self._ranks = current()
        self._spec = runtime.experiment.checkpoint
        self._writer: CheckpointWriter | None = None
        if self._spec is not None:
            folder = runtime.experiment.output_dir / CHECKPOINTS
            self._writer = CheckpointWriter(folder, self._spec.keep, self._ranks)
        self._last = time.monotonic()
        self._stalled: dict[str, float] = {}
        self._interfaces: dict[str, Any] | None = None
        self._problems: list[str] = []
        self._complete: int | None = None  # the latest step that this process completed
        self._written: int | None = None
        self._before: dict[str, Any] | None = None  # `_loop_state` before the step in progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if not isinstance(value, KeyboardInterrupt):  # exit at once on an interrupt
            # an error may have ended this rank alone, so then none waits for another
            _warn_of(self._ranks.lead(self.close) if value is None else self.close())

    def begin(self) -> None:
        """Write a checkpoint before the first step, so that a run can always be resumed."""
        if self._writer is not None:
            self._write(self._writer, 0)
            # the run continues from this checkpoint if a worker dies in the first step, so it must be on disk before
            self._writer.close()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Complete a step in this context. If it fails before it changes weights, `keep` can write the step before."""
        if self._writer is not None and self._complete is not None:
            # a copy, since the step goes on changing what it contains
            self._before = copy.deepcopy(_loop_state(self._runtime))
        yield
        self._before, self._complete = None, step

    def after_step(self, step: int) -> None:
        """Write a checkpoint if one is due, or if this is the best step so far."""
        if self._spec is None or self._writer is None:
            return
        # rank 0 decides: clocks differ between ranks, and a checkpoint is a collective
        best = self._saves.best_step == step
        if self._ranks.broadcast(best or self._spec.due(step, time.monotonic() - self._last)):
            self._write(self._writer, step)

    def keep(self) -> list[str] | None:
        """Write the checkpoint of the last complete step, and wait for it; it may be there already.

        Returns:
            The errors that were not reported before; None if there is nothing to write, or if the step in progress has
            begun to change the weights.
        """
        if self._writer is None or self._complete is None:
            return None
        if self._before is not None and self._runtime.models_changed():
            return None
        if self._written != self._complete:
            self._write(self._writer, self._complete)
        return self._ranks.lead(self.close)

    def finish(self, step: int) -> None:
        """Write the last checkpoint, with the hashes of `final`.

        Its existence shows that the run is complete and its models are saved.
        """
        if self._writer is not None:
            folder = self._runtime.experiment.output_dir / FINAL
            files = self._ranks.lead(partial(hashes_of, folder))
            self._write(self._writer, step, {"final": files})

    def metrics(self) -> dict[str, float]:
        """Return `time/checkpoint_s` once after each checkpoint, for the metrics of the following step."""
        stalled, self._stalled = self._stalled, {}
        return stalled

    def keep_interfaces(self) -> None:
        """Store the current interface state for the next checkpoint, regardless of later changes."""
        self._interfaces = interface_states(self._runtime)

    def close(self) -> list[str]:
        """Wait until the last checkpoint is written, and return the errors that were not reported before."""
        if self._writer is not None:
            self._writer.close()
        return self._take_problems()

    def _write(self, writer: CheckpointWriter, step: int, of_saves: Mapping[str, Any] | None = None) -> None:
        started = time.perf_counter()
        _warn_of(f"{problem} Training continues." for problem in self._take_problems())
        try:
            with memory_limited(f"checkpoint at step {step}", SMALLER):
                state = run_state(self._runtime, self._frozen, self._before)
            state["callbacks"] = self._callbacks.state_dict()
            state["saves"] = self._saves.state_dict() | dict(of_saves or {})
            if self._records is not None:  # on rank 0, which writes the state
                state["records"] = self._records.state_dict()
            if self._interfaces is not None:
                # the last checkpoint has the state before the calibration after training: a resume that saves `final`
                # again repeats it
                state["interfaces"] = self._interfaces
            writer.write(step, state, best=self._saves.best_step)
            self._written = step
        except (OSError, TransientError, ValueError) as error:  # full disk; interface state that cannot be serialized
            self._problems.append(describe_failed_write(step, error))
        self._last = time.monotonic()
        self._stalled = {"time/checkpoint_s": time.perf_counter() - started}

    def _take_problems(self) -> list[str]:
        problems, self._problems = self._problems, []
        return problems + (self._writer.take_failures() if self._writer is not None else [])


def _warn_of(problems: Iterable[str]) -> None:
    for problem in problems:
        warnings.warn(problem, stacklevel=3)
