"""Recorded calls: the outputs that a replay of a step cannot compute again, such as rewards and episodes.

The file `calls/step_000037.safetensors` of a run has the calls of step 37, by name: those of reward functions and
judges, which have no model, those of environments and agents, and the batch of asynchronous rollout. Wherever sampling
again would round differently, it also has the other calls that lead to rewards.
"""

from __future__ import annotations

import json
import re
import secrets
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from realign.api import RPC, DataflowGraph, Lengths, Model, SequenceSample
from realign.api.sample import INDEX_KEYS, TOKENS
from realign.errors import CheckpointError
from realign.own_files import make_folder, move, open_new, refuse_link, remove_file
from realign.ranks import current
from realign.records.checkpoint.folder import folder_name
from realign.records.checkpoint.serialize import pack, read_tensors, unpack, write_tensors

CALLS = "calls"
"""Name of the folder of recorded calls inside `output_dir`."""
ROLLOUT = "rollout"
"""Name of the entry with the batch of asynchronous rollout."""
_STATE = "state.json"


class RecordedCall(NamedTuple):
    """What a call wrote."""

    batch: SequenceSample
    """The keys that the call wrote."""
    metrics: Mapping[str, float]
    """Metrics of asynchronous rollout; empty for a call."""


def call_key(rpc: RPC, draw: int) -> str:
    """Return the name of an entry: the call, and the number of the batch that dynamic sampling drew."""
    return f"{rpc.name}/{draw}"


def only(batch: SequenceSample, keys: Iterable[str]) -> SequenceSample:
    """Return the batch with these keys, of which it may lack some. `select` would add the images of the prompts."""
    wanted = {*keys}
    wanted |= {*INDEX_KEYS} if TOKENS in wanted else set()
    return SequenceSample(
        batch.ids,
        {key: x for key, x in batch.data.items() if key in wanted},
        {key: cut for key, cut in batch.lengths.items() if key in wanted},
        {key: values for key, values in batch.metadata.items() if key in wanted},
    )


def is_recorded(rpc: RPC, model: Model, graph: DataflowGraph, *, starts_workers: bool) -> bool:
    """Return whether a replay needs the outputs of a call, because it could not compute the same ones.

    `starts_workers` says whether models run in other processes than this one.
    """
    if rpc.method == "train_step":
        return False
    samples = rpc.method == "generate"
    if not model.has_engine or (samples and "rewards" in rpc.outputs):
        return True
    # one process on a CPU samples the same tokens again; other devices and numbers of processes round differently
    exact = not (model.external_sampler or starts_workers or torch.cuda.is_available()) and current().size == 1
    return not exact and (samples or rpc in graph.leading_to("rewards"))


class StepHook:
    """Stands between the steps of a runtime and their calls: sees what a call wrote, or answers in its place.

    This one does neither. A call is named by `call_key`.
    """

    def begin(self, step: int) -> None:
        """Start a step."""

    def answer(self, key: str, batch: SequenceSample | None = None) -> RecordedCall | None:
        """Return what a call on `batch` writes, or `ROLLOUT` without a batch; None lets the runtime compute it."""
        return None

    def on_call(self, key: str, rpc: RPC, model: Model, batch: SequenceSample) -> None:
        """Receive the batch with what a call wrote; from several threads with runtime=ray."""

    def on_rollout(self, batch: SequenceSample, metrics: Mapping[str, float]) -> None:
        """Receive what asynchronous rollout gave to the step."""

    def end(self, step: int) -> None:
        """Finish a complete step; on rank 0 only."""


class CallRecorder(StepHook):
    """Writes the calls of each step that a replay needs."""

    def __init__(self, run: Path, graph: DataflowGraph, *, starts_workers: bool) -> None:
        """Record into the folder of a run; see `is_recorded`."""
        self._run, self._graph, self._starts_workers = run, graph, starts_workers
        self._calls: dict[str, RecordedCall] = {}

    @override
    def begin(self, step: int) -> None:
        self._calls = {}

    @override
    def on_call(self, key: str, rpc: RPC, model: Model, batch: SequenceSample) -> None:
        if is_recorded(rpc, model, self._graph, starts_workers=self._starts_workers):
            self._calls[key] = RecordedCall(only(batch, rpc.outputs), {})

    @override
    def on_rollout(self, batch: SequenceSample, metrics: Mapping[str, float]) -> None:
        self._calls[ROLLOUT] = RecordedCall(batch, metrics)

    @override
    def end(self, step: int) -> None:
        # emptied, or it would keep tensors of this step on their device
        calls, self._calls = self._calls, {}
        write_calls(self._run, step, calls)


def recorded_calls_path(run: Path, step: int) -> Path:
    """Return the file with the calls of a step."""
    return run / CALLS / f"{folder_name(step)}.safetensors"


def write_calls(run: Path, step: int, calls: Mapping[str, RecordedCall]) -> None:
    """Write the calls of a step.

    A failed write, such as on a full disk, is a warning: the run is not affected.
    """
    if not calls:
        return
    path = recorded_calls_path(run, step)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        content = {key: {"batch": batch_tree(made.batch), "metrics": dict(made.metrics)} for key, made in calls.items()}
        state, tensors, _ = pack(dict(sorted(content.items())), copy=False)
        tensors[_STATE] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        make_folder(path.parent)
        refuse_link(path.parent)
        with open_new(temporary) as file:
            write_tensors(file.write, tensors, {"format": "pt"})
        move(temporary, path)
    except (OSError, ValueError) as error:
        with suppress(OSError):  # a read-only folder refuses even to remove a file that does not exist
            remove_file(temporary)
        warnings.warn(f"{path} was not written ({error}). A replay of step {step} makes its calls again.", stacklevel=2)


def remove_later_calls(run: Path, step: int) -> None:
    """Remove the calls of steps after a step, from which a run is continued, since it may not make them again."""
    if (run / CALLS).is_symlink():  # it may lead to the calls of another run
        return
    kept = {recorded_calls_path(run, earlier).name for earlier in range(step + 1)}
    for path in (run / CALLS).glob("step_*.safetensors"):
        if path.name not in kept and re.fullmatch(r"step_\d{6,}\.safetensors", path.name):
            remove_file(path)


def read_calls(run: Path, step: int) -> dict[str, RecordedCall]:
    """Return the calls of a step by name; empty if none were recorded.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = recorded_calls_path(run, step)
    if not path.is_file():
        return {}
    try:
        tensors = read_tensors(path)
        state = json.loads(tensors.pop(_STATE).numpy().tobytes())
        return {
            key: RecordedCall(batch_of(entry["batch"]), entry["metrics"])
            for key, entry in unpack(state, tensors).items()
        }
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}. Remove the file to make the calls of the step again.") from error


def batch_tree(batch: SequenceSample) -> dict[str, Any]:
    """Return a batch as plain values and tensors."""
    cuts = list({id(cut): cut for cut in batch.lengths.values()}.values())
    index = {id(cut): i for i, cut in enumerate(cuts)}
    return {
        "ids": list(batch.ids),
        "data": {key: x.detach() for key, x in batch.data.items()},
        # copies, because torch warns about read-only arrays
        "lengths": [[torch.from_numpy(array.copy()) for array in (cut.counts, cut.flat)] for cut in cuts],
        "lengths_of": {key: index[id(cut)] for key, cut in batch.lengths.items()},
        "metadata": {key: list(values) for key, values in batch.metadata.items()},
    }


def batch_of(tree: Any) -> SequenceSample:
    """Return the batch from which `batch_tree` made a tree."""
    cuts = [Lengths(counts.numpy(), flat.numpy()) for counts, flat in tree["lengths"]]
    return SequenceSample(
        tuple(tree["ids"]),
        tree["data"],
        {key: cuts[i] for key, i in tree["lengths_of"].items()},
        {key: tuple(values) for key, values in tree["metadata"].items()},
    )
