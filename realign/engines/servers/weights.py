"""Model folders that servers load: one folder per version, of which only the latest is kept."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from safetensors.torch import load_file, save_file

from realign.api.sampler import WeightSource
from realign.engines.servers.protocol import ANY_TOKEN
from realign.errors import ConfigError, TransientError

_SHARED_MEMORY = Path("/dev/shm")
_AVERAGED = "_ema"
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"


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


class WeightFolders:
    """Writes the weights of a role for servers."""

    def __init__(self, parent: str | None, *, untie: bool = False) -> None:
        """Create the folder.

        Args:
            parent: folder in which it is created; None: shared memory if the system has it, or the temporary folder.
            untie: whether to write tied output embeddings as separate weights.

        Raises:
            ConfigError: the folder cannot be created.
        """
        if parent is None and _SHARED_MEMORY.is_dir():
            parent = str(_SHARED_MEMORY)
        try:
            if parent is not None:
                Path(parent).mkdir(parents=True, exist_ok=True)
            self.root = Path(tempfile.mkdtemp(prefix="realign-weights-", dir=parent))
        except OSError as error:
            raise ConfigError(f"weights_dir={parent!r}: cannot be written: {error}") from error
        self._untie = untie

    def write(self, source: WeightSource, number: int) -> Path:
        """Write the weights of an update, and return their folder.

        Raises:
            TransientError: there is not enough space.
        """

        def save(folder: Path) -> None:
            source.save(folder)
            shutil.rmtree(folder.with_name(f"{folder.name}{_AVERAGED}"), ignore_errors=True)
            self._prepare(folder)

        return self._write(self.root / f"update_{number}", save)

    def write_adapter(self, source: HasAdapter, number: int) -> Path:
        """Write the LoRA adapter of an update alone; see `write`."""
        return self._write(self.root / f"update_{number}", source.save_adapter)

    def write_base(self, source: HasAdapter) -> Path:
        """Write the base model of LoRA adapters; see `write`."""

        def save(folder: Path) -> None:
            source.save_base(folder)
            self._prepare(folder)

        return self._write(self.root / "base", save)

    def _prepare(self, folder: Path) -> None:
        if self._untie:
            untie(folder)

    def _write(self, folder: Path, save: Callable[[Path], None]) -> Path:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            save(folder)
        except OSError as error:
            raise TransientError(
                f"{folder}: the weights for the servers were not written: {error}. Set weights_dir to a folder with "
                "more space."
            ) from error
        return folder

    def keep_only(self, folder: Path) -> None:
        """Remove all other versions."""
        for other in self.root.glob("update_*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)


def untie(folder: Path) -> None:
    """Separate the output embeddings of a model folder, if they are tied to the input embeddings.

    Raises:
        ConfigError: the input embeddings have an unknown name.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if not config.get("tie_word_embeddings"):
        return
    for file in sorted(folder.glob("*.safetensors")):
        weights = load_file(file)
        name = next((key for key in weights if key.endswith(_EMBEDDINGS)), None)
        if name is None:
            continue
        save_file(weights | {_HEAD: weights[name].clone()}, file, metadata={"format": "pt"})
        index = folder / "model.safetensors.index.json"
        if index.exists():
            listed = json.loads(index.read_text(encoding="utf-8"))
            listed["weight_map"][_HEAD] = file.name
            index.write_text(json.dumps(listed), encoding="utf-8")
        path.write_text(json.dumps(config | {"tie_word_embeddings": False}), encoding="utf-8")
        return
    raise ConfigError(f"untie=true: the model has no weight that ends in {_EMBEDDINGS}. Set untie=false.")


def vocabulary_size(folder: Path) -> int:
    """Return the number of tokens that the model of a folder can sample; the largest integer if it does not say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:  # of an engine that writes no model folder of transformers
        return ANY_TOKEN
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return ANY_TOKEN if size is None else int(size)
