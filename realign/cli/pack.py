"""`realign pack RUN STEP -o step.zip`, and `realign replay step.zip`: a step of a run in one file."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realign.cli.earlier_run import check_writable, chosen_out, experiment_of, run_and_step
from realign.config.errors import ConfigError
from realign.config.words import TARGET
from realign.report.files import json_object
from realign.text import visible

if TYPE_CHECKING:
    from realign.api import Model
    from realign.runtime.packed_step import PackedCall, PackedWeights

CLEARED = ("path", "tokenizer", "sampler", "sharding", "device", "trust_remote_code", "adapter")
"""Fields of a packed model that its folder replaces, or that another machine decides."""
TOLERANCE = 1e-4
"""Largest relative difference of metrics that counts as equal: the micro-batches of a step are summed at once."""


def pack(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `realign pack RUN STEP -o step.zip`: recompute a step, and write all that its losses read."""
    from realign.config.experiment import as_node
    from realign.rewards.pool.secrets import looks_secret
    from realign.runtime.packed_step import StepCapture, finite, without_paths, write_pack
    from realign.runtime.replay import replay
    from realign.runtime.run_checkpoints import environment
    from realign.version import installed_version

    chosen = chosen_out(args.out)
    run, step = run_and_step("pack", words)
    out = chosen or run / f"{run.name}-step{step}.zip"
    if out.exists():
        raise ConfigError(f"--out {out}: this file exists. Choose another name.")
    check_writable(out.parent)
    experiment = experiment_of(run)
    nodes = {
        key: {role: without_paths(as_node(part), looks_secret) for role, part in getattr(experiment, key).items()}
        for key in ("interfaces", "models")
    }
    captures: list[StepCapture] = []

    def around(runtime: Any) -> Any:
        captures.append(StepCapture(runtime, nodes, weights=args.weights))
        return captures[0].capturing()

    replayed = replay(experiment, run, step, around=around)
    (capture,) = captures
    unknown = sorted({name for call in capture.calls for name in call["unknown"]})
    if unknown and not args.weights:
        raise ConfigError(f"The loss of this step reads {unknown[0]} of the network. Set --weights to pack the model.")
    folders = {}
    for role in capture.states:
        folder = Path(experiment.models[role].facts().path or "")
        if not folder.is_dir():
            raise ConfigError(f"--weights: models.{role}.path={folder} is not a folder. Pack without --weights.")
        folders[role] = folder
    about = {
        "realign": installed_version(),
        "step": step,
        "run": run.name,
        "versions": dict(json_object(run / "run.json").get("versions") or {}),
        "environment": environment(),
        "settings": without_paths(experiment.resolved, looks_secret),
        "metrics": finite(replayed.metrics),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_pack(out, about, capture, folders)
    contains = "with the weights" if args.weights else "without weights"
    print(f"step {step} of {visible(str(run))}, {contains}: {visible(str(out))} ({out.stat().st_size / 1e6:.1f} MB)")
    print(
        f"it contains token ids of prompts and responses, no paths and no secrets: realign replay {visible(out.name)}"
    )
    return 0


def replay_pack(path: Path, tolerance: float) -> int:
    """Run `realign replay step.zip`: compute the losses of a packed step, and compare its metrics."""
    from realign.api import Model
    from realign.runtime.packed_step import PackedEngine, differing_metrics, opened_pack, replay_call

    tolerance = tolerance or TOLERANCE
    wrong = 0
    with opened_pack(path) as (step, folders):
        versions = ", ".join(f"{name} {value}" for name, value in step.environment.items())
        print(visible(f"step {step.step} of {step.run}, packed by realign {step.realign} ({versions})"))
        loaded: dict[str, Model] = {}
        for call in step.calls:
            interface = _interface(call)
            if call.role in step.weights and call.role not in loaded:
                loaded[call.role] = _model(call, step.weights[call.role], folders[call.role])
            model = loaded.get(call.role) or Model(call.role, PackedEngine(call), None, call.seed, call.version)
            metrics = replay_call(call, interface, model)
            differing = differing_metrics(metrics, call.metrics, tolerance)
            shared = len(metrics.keys() & call.metrics.keys())
            how = "with its weights" if call.role in loaded else "from the outputs of its network"
            told = f"{shared - len(differing)} of {shared} metrics equal up to {tolerance:g}"
            print(visible(f"{call.role}: recomputed {how}, loss {metrics.get('loss', float('nan')):.6g}, {told}"))
            for name, now, then in differing:
                print(visible(f"  {name}: {now:.9g}, was {then:.9g}"))
            wrong += len(differing) or not shared  # nothing in common is no agreement
    return 2 if wrong else 0


def _interface(call: PackedCall) -> Any:
    from realign.api import ModelInterface
    from realign.config.construct import build

    check_targets(call.interface, f"interfaces.{call.role}")
    return build(call.interface, ModelInterface, f"interfaces.{call.role}")


def _model(call: PackedCall, weights: PackedWeights, folder: Path) -> Model:
    """Load a packed model, from its own folder only."""
    from realign.api import ModelSpec
    from realign.config.construct import build
    from realign.runtime.checkpoint.schema import check_engine
    from realign.runtime.run_checkpoints import matching_model

    where = f"models.{call.role}"
    node = {key: value for key, value in weights.model.items() if key not in CLEARED} | {"path": str(folder)}
    check_targets(node, where)
    check_engine(call.role, weights.state)
    model = build(node, ModelSpec, where).load(call.role, seed=call.seed)
    with matching_model(call.role):
        model.engine.load_state_dict(weights.state)
    model.move_to(call.version)
    return model


def check_targets(node: Any, where: str) -> None:
    """Check that a node from somebody else constructs only classes of realign, and optimizers of torch.

    Raises:
        ConfigError: it names another class, such as one of the user who packed the step.
    """
    from realign.engines import TorchOptimizer

    for component in _components(node):
        target = str(component[TARGET])
        module, _, name = target.rpartition(".")
        known = module.startswith(("realign.interfaces.", "realign.engines.", "realign.api."))
        cls = None
        # this runs only modules of realign, and a class that one of them imports from elsewhere is no match
        with suppress(ImportError):
            cls = getattr(import_module(module), name, None) if known and "__" not in module else None
        own = inspect.isclass(cls) and cls.__module__ == module
        if own and cls is TorchOptimizer:
            target = str(component.get("of"))  # which it imports
            own = target.startswith("torch.optim.")
        if not own:
            raise ConfigError(
                f"{where}: the pack names {target}, which is no class of realign, so it is not constructed. Replay "
                "the step in the run that packed it."
            )


def _components(node: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(node, Mapping):
        if TARGET in node:
            yield node
        for value in node.values():
            yield from _components(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _components(value)


__all__ = ["check_targets", "pack", "replay_pack"]
