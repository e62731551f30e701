"""The state of a run as one tree, and the way back: what a checkpoint holds, and when it may be gone on from.

Everything that a step changes is in it, so that a run that is killed and resumed computes what it would have computed
(bit for bit on a CPU). What no step changes is not: models that are not trained, and the frozen start of one that is,
are loaded from where they came from, and their weights compared with those of then.
"""

from __future__ import annotations

import hashlib
import json
import platform
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realign.api import Model, ModelInterface
from realign.data.dataset import PackedTokens
from realign.engines.shared import ReferenceEngine
from realign.runtime.checkpoints import Checkpoint, list_checkpoints, newest
from realign.runtime.experiment import AUTO, CHECKPOINTS, Experiment, Part
from realign.runtime.local import Counters, LocalRuntime

FREE = (
    "checkpoint",
    "evaluation.every_steps",
    "keep_saves",
    "name",
    "output_dir",
    "overwrite",
    "print_samples_every_steps",
    "ratio_tolerance",
    "resume",
    "resume_allow",
    "resume_skip",
    "sample_prompts",
    "save_best",
    "save_every_steps",
    "steps",
    "strict_ratio",
    "threads",
    "trackers",
)
"""Keys of the config that change nothing of what is trained: they may differ between a checkpoint and the run."""

ABSENT = "(none)"


@dataclass(frozen=True)
class Start:
    """Where a resumed run starts."""

    checkpoint: Checkpoint
    state: Mapping[str, Any]
    own: bool
    """Whether the checkpoint is one of this run's own folder, whose record goes on."""
    anew: bool
    """Whether this is a new run, which counts from step 0 and takes over no record."""

    @property
    def step(self) -> int:
        """Steps that lie behind."""
        return 0 if self.anew else self.checkpoint.step

    @property
    def run(self) -> Path:
        """The folder of the run that wrote the checkpoint."""
        return self.checkpoint.path.parent.parent


def find_start(experiment: Experiment) -> Start | None:
    """The checkpoint that `experiment.resume` asks for, read and compared with the config; None: there is none yet.

    Raises:
        ValueError: there is no checkpoint at that path, none can be read, it is of another config, or no step is left.
    """
    if experiment.resume is None:
        return None
    found = _find(experiment)
    if found is None:
        return None
    checkpoint, state = found
    anew = Part.counters in experiment.resume_skip
    if not anew and checkpoint.step >= experiment.steps:
        raise ValueError(
            f"nothing is left to do: {checkpoint.path} is of step {checkpoint.step}, and steps={experiment.steps}; "
            "give more steps to go on"
        )
    check_config(state["config"], config_of(experiment), experiment.resume_allow)
    warn_of_another_environment(state["environment"])
    return Start(checkpoint, state, experiment.owns(checkpoint.path), anew)


def _find(experiment: Experiment) -> tuple[Checkpoint, dict[str, Any]] | None:
    def warn(message: str) -> None:
        warnings.warn(message, stacklevel=2)

    assert experiment.resume is not None
    if experiment.resume == AUTO:
        return newest(experiment.output_dir / CHECKPOINTS, warn)
    path = Path(experiment.resume).expanduser().resolve()
    if not path.is_dir():
        raise ValueError(f"resume={experiment.resume!r} is no folder; give auto, a checkpoint, or the folder of a run")
    for checkpoint in list_checkpoints(path.parent):
        if checkpoint.path == path:
            return checkpoint, checkpoint.read()
    for folder in (path / CHECKPOINTS, path):
        if (found := newest(folder, warn)) is not None:
            return found
    raise ValueError(f"resume={experiment.resume!r} holds no checkpoint (checkpoints/step_000010, say)")


# --- the state of a run ---


def run_state(runtime: LocalRuntime, frozen: Mapping[str, Any]) -> dict[str, Any]:
    """What the steps so far have made of a run, but for its records and saves.

    Args:
        runtime: between two steps.
        frozen: what `frozen_weights` gave before the first step.
    """
    return {
        "realign": version("realign"),
        "environment": environment(),
        "config": config_of(runtime.experiment),
        "frozen": dict(frozen),
        "models": {role: _model_state(model) for role, model in runtime.models.items()},
        "interfaces": interface_states(runtime),
        "random": random_state(),
        "data": runtime.prompts.state_dict() | {"sha256": data_hash(runtime.dataset)},
        "counters": runtime.counters.state_dict(),
    }


def restore(runtime: LocalRuntime, state: Mapping[str, Any], skip: Iterable[str] = ()) -> None:
    """Bring a runtime that was just loaded to where `run_state` was taken.

    Args:
        runtime: before its first step.
        state: what `run_state` gave.
        skip: parts that stay as they are.

    Raises:
        ValueError: models, interfaces or data do not fit the state; says which, and how.
    """
    skipped = set(skip)
    _restore_models(runtime, state["models"], skipped)
    if Part.interfaces not in skipped:
        _restore_interfaces(runtime, state["interfaces"])
    if Part.data not in skipped:
        if state["data"]["sha256"] != data_hash(runtime.dataset):
            raise ValueError(
                "data: the rows are not those of the run that wrote the checkpoint; give it the same file, or start at "
                "the beginning of this one by resume_skip=[data]"
            )
        runtime.prompts.load_state_dict(state["data"])
    if Part.counters not in skipped:
        runtime.counters = Counters.from_state(state["counters"])
    if Part.random not in skipped:  # last: nothing above may draw from them
        restore_random(state["random"])


def _model_state(model: Model) -> dict[str, Any]:
    trained = model.engine is not None and model.engine.trainable
    return {"version": model.version, "engine": model.machine.state_dict() if trained else None}


def _restore_models(runtime: LocalRuntime, states: Mapping[str, Any], skipped: set[str]) -> None:
    if differing := sorted(states.keys() ^ runtime.models.keys()):
        where = "the checkpoint" if differing[0] in states else "this run"
        raise ValueError(f"models: role {differing[0]!r} is only in {where}, so that the rest cannot go on")
    for role, model in runtime.models.items():
        state, trained = states[role], model.engine is not None and model.engine.trainable
        if (state["engine"] is not None) != trained:
            now, then = ("trains", "did not") if trained else ("does not train", "did")
            raise ValueError(f"models.{role} {now} in this run, and {then} in the one that wrote the checkpoint")
        if trained:
            with _fitting(f"models.{role}", Part.optimizer):
                model.machine.load_state_dict(state["engine"], weights_only=Part.optimizer in skipped)
        if Part.counters not in skipped:
            model.version = state["version"]
        if model.engine is not None:
            model.machine.start_step(model.version)


def interface_states(runtime: LocalRuntime) -> dict[str, Any]:
    """The state of the interface of each role, and of those that judge held-out responses."""
    return {name: interface.state_dict() for name, interface in _interfaces(runtime).items()}


def _restore_interfaces(runtime: LocalRuntime, states: Mapping[str, Any]) -> None:
    for name, interface in _interfaces(runtime).items():
        if name in states:
            with _fitting(name, Part.interfaces):
                interface.load_state_dict(states[name])


def _interfaces(runtime: LocalRuntime) -> dict[str, ModelInterface]:
    roles = dict.fromkeys(rpc.model for rpc in runtime.experiment.graph.rpcs)
    evaluation = runtime.experiment.evaluation
    found = {f"interfaces.{role}": runtime.interfaces[role] for role in roles}
    judges = [] if evaluation is None else evaluation.judges
    return found | {f"evaluation judge {i}": judge for i, judge in enumerate(judges)}


@contextmanager
def _fitting(what: str, part: Part) -> Iterator[None]:
    """Say whose state it is that does not fit."""
    try:
        yield
    except (ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{what}: what the checkpoint holds does not fit ({detail[:300]}); resume_skip=[{part}] leaves it out, "
            "unless it is the weights that differ"
        ) from error


def random_state() -> dict[str, Any]:
    """Where the global random number generators stand."""
    kind, words, place = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "python": [kind, list(words), place],
        "numpy": {
            **{key: value for key, value in numpy.items() if key != "state"},
            "key": numpy["state"]["key"].tolist(),
            "pos": int(numpy["state"]["pos"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random(state: Mapping[str, Any]) -> None:
    """Take back what `random_state` gave; the devices of now that were not there then stay as they are."""
    kind, words, place = state["python"]
    random.setstate((kind, tuple(words), place))
    numpy = dict(state["numpy"])
    numpy["state"] = {"key": np.array(numpy.pop("key"), dtype=np.uint32), "pos": numpy.pop("pos")}
    np.random.set_state(numpy)
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)


# --- what must be as it was ---


def config_of(experiment: Experiment) -> dict[str, Any]:
    """What a resumed run is compared with: the resolved config; of a script, the settings that order the data."""
    own = {name: getattr(experiment, name) for name in ("seed", "batch_prompts", "shuffle")}
    return own | dict(experiment.resolved)


def check_config(saved: Mapping[str, Any], present: Mapping[str, Any], allow: Iterable[str]) -> None:
    """Refuse to go on under a config that would compute something else.

    Args:
        saved: the config that the checkpoint was written under.
        present: the config of now.
        allow: keys that may differ; a key stands for all below it.

    Raises:
        ValueError: names every key that differs, with both values; or one of `allow` is no key of either.
    """
    before, now = dict(_leaves(saved)), dict(_leaves(present))
    known = {key[:end] for key in before | now for end in _ends(key)}
    for key in allow:
        if key not in known:
            near = get_close_matches(key, sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"resume_allow: the config has no key {key!r}{hint}")
    meant = {*FREE, *allow}
    differing = [
        f"{key} was {before.get(key, ABSENT)}, is {now.get(key, ABSENT)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not any(key[:end] in meant for end in _ends(key))
    ]
    if differing:
        raise ValueError(
            f"the checkpoint is of another config: {'; '.join(differing)}. Where that is meant, name the keys in "
            "resume_allow"
        )


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and value (as JSON) of everything in a config that is no mapping with entries."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(node, default=str, sort_keys=True)


def _ends(key: str) -> list[int]:
    """Where the parts of a dotted key end."""
    return [i for i, char in enumerate(key) if char == "."] + [len(key)]


def environment() -> dict[str, Any]:
    """What can change the last bits of a number."""
    packages = {name: version(name) for name in ("torch", "transformers")}
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {**packages, "python": platform.python_version(), "device": where, "threads": torch.get_num_threads()}


def warn_of_another_environment(saved: Mapping[str, Any]) -> None:
    """Say what is not as it was: such a run goes on, but not bit for bit."""
    now = environment()
    differing = [f"{k} was {saved.get(k, ABSENT)}, is {now[k]}" for k in now if saved.get(k) != now[k]]
    if differing:
        warnings.warn(
            f"the run goes on in another environment ({'; '.join(differing)}), so that its numbers may differ in the "
            "last bits from those of a run that was never stopped",
            stacklevel=2,
        )


def frozen_weights(runtime: LocalRuntime) -> dict[str, Any]:
    """Path and hash of the weights that no checkpoint holds: of models that are not trained, and of the start of one
    whose frozen start is a role of its own.

    To be taken before the first step, and before a state is restored.
    """
    found = {}
    for role, model in runtime.models.items():
        if model.engine is None:
            continue
        origin = any(isinstance(view.engine, ReferenceEngine) for view in model.views)
        if (state := model.engine.state_dict()) and (origin or not model.engine.trainable):
            path = getattr(runtime.experiment.models[role], "path", None)
            found[role] = {"path": path, "sha256": hash_of(state)}
    return found


def check_frozen(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse to go on with other weights where the checkpoint has none.

    Raises:
        ValueError: names the role and the path.
    """
    for role, then in saved.items():
        now = present.get(role)
        if now is None or now["sha256"] != then["sha256"]:
            where = "" if now is None else f" from {now['path']!r}"
            raise ValueError(
                f"models.{role}: the weights loaded{where} are not those that the run started with (sha256 "
                f"{then['sha256'][:12]}, from {then['path']!r}), and a checkpoint does not hold what is not trained"
            )


def hash_of(tree: Any) -> str:
    """sha256 of the tensors of a tree, with their places, shapes and dtypes."""
    digest = hashlib.sha256()
    for path, x in _tensors(tree):
        digest.update(f"{path} {x.dtype} {list(x.shape)}\n".encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, inner in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _tensors(inner, f"{path}/{key}")


def data_hash(dataset: Any) -> str | None:
    """sha256 of the tokens of a dataset; None if it does not hold them all."""
    tokens = getattr(dataset, "tokens", None)
    if not isinstance(tokens, PackedTokens):
        return None
    return hashlib.sha256(tokens.ids.tobytes() + tokens.starts.tobytes()).hexdigest()
