"""`WeightFolders`: the weights of a role as files that servers load, in the dtype in which the servers compute.

All ranks write the files together, each its own shards, while the servers still sample with the previous ones.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from realign.api.sampler import WeightSource
from realign.errors import ConfigError, RunError, TransientError
from realign.models.files.folders import AVERAGED
from realign.models.files.weight_files import Header
from realign.models.parts import is_part, part_of, writes
from realign.ranks import Ranks
from realign.samplers.servers.worker.realign_worker import (
    MODEL_FILES,
    bits,
    changes,
    digest,
    map_file,
    map_folder,
)

GUARD = Path(__file__).with_name("guard.py")
BUCKET = 2**30
"""Bytes of the weights in one file, unless a single weight has more."""
BASE = "base"
_SHARED_MEMORY = Path("/dev/shm")
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"
_INDEX = "model.safetensors.index.json"
_DELTA, _UNFINISHED = "_delta", "_unfinished"
_ALIGNED = 64


@runtime_checkable
class HasAdapter(Protocol):
    """A source of weights that can save its LoRA adapters alone."""

    @property
    def adapter_rank(self) -> int | None:
        """Rank of the adapters; None if the model has none."""
        ...

    def save_adapter(self, path: Path) -> None:
        """Write an adapter folder of peft."""
        ...

    def save_base(self, path: Path) -> None:
        """Write a model folder with the weights of the base model."""
        ...


@runtime_checkable
class _HasShards(Protocol):
    """A source of weights that can return those of this rank without gathering them."""

    def shards(self) -> Mapping[str, Tensor]:
        """Return this rank's shards (`DTensor`) of the weights by name, and the weights that are not sharded."""
        ...


@dataclass(frozen=True)
class Weights:
    """The weights of one update."""

    folder: Path
    """Model folder, or folder of a LoRA adapter."""
    digest: str | None = None
    """See `realign_worker.digest`; None if servers get no deltas."""
    base: str | None = None
    """Digest of the weights to which the delta applies; None if there is no delta."""
    shared: Path | None = None
    """Folder in which servers on other machines find deltas, and `folder` after `publish`; None: where `folder` is."""

    @property
    def delta(self) -> Path:
        """Folder of the delta."""
        return (self.shared or self.folder.parent) / f"{self.folder.name}{_DELTA}"

    def publish(self) -> Path:
        """Return the folder for servers, after copying it to where they find it. Not thread-safe."""
        if self.shared is None:
            return self.folder
        published = self.shared / self.folder.name
        # A copy that is complete has its final name, so that an attempt that failed halfway is made again.
        if not published.exists():
            unfinished = self.shared / f"{self.folder.name}{_UNFINISHED}"
            with _full_disk(published):
                shutil.rmtree(unfinished, ignore_errors=True)
                shutil.copytree(self.folder, unfinished)
                unfinished.rename(published)
        return published


class WeightFolders:
    """Writes the weights of a role for servers. All ranks call its `write` methods, in the same order."""

    def __init__(
        self, parent: str | None, ranks: Ranks | None = None, *, untie: bool = False, deltas: bool = False
    ) -> None:
        """Create the folder, which only this user can read, and which is removed when the run ends, however it ends.

        Args:
            parent: folder in which it is created; None: shared memory if the system has it, or the temporary folder.
            ranks: the processes of the run; None: this one.
            untie: whether to write tied output embeddings as separate weights.
            deltas: whether to write what changed since the previous update too. The weights are then in shared memory,
                and `parent` gets deltas, and the weights only if a server needs all of them.

        Raises:
            ConfigError: the folder cannot be created.
        """
        self._ranks = ranks or Ranks()
        self._untie, self._deltas = untie, deltas
        self._shared = self._ranks.lead(lambda: _new_folder(parent)) if deltas and parent is not None else None
        self.root = self._ranks.lead(lambda: _new_folder(None if deltas else parent))
        self._guard: subprocess.Popen[bytes] | None = None
        if self._ranks.leader:
            remove = [sys.executable, str(GUARD), "--remove", *map(str, self._roots())]
            self._guard = subprocess.Popen(remove, stdin=subprocess.PIPE, start_new_session=True)
        self.dtype: torch.dtype | None = None
        """Dtype in which the servers compute, as rank 0 knows it; None: keep that of the trainer."""
        self._has_shards: bool | None = None
        self._like: dict[str, Tensor] = {}  # weights without memory: names, shapes, and the dtypes of the trainer
        self._latest: Weights | None = None

    def _roots(self) -> list[Path]:
        return [self.root] if self._shared is None else [self.root, self._shared]

    def write(self, source: WeightSource, number: int) -> Weights:
        """Write the weights of an update as a model folder.

        Matrices get the dtype of the servers. Vectors keep that of the trainer: they are few, and servers compute with
        some of them in fp32.

        Raises:
            TransientError: there is not enough space.
            RunError: a weight is not finite.
        """
        folder = self.root / f"update_{number}"
        with _full_disk(folder):
            if self._has_shards:
                assert isinstance(source, _HasShards)
                own = self._write_shards(folder, source.shards())
            else:
                own = self._write_saved(folder, source)
            self._latest = self._compare(folder, own)
        return self._latest

    def _write_saved(self, folder: Path, source: WeightSource) -> dict[str, Tensor]:
        """Let the source write the folder, and convert it; see `_write_shards`."""
        if self._shared is None:
            self._save(folder, source.save)
        else:  # the source may be on another machine
            saved = self._shared / f"{folder.name}_saved"
            self._save(saved, source.save)
            self._ranks.lead(lambda: shutil.move(saved, folder))
        if self._has_shards is None:
            self._has_shards = all(self._ranks.gather(_are_saved(source, folder)))

        def convert() -> None:
            if self._untie:
                untie(folder)
            saved = map_folder(folder)
            self._like = {name: x.to("meta") for name, x in saved.items()}
            if any(x.dtype != self._sent_dtype(x) for x in saved.values()):
                # Under names outside of MODEL_FILES, so that only the new files count. Their mappings stay valid after
                # the rename.
                old = [path.rename(path.with_name(f"saved-{path.name}")) for path in folder.glob(MODEL_FILES)]
                self._create(folder)
                for name, x in map_folder(folder, writable=True).items():
                    x.copy_(saved[name])
                for path in old:
                    path.unlink()

        self._ranks.lead(convert)
        return self._like

    def _write_shards(self, folder: Path, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Write this rank's shards into the files of all ranks, and return the weights of which it wrote a part."""
        latest = self._latest
        assert latest is not None

        def create() -> None:
            shutil.copytree(latest.folder, folder, ignore=shutil.ignore_patterns(MODEL_FILES, _INDEX))
            self._create(folder)

        self._ranks.lead(create)

        def fill() -> dict[str, Tensor]:
            own = {}
            for name, x in map_folder(folder, writable=True).items():
                untied = name == _HEAD and name not in shards
                shard = shards[_embeddings(shards) if untied else name]
                if not writes(shard, self._ranks):
                    continue
                local = (shard.to_local() if is_part(shard) else shard).detach().to(x.dtype).cpu()
                if not local.sum(dtype=torch.float32).isfinite() and not local.isfinite().all():  # a sum is faster
                    raise RunError(f"the weights for the servers were not written: weight {name!r} is not finite")
                _part(x, shard).copy_(local)
                own[name] = shard
            return own

        return self._ranks.together(fill)

    def _create(self, folder: Path) -> None:
        """Create files for the weights, in buckets, with memory or disk space for all of them."""
        buckets: list[dict[str, Tensor]] = []
        space = 0
        for name, x in self._like.items():
            size = x.numel() * self._sent_dtype(x).itemsize
            if space < size:
                buckets.append({})
                space = max(BUCKET, size)
            space -= size
            buckets[-1][name] = x
        files: dict[str, str] = {}
        for i, bucket in enumerate(buckets, 1):
            file = f"model-{i:05d}-of-{len(buckets):05d}.safetensors" if buckets[1:] else "model.safetensors"
            files |= dict.fromkeys(bucket, file)
            facts = {name: (self._sent_dtype(x), x.shape) for name, x in bucket.items()}
            # Aligned, since ranks write through a mapping, where missing space would end the process.
            Header.of(facts, {"format": "pt"}, aligned=_ALIGNED).create(folder / file, 0o600)
        if buckets[1:]:
            (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")
        else:
            (folder / _INDEX).unlink(missing_ok=True)

    def _sent_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype in which servers get a weight of the trainer."""
        return self.dtype if self.dtype is not None and x.is_floating_point() and x.ndim > 1 else x.dtype

    def _compare(self, folder: Path, own: Mapping[str, Tensor]) -> Weights:
        """Return the weights of a folder, after all ranks have written what changed in their own part of it."""
        latest = self._latest
        if not self._deltas:
            return Weights(folder)
        result = Weights(folder, self._ranks.lead(lambda: digest(map_folder(folder))), shared=self._shared)

        if latest is None:
            return result

        def has_same_dtypes() -> bool:
            old = map_folder(latest.folder)
            return all(old[name].dtype == x.dtype for name, x in map_folder(folder).items())

        # The first weights have the dtype of the trainer, because no server has reported its own yet.
        if not self._ranks.lead(has_same_dtypes):
            return result
        self._ranks.lead(lambda: result.delta.mkdir(mode=0o700))

        def compare() -> None:
            old, new = map_folder(latest.folder), map_folder(folder)
            changed: dict[str, Tensor] = {}
            for name, shard in own.items():
                changed |= changes(name, _part(old[name], shard), _part(new[name], shard), new[name])
            save_file(changed, result.delta / f"model-{self._ranks.rank:05d}.safetensors")

        self._ranks.together(compare)
        # In fp32 an update changes nearly every value, and a delta also has to say where.
        smaller = self._ranks.lead(lambda: size_of(result.delta) < size_of(folder))
        return replace(result, base=latest.digest) if smaller else result

    def write_adapter(self, source: HasAdapter, number: int) -> Weights:
        """Write the LoRA adapter of an update alone; see `write`."""
        folder = self.root / f"update_{number}"
        with _full_disk(folder):
            self._save(folder, source.save_adapter)
        return Weights(folder)

    def write_base(self, source: HasAdapter) -> None:
        """Write the base model of LoRA adapters as the folder `BASE`; see `write`."""
        folder = self.root / BASE
        with _full_disk(folder):
            self._save(folder, source.save_base)
            if self._untie:
                self._ranks.lead(lambda: untie(folder))

    def _save(self, folder: Path, save: Callable[[Path], None]) -> None:
        """Save weights, which rank 0 gathers and writes."""
        if self._ranks.leader:
            shutil.rmtree(folder, ignore_errors=True)
        self._ranks.together(lambda: save(folder))
        if self._ranks.leader:
            # An engine with averaged weights saves these too. Servers don't need them.
            shutil.rmtree(folder.with_name(f"{folder.name}{AVERAGED}"), ignore_errors=True)

    def keep_only(self, folder: Path) -> None:
        """Remove all other versions and their deltas."""
        current = {f"{folder.name}{suffix}" for suffix in ("", _DELTA, _UNFINISHED)}
        for root in self._roots():
            for other in root.glob("update_*"):
                if other.name not in current:
                    shutil.rmtree(other, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything."""
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait()


def _new_folder(parent: str | None) -> Path:
    if parent is None and _SHARED_MEMORY.is_dir():
        parent = str(_SHARED_MEMORY)
    try:
        if parent is not None:
            Path(parent).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="realign-weights-", dir=parent))
    except OSError as error:
        raise ConfigError(f"weights_dir={parent!r}: cannot be written: {error}") from error


@contextmanager
def _full_disk(folder: Path) -> Iterator[None]:
    """Turn the error of a full disk into one that a restart can fix."""
    try:
        yield
    except OSError as error:
        raise TransientError(
            f"{folder}: the weights for the servers were not written: {error}. Set weights_dir to a folder with more "
            "space, or with updates=delta enlarge the shared memory."
        ) from error


def _are_saved(source: WeightSource, folder: Path) -> bool:
    """Return whether the source's shards are the weights that it saved in a folder, bit for bit.

    They are not if saving renames, merges or splits weights, or if the folder is on another machine.
    """
    if not isinstance(source, _HasShards):
        return False
    shards, saved = source.shards(), map_folder(folder)
    return shards.keys() == saved.keys() and all(_equal(shards[name], x) for name, x in saved.items())


def _equal(shard: Tensor, saved: Tensor) -> bool:
    own = (shard.to_local() if is_part(shard) else shard).detach()
    same = shard.shape == saved.shape and own.dtype == saved.dtype
    return same and bool((bits(own.cpu()) == bits(_part(saved, shard))).all())


def _part(x: Tensor, shard: Tensor) -> Tensor:
    """Return the part of a weight that a shard is."""
    return part_of(x, shard) if is_part(shard) else x


def size_of(folder: Path) -> int:
    """Return the bytes of the weights in a folder."""
    return sum(path.stat().st_size for path in folder.glob(MODEL_FILES))


def _embeddings(names: Iterable[str]) -> str:
    """Return the name of the input embeddings.

    Raises:
        ConfigError: they have an unknown name.
    """
    if (name := next((name for name in names if name.endswith(_EMBEDDINGS)), None)) is None:
        raise ConfigError(f"untie=true: the model has no weight that ends in {_EMBEDDINGS}. Set untie=false.")
    return name


def untie(folder: Path) -> None:
    """Separate the output embeddings of a model folder, if they are tied to the input embeddings.

    Raises:
        ConfigError: the input embeddings have an unknown name.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if not config.get("tie_word_embeddings"):
        return
    names = {name: file for file in sorted(folder.glob(MODEL_FILES)) for name in map_file(file)}
    embeddings = _embeddings(names)
    file = names[embeddings]
    weights = load_file(file)
    # `clone`, since safetensors refuses two names for the same memory.
    save_file(weights | {_HEAD: weights[embeddings].clone()}, file, metadata={"format": "pt"})
    index = folder / _INDEX
    if index.exists():
        listed = json.loads(index.read_text(encoding="utf-8"))
        listed["weight_map"][_HEAD] = file.name
        index.write_text(json.dumps(listed), encoding="utf-8")
    path.write_text(json.dumps(config | {"tie_word_embeddings": False}), encoding="utf-8")
