"""The chain of a run: hashes of each step and checkpoint, so that a later change of the run is found and located.

Each line of `chain.jsonl` is a link: at the start of an attempt the settings and the environment, after a step its
prompts, samples, rewards, gradient norms and record files, and after a checkpoint its files. `link` is the sha256 of
the line and of the link before it, so a line can't be changed or removed without all that follow.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from realign.api import DataflowGraph, SequenceSample
from realign.errors import CheckpointError
from realign.runtime.checkpoint.folder import CHECKPOINTS, Checkpoint, CorruptCheckpoint, facts_of, folder_name
from realign.runtime.checkpoint.saved_models import FINAL
from realign.runtime.checkpoint.schema import Count, FilePath, Hash, Number, Text
from realign.runtime.metrics.records import Records
from realign.runtime.recorded_calls import recorded_calls_path

CHAIN = "chain.jsonl"
Chained: TypeAlias = Literal["metrics", "samples", "eval_samples", "tokens"]
CHAINED: tuple[Chained, ...] = get_args(Chained)
"""Record files whose lines of each step are in its link."""


class _Link(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, regex_engine="python-re")

    link: Hash


class StartLink(_Link):
    """The start of an attempt."""

    kind: Literal["start"]
    step: Count
    """Finished steps."""
    settings: Hash
    """Hash of the settings of training."""
    environment: dict[Text, Text | Number]
    checkpoint: dict[FilePath, Hash]
    """Files of the checkpoint from which the attempt continues; empty for none."""


class StepLink(_Link):
    """A step."""

    kind: Literal["step"]
    step: Count
    hashes: dict[Literal["batch", "samples", "rewards"], Hash]
    grad_norm: dict[Text, Number | None]
    records: dict[Chained, tuple[Count, Hash]]
    """Size in bytes and sha256 of each record file up to this step."""
    calls: Hash | None
    """Hash of the file of recorded calls; None if there is none."""


class CheckpointLink(_Link):
    """A checkpoint that has been written."""

    kind: Literal["checkpoint"]
    step: Count
    files: dict[FilePath, Hash]


class FinalLink(_Link):
    """The saved models at the end of the run."""

    kind: Literal["final"]
    step: Count
    files: dict[FilePath, Hash]


Link: TypeAlias = StartLink | StepLink | CheckpointLink | FinalLink
_LINK: TypeAdapter[Link] = TypeAdapter(Annotated[Link, Field(discriminator="kind")])


class Chain:
    """Appends the links of a run to its chain."""

    def __init__(self, records: Records) -> None:
        """Continue the chain in the record files of a run."""
        self._records = records
        lines = records.chain.path.read_bytes().splitlines()
        try:
            self._last = str(json.loads(lines[-1])["link"]) if lines else ""
        except (ValueError, LookupError, TypeError):  # damaged: `verify` says so, and the run goes on
            self._last = ""

    def start(self, step: int, settings: str, environment: Mapping[str, Any], checkpoint: Mapping[str, str]) -> None:
        """Add the start of an attempt after `step` finished steps."""
        self._add("start", step, settings=settings, environment=dict(environment), checkpoint=dict(checkpoint))

    def step(
        self,
        step: int,
        graph: DataflowGraph,
        batch: SequenceSample,
        metrics: Mapping[str, float],
        calls: str | None,
    ) -> None:
        """Add a step, whose records have been written. The tensors of the batch are copied to the host."""
        files = {name: self._records.files[name] for name in CHAINED}
        self._add(
            "step",
            step,
            hashes=step_hashes(graph, batch),
            grad_norm=gradient_norms_of(metrics),
            records={name: [file.size, file.sha256] for name, file in files.items()},
            calls=calls,
        )

    def checkpoint(self, step: int, files: Mapping[str, str]) -> None:
        """Add a checkpoint, whose files have these hashes."""
        self._add("checkpoint", step, files=dict(files))

    def final(self, step: int, files: Mapping[str, str]) -> None:
        """Add the models that were saved after the last step."""
        self._add("final", step, files=dict(files))

    def _add(self, kind: str, step: int, **content: Any) -> None:
        record = {"kind": kind, "step": step, **content}
        self._last = _linked(self._last, record)
        self._records.chain.write(record | {"link": self._last})


def _linked(last: str, record: Mapping[str, Any]) -> str:
    """Return the link of a record after the link `last`."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(f"{last}{text}".encode()).hexdigest()


def step_hashes(graph: DataflowGraph, batch: SequenceSample) -> dict[str, str]:
    """Return the hashes of the prompts, the sampled sequences and the rewards of a step."""
    rewards = {key for key in batch.data if key in ("rewards", "dense_rewards") or key.startswith("rewards/")}
    sampled = {key for rpc in graph.order if rpc.method == "generate" for key in rpc.outputs} - rewards
    parts = {"batch": {*graph.dataset_keys} - rewards, "samples": sampled, "rewards": rewards}
    return {name: _hash(batch, keys & batch.data.keys()) for name, keys in parts.items()}


def _hash(batch: SequenceSample, keys: Iterable[str]) -> str:
    digest = hashlib.sha256(repr(batch.ids).encode())
    for key in sorted(keys):
        x, lengths = batch[key].detach().cpu().contiguous(), batch.lengths[key]
        digest.update(f"{key} {x.dtype} {list(x.shape)}\n".encode())
        digest.update(lengths.counts.tobytes() + lengths.flat.tobytes())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data if x.numel() else b"")
    return digest.hexdigest()


def gradient_norms_of(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return the gradient norms of a step; one that is not finite is None."""
    norms = {name: float(x) for name, x in metrics.items() if name.rpartition("/")[2] == "grad_norm"}
    return {name: x if math.isfinite(x) else None for name, x in norms.items()}


def settings_hash(settings: Mapping[str, str]) -> str:
    """Return the hash of the settings of training, see `training_settings`."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read_chain(run: Path) -> list[Link]:
    """Return the links of a run.

    Raises:
        CheckpointError: the run has no chain, or a link is broken. The message names the line and the step.
    """
    path = run / CHAIN
    if not path.is_file():
        raise CheckpointError(f"{path}: the run has no chain, because an earlier version of realign wrote it.")
    links = list[Link]()
    last = ""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        after = f" (after step {links[-1].step})" if links else ""
        try:
            record = json.loads(line)
            link = _LINK.validate_json(line)
            expected = _linked(last, {key: value for key, value in record.items() if key != "link"})
        except (ValidationError, ValueError, RecursionError, AttributeError) as error:
            raise CheckpointError(f"{path}, line {number}{after}: this is no link of a chain.") from error
        if link.link != expected:
            raise CheckpointError(
                f"{path}, line {number} ({link.kind} {link.step}): the link does not follow from the line and the link "
                "before it. The line was changed, or a line before it was removed."
            )
        links.append(link)
        last = link.link
    if not any(isinstance(link, StartLink) for link in links):
        raise CheckpointError(f"{path}: the chain has no start.")
    return links


def broken_files(run: Path, links: Sequence[Link], forked: int = 0) -> Iterator[str]:
    """Yield a sentence for each file of a run that differs from its chain.

    Args:
        run: folder of the run.
        links: its chain.
        forked: last step of the parent of a fork, whose recorded calls and checkpoints are in the parent's folder.
    """
    steps = [link for link in links if isinstance(link, StepLink)]
    for name in CHAINED:
        if (step := _first_changed(run / f"{name}.jsonl", [(s.step, *s.records[name]) for s in steps])) is not None:
            yield f"{name}.jsonl: its lines of step {step} or of the evaluation before it were changed"
    for link in steps:
        path = recorded_calls_path(run, link.step)
        if link.calls is None or link.step <= forked:
            continue
        if not path.is_file():
            yield f"{path.relative_to(run)}: the recorded calls of step {link.step} are gone"
        elif hashlib.sha256(path.read_bytes()).hexdigest() != link.calls:
            yield f"{path.relative_to(run)}: the recorded rewards or samples of step {link.step} were changed"
    for step, files in checkpoint_hashes(links).items():
        checkpoint = Checkpoint(run / CHECKPOINTS / folder_name(step), step)
        if not checkpoint.path.is_dir():
            continue  # older than those that the run keeps
        try:
            present = checkpoint.hashes()
            checkpoint.check_files()
        except CorruptCheckpoint as error:
            yield str(error)
            continue
        changed = [name for name in files if present.get(name) != files[name]]
        if changed:
            yield f"{checkpoint.path.relative_to(run)}/{changed[0]}: changed after step {step} wrote it"
    if finals := [link for link in links if isinstance(link, FinalLink)]:
        files = finals[-1].files if (run / FINAL).is_dir() else {}
        for file, sha256 in files.items():
            path = run / FINAL / file
            if not path.is_file() or facts_of(path)["sha256"] != sha256:
                yield f"{FINAL}/{file}: the saved model was changed"


def same_settings_since(links: Iterable[Link]) -> int:
    """Return the step after which all steps were taken with the settings of the last attempt."""
    starts = [link for link in links if isinstance(link, StartLink)]
    return [*takewhile(lambda start: start.settings == starts[-1].settings, reversed(starts))][-1].step


def checkpoint_hashes(links: Iterable[Link]) -> dict[int, dict[str, str]]:
    """Return the hashes of the files of each checkpoint by step; the last ones if a step was taken again."""
    hashes = {}
    for link in links:
        if isinstance(link, CheckpointLink):
            hashes[link.step] = link.files
        elif isinstance(link, StartLink) and link.checkpoint:
            hashes[link.step] = link.checkpoint
    return hashes


def differing(
    link: StepLink,
    graph: DataflowGraph,
    batch: SequenceSample,
    metrics: Mapping[str, float],
    tolerance: float = 0.0,
) -> list[str]:
    """Return what a recomputed step has other values of than its link, in the order of cause.

    Args:
        link: the link of the step.
        graph: the graph of the run.
        batch: the batch of the recomputed step.
        metrics: its metrics.
        tolerance: largest relative difference of gradient norms that counts as equal.
    """
    hashes = step_hashes(graph, batch)
    parts = [name for name in ("batch", "samples", "rewards") if hashes[name] != link.hashes[name]]
    norms = gradient_norms_of(metrics)
    for name, then in link.grad_norm.items():
        now = norms.get(name)
        if now != then and (now is None or then is None or abs(now - then) > tolerance * abs(then)):
            parts.append(f"{name} ({now}, was {then})")
    return parts


def _first_changed(path: Path, steps: list[tuple[int, int, str]]) -> int | None:
    """Return the first of the steps (step, size, sha256) up to which the content of a file has another hash."""
    digest, end = hashlib.sha256(), 0
    content = path.read_bytes() if path.is_file() else b""
    for step, size, sha256 in steps:
        digest.update(content[end:size])
        end = max(end, size)
        if len(content) < size or digest.hexdigest() != sha256:
            return step
    return None


__all__ = [
    "CHAIN",
    "Chain",
    "CheckpointLink",
    "FinalLink",
    "Link",
    "StartLink",
    "StepLink",
    "broken_files",
    "checkpoint_hashes",
    "differing",
    "gradient_norms_of",
    "read_chain",
    "same_settings_since",
    "settings_hash",
    "step_hashes",
]
