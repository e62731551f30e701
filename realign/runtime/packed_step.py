"""A packed step: one zip file from which the loss of a step is computed again, without its run and without a model.

The file contains `pack.json` and `tensors.safetensors`: for each call that trained, its batch, the settings and the
state of its interface, and the outputs of the network that its loss read. On request it also contains the model folder
and the optimizer of each trained role. It is read as hostile input: fixed names, sizes limited, a schema, no pickle,
and only classes of realign are constructed.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, InstanceOf
from torch import Tensor
from typing_extensions import override

from realign.api import MicroBatchSpec, Model, ModelInterface, SequenceSample, merge_stats, stat_values
from realign.api.engine import (
    EngineCapabilities,
    LossFn,
    LossWeightFn,
    ModelOutput,
    PipelinableEngine,
    PostHook,
    StepIf,
)
from realign.api.generation import GenerationConfig
from realign.api.stats import LossStats, Mean, Stats
from realign.engines.files.folders import check_name
from realign.errors import CheckpointError, ConfigError
from realign.runtime.checkpoint.schema import Config, Count, State, Text, check, load_state
from realign.runtime.checkpoint.serialize import pack, read_tensors, unpack, write_tensors
from realign.runtime.local import LocalRuntime
from realign.runtime.recorded_calls import batch_of, batch_tree, only

PACK, TENSORS, WEIGHTS = "pack.json", "tensors.safetensors", "weights"
LARGEST_JSON = 64 << 20
"""Bytes of `pack.json` above which a file is refused."""
MODEL_FILE = re.compile(r"[A-Za-z0-9][\w.-]*\.(json|safetensors|txt|model|jinja)")
"""Names of the files of a model folder that are packed and read: no code and no pickle."""
_TOKEN, _SEQUENCE = "packed_token", "packed_sequence"
"""Keys with the place of each token and sequence in its mini-batch, by which outputs of micro-batches are joined."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Batch(_Strict):
    ids: list[Text | int | tuple[Text | int, ...]]
    data: dict[Text, InstanceOf[Tensor]]
    lengths: list[Annotated[list[InstanceOf[Tensor]], Field(min_length=2, max_length=2)]]
    lengths_of: dict[Text, Count]
    metadata: State


class _Split(_Strict):
    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] | None
    n_microbatches: Annotated[int, Field(ge=1)]


class PackedCall(_Strict):
    """A call that trained."""

    role: Text
    version: Count
    seed: int
    interface: Config
    """Config node of the interface."""
    state: State
    """State of the interface before the call."""
    batch: _Batch
    microbatch: _Split
    eos_token_ids: list[int]
    outputs: list[dict[Text, InstanceOf[Tensor]]]
    """For each optimizer step, the outputs of the network that the loss read."""
    unknown: list[Text]
    """Outputs that the loss read and that are not packed, such as the logits of the whole vocabulary."""
    metrics: dict[Text, float]


class PackedWeights(_Strict):
    """A trained model."""

    model: Config
    """Config node of the model."""
    state: State
    """State of the engine before the step."""


class PackedStep(_Strict):
    """The content of a packed step."""

    format: Literal[1]
    realign: Text
    step: Count
    run: Text
    """Name of the run."""
    versions: dict[Text, Text]
    environment: dict[Text, Text | int | float]
    settings: Config
    """Settings of the run, without paths and secrets; for readers, nothing is constructed from them."""
    metrics: dict[Text, float]
    calls: Annotated[list[PackedCall], Field(min_length=1)]
    weights: dict[Text, PackedWeights]


# --- writing ----------------------------------------------------------------------------------------------------------


class StepCapture:
    """What a step's training calls received and returned, collected while `capturing`."""

    def __init__(self, runtime: LocalRuntime, nodes: Mapping[str, Mapping[str, Any]], *, weights: bool) -> None:
        """Prepare to capture the next step.

        Args:
            runtime: runtime before the step.
            nodes: config nodes, by `interfaces` and `models`, then by role.
            weights: whether to keep the state of the trained models.
        """
        self.calls: list[dict[str, Any]] = []
        self.states: dict[str, dict[str, Any]] = {}
        self._runtime, self._nodes, self._weights = runtime, nodes, weights

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture the training calls inside this context."""
        interfaces = {r.model: self._runtime.interfaces[r.model] for r in self._runtime.graph.rpcs}
        trained = {rpc.model for rpc in self._runtime.graph.rpcs if rpc.method == "train_step"}
        for role in trained:
            setattr(interfaces[role], "train_step", self._watched(role, interfaces[role]))  # noqa: B010
        try:
            yield
        finally:
            for role in trained:
                del interfaces[role].__dict__["train_step"]

    def _watched(self, role: str, interface: ModelInterface) -> Any:
        train_step = interface.train_step

        def watched(model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
            capabilities = model.engine.capabilities()
            call = {
                "role": role,
                "version": model.version,
                "seed": model.seed,
                "interface": self._nodes["interfaces"][role],
                "state": pack_copy(interface.state_dict()),
                "batch": batch_tree(only(data.to("cpu"), data.data)),
                "microbatch": {
                    "max_tokens_per_microbatch": mb_spec.max_tokens_per_microbatch,
                    "n_microbatches": mb_spec.n_microbatches,
                },
                "eos_token_ids": list(capabilities.eos_token_ids),
                "outputs": [],
                "unknown": [],
            }
            if self._weights and role not in self.states:
                state = pack_copy(model.engine.state_dict())
                self.states[role] = {"model": self._nodes["models"][role], "state": state}
            with _recording_outputs(model.engine, call):
                stats = train_step(model, data, mb_spec)
            call["metrics"] = finite(stat_values(stats))
            self.calls.append(call)
            return stats

        return watched


def pack_copy(tree: Mapping[str, Any]) -> Any:
    """Return a copy of a tree on the host, which training cannot change."""
    state, tensors, parts = pack(tree, copy=True)
    if parts:
        raise ConfigError("A packed step needs its weights in one process. Replay the run without torchrun.")
    return unpack(state, tensors)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are finite."""
    return {name: float(x) for name, x in metrics.items() if math.isfinite(x)}


@contextmanager
def _recording_outputs(engine: PipelinableEngine, call: dict[str, Any]) -> Iterator[None]:
    """Add the outputs that the losses of each optimizer step read to `call`."""
    train_batch = engine.train_batch

    def recording(
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        step_if: StepIf | None = None,
    ) -> Stats:
        outputs: dict[str, Tensor] = {}
        call["outputs"].append(outputs)
        device = data["input_ids"].device
        marked = data.with_tokens(**{_TOKEN: torch.arange(len(data["input_ids"]), device=device)})
        marked = marked.with_sequences(**{_SEQUENCE: torch.arange(data.n_sequences, device=device)})
        lock = threading.Lock()  # an engine computes micro-batches in several threads

        def loss(output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, LossStats]:
            return loss_fn(_Recorder(output, minibatch, marked, outputs, call["unknown"], lock), minibatch)

        return train_batch(marked, mb_spec, loss, loss_weight_fn, step_if)

    setattr(engine, "train_batch", recording)  # noqa: B010
    try:
        yield
    finally:
        del engine.__dict__["train_batch"]


class _Recorder:
    """Output of a network that keeps what a loss reads."""

    def __init__(
        self,
        output: ModelOutput,
        minibatch: SequenceSample,
        whole: SequenceSample,
        outputs: dict[str, Tensor],
        unknown: list[str],
        lock: threading.Lock,
    ) -> None:
        self._output, self._outputs, self._unknown, self._lock = output, outputs, unknown, lock
        self._minibatch, self._batch = minibatch, whole

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if name not in self._unknown:
                self._unknown.append(name)
        return getattr(self._output, name)

    def logprobs(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> Tensor:
        x = self._output.logprobs(temperature=temperature, where_T=where_T)
        return self._keep(f"logprobs at {temperature:g}", x, _TOKEN, where_T)

    def logprobs_and_entropy(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logprobs, entropy = self._output.logprobs_and_entropy(temperature=temperature, where_T=where_T)
        self._keep(f"entropy at {temperature:g}", entropy, _TOKEN, where_T)
        return self._keep(f"logprobs at {temperature:g}", logprobs, _TOKEN, where_T), entropy

    def values(self) -> Tensor:
        return self._keep("values", self._output.values(), _TOKEN)

    def scores(self) -> Tensor:
        return self._keep("scores", self._output.scores(), _SEQUENCE)

    def _keep(self, name: str, x: Tensor, place: str, where: Tensor | None = None) -> Tensor:
        places, values = self._minibatch[place].cpu(), x.detach().float().cpu()
        if where is not None:
            places, values = places[where.cpu()], values[where.cpu()]
        with self._lock:
            kept = self._outputs.setdefault(name, torch.zeros(len(self._batch[place])))
            kept[places] = values
        return x


def write_pack(path: Path, about: Mapping[str, Any], capture: StepCapture, folders: Mapping[str, Path]) -> None:
    """Write a packed step.

    Args:
        path: the zip file, which must not exist.
        about: the fields of `PackedStep` that are not of the capture.
        capture: the captured step.
        folders: model folder of each role whose state was captured.
    """
    content = {"format": 1, **about, "calls": capture.calls, "weights": capture.states}
    state, tensors, _ = pack(content, copy=False)
    try:
        with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
            archive.writestr(PACK, json.dumps(state, allow_nan=False, indent=1))
            with archive.open(TENSORS, "w", force_zip64=True) as file:
                write_tensors(file.write, tensors, {"format": "pt"})
            for role, folder in folders.items():
                for source in sorted(folder.iterdir()):
                    if source.is_file() and MODEL_FILE.fullmatch(source.name):
                        archive.write(source, f"{WEIGHTS}/{role}/{source.name}")
    except BaseException as error:  # such as a full disk or Ctrl-C
        if not isinstance(error, FileExistsError):
            path.unlink(missing_ok=True)
        raise


PATH = re.compile(r"[/\\~]|\.(py|jsonl?|ya?ml|csv|parquet|arrow|txt|safetensors)(:|$)")
"""Text that is a path, an address, or the name of a file."""


def without_paths(node: Any, is_secret: Callable[[str], bool], key: str = "") -> Any:
    """Return settings in which paths, addresses, and texts of keys with secret names are replaced."""
    if isinstance(node, Mapping):
        return {str(name): without_paths(value, is_secret, str(name)) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [without_paths(value, is_secret, key) for value in node]
    if isinstance(node, str) and is_secret(key):
        return "(secret)"
    return "(path)" if isinstance(node, str) and PATH.search(node) else node


# --- reading ----------------------------------------------------------------------------------------------------------


@contextmanager
def opened_pack(path: Path) -> Iterator[tuple[PackedStep, dict[str, Path]]]:
    """Read a packed step, and yield its content and the model folder of each role with weights.

    Raises:
        CheckpointError: the file is no packed step, or is damaged. The message names the problem.
    """
    with tempfile.TemporaryDirectory(prefix="realign-pack-") as scratch:
        try:
            with zipfile.ZipFile(path) as archive:
                step, folders = _read(archive, Path(scratch))
        except (zipfile.BadZipFile, OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{path}: this is no packed step ({error})") from error
        yield step, folders


def _read(archive: zipfile.ZipFile, scratch: Path) -> tuple[PackedStep, dict[str, Path]]:
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len({*names}) != len(names) or not {PACK, TENSORS} <= {*names}:
        raise ValueError(f"expected one {PACK} and one {TENSORS}")
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
        raise ValueError("its files are compressed or encrypted")
    size = sum(entry.file_size for entry in entries)
    # entries can share their bytes, so that a small pack would fill the disk
    if archive.filename is None or size > Path(archive.filename).stat().st_size:
        raise ValueError("its files are larger than itself")
    if size > shutil.disk_usage(scratch).free:
        raise ValueError("it is larger than the free disk space")
    if archive.getinfo(PACK).file_size > LARGEST_JSON:
        raise ValueError(f"{PACK} has more than {LARGEST_JSON >> 20} MiB")
    with archive.open(TENSORS) as source, (scratch / TENSORS).open("xb") as copy:
        shutil.copyfileobj(source, copy)
    tree = unpack(json.loads(archive.read(PACK)), read_tensors(scratch / TENSORS))
    check(PackedStep, tree, PACK)
    step = PackedStep.model_validate(tree)
    folders: dict[str, Path] = {}
    for role in step.weights:
        check_name("the role", role)
        folders[role] = scratch / f"{WEIGHTS}-{role}"
        folders[role].mkdir()
    for name in names:
        if name in (PACK, TENSORS):
            continue
        top, _, rest = name.partition("/")
        role, _, file = rest.partition("/")
        if top != WEIGHTS or role not in folders or not MODEL_FILE.fullmatch(file):
            raise ValueError(f"it contains {name!r}")
        with archive.open(name) as source, (folders[role] / file).open("xb") as copy:
            shutil.copyfileobj(source, copy)
    return step, folders


class _PackedOutput:
    """Output of a network, from its recorded values."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.leaves = {name: x.clone().requires_grad_() for name, x in values.items()}

    def logprobs(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> Tensor:
        return self._at(f"logprobs at {temperature:g}", where_T)

    def logprobs_and_entropy(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._at(f"logprobs at {temperature:g}", where_T), self._at(f"entropy at {temperature:g}", where_T)

    def values(self) -> Tensor:
        return self._at("values")

    def scores(self) -> Tensor:
        return self._at("scores")

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"The loss reads {name!r} of the network, which only a step packed with --weights can compute."
        )

    def _at(self, name: str, where: Tensor | None = None) -> Tensor:
        if name not in self.leaves:
            raise CheckpointError(f"The pack has no {name} of the network, which the loss reads.")
        x = self.leaves[name]
        return x if where is None else torch.where(where, x, 0)


class PackedEngine(PipelinableEngine):
    """Engine without a network: it calls losses with the recorded outputs, and takes no optimizer step."""

    def __init__(self, call: PackedCall) -> None:
        self._outputs = list(call.outputs)
        self._eos = tuple(call.eos_token_ids)
        self.gradients: list[dict[str, Tensor]] = []
        """For each optimizer step, the gradient of the loss with respect to each output."""

    @override
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(frozenset({"logprobs", "values", "scores"}), trainable=True, eos_token_ids=self._eos)

    @override
    def train_batch(
        self,
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        step_if: StepIf | None = None,
    ) -> Stats:
        if len(self.gradients) == len(self._outputs):
            raise CheckpointError("The interface takes more optimizer steps than are packed. Was it changed?")
        output = _PackedOutput(self._outputs[len(self.gradients)])
        weight = loss_weight_fn(data)
        self.gradients.append({})
        if float(weight) == 0:
            return {}
        sizes = {len(data["input_ids"]), data.n_sequences}
        if any(len(x) not in sizes for x in output.leaves.values()):
            raise CheckpointError("The mini-batches have other sizes than the packed ones. Was the interface changed?")
        loss, stats = loss_fn(output, data)
        if loss.requires_grad:
            found = torch.autograd.grad(loss / weight, list(output.leaves.values()), allow_unused=True)
            named = zip(output.leaves, found, strict=True)
            self.gradients[-1] = {name: gradient for name, gradient in named if gradient is not None}
        merged = merge_stats([stats])
        if step_if is not None:
            step_if(merged)
        return {**merged, "loss": Mean(loss.detach(), weight)}

    @override
    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        raise ConfigError("The training call runs the network, which only a step packed with --weights can do.")

    @override
    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        raise ConfigError("The training call samples, which only a step packed with --weights can do.")

    @override
    def weights(self) -> dict[str, Tensor]:
        return {}

    @override
    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        raise ConfigError("a packed step without weights has no network")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}

    @override
    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        raise ConfigError("a packed step without weights has no network")

    @override
    def save(self, path: Path) -> None:
        raise ConfigError("a packed step without weights has no network")


def replay_call(call: PackedCall, interface: ModelInterface, model: Model) -> dict[str, float]:
    """Repeat a training call with `model`, whose engine may be a `PackedEngine`, and return its metrics.

    Raises:
        CheckpointError: the content of the pack does not fit the interface.
    """
    try:
        if call.state:
            load_state(f"interfaces.{call.role}", interface, call.state, skip="interfaces")
        batch = batch_of(dict(call.batch))
        split = MicroBatchSpec(call.microbatch.max_tokens_per_microbatch, call.microbatch.n_microbatches)
        return stat_values(interface.train_step(model, batch, split))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"interfaces.{call.role}: the packed call cannot be repeated ({why[:300]})") from error


SMALL = 1e-3
"""Absolute value below which differences of metrics are compared as of this one."""


def differing_metrics(
    recomputed: Mapping[str, float], packed: Mapping[str, float], tolerance: float
) -> Sequence[tuple[str, float, float]]:
    """Return name and both values of each metric in both that differs by more than a relative tolerance.

    The tolerance of values below `SMALL` is that of `SMALL`: differences of rounding have no scale there.
    """
    shared = [name for name in packed if name in recomputed]
    return [
        (name, recomputed[name], packed[name])
        for name in shared
        # not `>`, which is False for NaN
        if not abs(recomputed[name] - packed[name]) <= tolerance * max(SMALL, abs(packed[name]))
    ]


__all__ = [
    "PackedCall",
    "PackedEngine",
    "PackedStep",
    "PackedWeights",
    "StepCapture",
    "differing_metrics",
    "finite",
    "opened_pack",
    "replay_call",
    "without_paths",
    "write_pack",
]
