"""Model folders that a run reads: finding them, checking their files, and reading them with transformers.

transformers trusts these files: some values end in a traceback, and others build layers until the memory is full. A
run with several models would also read gigabytes before it reports a mistake in the last model.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from realign.errors import ConfigError, DataError, RealignError

GENERATION_CONFIG = "generation_config.json"
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads")
SIZES = ("hidden_size", "vocab_size", "n_embd")
EXPERTS = ("num_experts", "num_local_experts")
# Far above any real model: a damaged config must fail before transformers allocates what it says.
_MOST_LAYERS = 10_000
_MOST_HEADS = 100_000
_MOST_EXPERTS = 100_000
_LARGEST_SIZE = 10**8

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"

LARGEST_FILE = 64 << 20
"""Size limit of a JSON file in bytes; a vocabulary is in other files."""

_POINTER = b"version https://git-lfs.github.com/spec/"
_HASHED = (".safetensors", ".bin")
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")

# The cache of the hub names a file by its git hash (40 digits), or by its sha256 if it is stored as a large file (64).
_HASH = re.compile("[0-9a-f]{40,64}")


def check_path(what: str, path: str, patterns: tuple[str, ...] = ("config.json",)) -> str:
    """Return the path of an existing folder, or a hub name. It does not access the network.

    Hub names are `name` or `owner/name`. A path is local if it exists, if its first component is an existing folder,
    or if it is not a valid hub name.

    Args:
        what: name of the setting, for messages.
        path: value of the setting.
        patterns: glob patterns of files; the folder must contain at least one match.

    Raises:
        ConfigError: the path is neither a folder nor a hub name. The message names the setting and the path.
        DataError: the folder does not contain such files.
    """
    folder = Path(os.path.expanduser(path))  # keeps ~name if there is no such user
    if folder.is_dir():
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            raise DataError(f"{what}={path!r}: the folder has no {' or '.join(patterns)}.{_inside(folder, patterns)}")
        return str(folder)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path) or folder.exists() or Path(path.split("/")[0]).is_dir():
        raise ConfigError(f"{what}={path!r}: neither a model folder nor a hub name (owner/name).{_near_folder(folder)}")
    return path


def _inside(folder: Path, patterns: tuple[str, ...]) -> str:
    """Return a suggestion for an error message: a model in a subfolder, as a run or the cache of the hub saves it."""
    main = folder / "refs" / "main"
    current = f"snapshots/{main.read_text(encoding='utf-8', errors='replace').strip()}/" if main.is_file() else ""
    places = ("", current, "*/", "final/*/", "snapshots/*/")
    models = [file.parent for below in places for pattern in patterns for file in folder.glob(below + pattern)]
    return f" Did you mean {str(models[0])!r}?" if models else ""


def _near_folder(folder: Path) -> str:
    """Return a suggestion for an error message: the closest existing name for the first missing path component."""
    there = next(parent for parent in folder.absolute().parents if parent.is_dir())
    parts = folder.absolute().relative_to(there).parts
    near = difflib.get_close_matches(parts[0], [p.name for p in there.iterdir() if p.is_dir()], n=1)
    if near:
        return f" Did you mean {str(Path(*folder.parts[: len(folder.parts) - len(parts)], near[0], *parts[1:]))!r}?"
    return f" {str(there)!r} contains no {parts[0]!r}."


def check_model_folder(folder: Path) -> None:
    """Check the files of a local model folder that transformers reads without checks.

    Raises:
        DataError: a file is not regular, or has values that no model has. The message names the file and the key.
    """
    for path in sorted(folder.iterdir()):
        _check_kind(path)
    config = read_object(folder / "config.json")
    index = read_object(folder / INDEX)
    if config is not None:
        _check_config(folder / "config.json", config)
    if index is not None:
        _check_index(folder / INDEX, index)
    for name in ("config.json", GENERATION_CONFIG):
        _check_end_tokens(folder / name, read_object(folder / name) or {})


def check_links(folder: Path) -> None:
    """Check that no file of a model folder is a link that leads out of it, except into the folder's own hub cache.

    The cache of the hub consists of links from `snapshots/REVISION/NAME` to `blobs/HASH`. Any other link can have
    somebody's private file as its target, which a copy of the folder would contain.

    Raises:
        DataError: a link leads elsewhere. The message names the link and its target.
    """
    own = Path(os.path.realpath(folder))
    for path in sorted(
        path for top in folder.iterdir() if not top.name.startswith(".") for path in (top, *_below(top))
    ):
        if _leads_out(path, own):
            raise DataError(
                f"{str(path)!r} is a link to {os.readlink(path)!r}, outside of the model folder. If the model needs "
                "this file, replace the link by a copy; otherwise remove it."
            )


def _leads_out(path: Path, folder: Path | None = None) -> bool:
    """Return whether a file is a link that leads out of a folder, by default its own, and not into its hub cache."""
    if not path.is_symlink():
        return False
    own, target = Path(os.path.realpath(folder or path.parent)), Path(os.path.realpath(path))
    cached = target.parent == own.parent.parent / "blobs" and _HASH.fullmatch(target.name)
    return not cached and own not in target.parents


def is_other_file(path: Path) -> bool:
    """Return whether a file is a link out of its folder to a file of another name, perhaps a private one.

    Folders of links to the files of a shared model are common; there, the names are the same.
    """
    return _leads_out(path) and os.path.basename(os.path.realpath(path)) != path.name


def _below(path: Path) -> list[Path]:
    return list(path.rglob("*")) if path.is_dir() and not path.is_symlink() else []


def check_layers(folder: Path, weights: int) -> None:
    """Check that a model has no more layers than weights, because transformers builds the layers first.

    Raises:
        DataError: the config has more layers. The message names the key.
    """
    file = folder / "config.json"
    config = read_object(file) or {}
    for part in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        _check_counts(file, part, LAYERS, 1, max(1, weights))


def stop_tokens_in(file: Path) -> list[int]:
    """Return the end tokens in a `generation_config.json`.

    Raises:
        DataError: the file is not a JSON object, or contains something else than token ids.
    """
    config = read_object(file) or {}
    _check_end_tokens(file, config)
    ids = config.get("eos_token_id")
    return [i for i in (ids if isinstance(ids, list) else [ids]) if i is not None]


def read_object(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if there is no such file.

    Raises:
        DataError: the file is too large, or not a JSON object.
    """
    if not file.is_file():
        return None
    size = file.stat().st_size
    if size > LARGEST_FILE:
        raise DataError(f"{str(file)!r} has {size} bytes; expected at most {LARGEST_FILE}. Download the model again.")
    return parse_object(file)


def parse_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of any size.

    Raises:
        DataError: the file is not a JSON object.
    """
    refuse_pointer(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(file)!r} is not a JSON file: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{str(file)!r} must contain a JSON object, but contains a {type(content).__name__}")
    return content


def _check_kind(path: Path) -> None:
    try:
        mode = path.stat().st_mode  # the cache of the hub consists of links
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError(f"{str(path)!r} is not a regular file. Download the model again.")


def _check_config(file: Path, config: Mapping[str, Any]) -> None:
    inner = [value for value in config.values() if isinstance(value, Mapping)]  # such as text_config
    for part in (config, *inner):
        _check_counts(file, part, LAYERS, 1, _MOST_LAYERS)
        _check_counts(file, part, HEADS, 1, _MOST_HEADS)
        _check_counts(file, part, SIZES, 2, _LARGEST_SIZE)
        _check_counts(file, part, EXPERTS, 0, _MOST_EXPERTS)


def _check_counts(file: Path, part: Mapping[str, Any], keys: Iterable[str], lowest: int, highest: int) -> None:
    for key in keys:
        value = part.get(key)
        for item in value if isinstance(value, list) else [value]:  # some families have one value per layer
            # `isinstance` would accept true and false.
            if item is not None and not (type(item) is int and lowest <= item <= highest):
                raise _invalid(file, key, value, f"an integer from {lowest} to {highest}")


def _check_index(file: Path, index: Mapping[str, Any]) -> None:
    files = index.get("weight_map")
    if not isinstance(files, Mapping):
        raise DataError(f"{str(file)!r} is not an index of weights: it has no 'weight_map'. Download the model again.")
    for name in sorted({str(name) for name in files.values()}):
        if "/" in name or "\\" in name or not name.endswith(".safetensors"):
            raise _invalid(file, "weight_map", name, "names of safetensors files in the same folder")
        if not (file.parent / name).is_file():
            raise DataError(f"{str(file)!r}: the file {name!r} is missing. Download the model again.")


def _check_end_tokens(file: Path, config: Mapping[str, Any]) -> None:
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = config.get(key)
        if not all(item is None or type(item) is int for item in (value if isinstance(value, list) else [value])):
            raise _invalid(file, key, value, "token ids")


def _invalid(file: Path, key: str, value: Any, expected: str) -> DataError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    return DataError(f"{str(file)!r}: {key}={shown}: expected {expected}. Download the model again.")


def weight_names(folder: Path) -> frozenset[str]:
    """Return the names of the weights in a model folder, after a check of its files and of the headers of weights.

    Raises:
        DataError: a file cannot be read, or the folder has no weights, or two sets of them. The message names the file.
    """
    check_model_folder(folder)
    found: dict[str, Path] = {}
    for file in _weight_files(folder):
        for name in tensor_names(file):
            if (other := found.setdefault(name, file)) != file:
                raise DataError(f"{str(file)!r} and {str(other)!r} both have the weight {name!r}. Remove one of them.")
    check_layers(folder, len(found))
    return frozenset(found)


def tensor_names(file: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file, from its header; the rest of the file is there, too.

    Raises:
        DataError: the file is damaged, incomplete, or a Git LFS pointer.
    """
    from safetensors import SafetensorError, safe_open

    refuse_pointer(file)
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        raise DataError(
            f"{str(file)!r} is not a safetensors file, or not all of it: {error} ({size} bytes). Download the model "
            "again."
        ) from error


def refuse_pointer(file: Path) -> None:
    """Raise DataError if a file is a Git LFS pointer instead of the file that it stands for."""
    with file.open("rb") as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            raise DataError(
                f"{str(file)!r} is a Git LFS pointer, not the file itself. Run git lfs pull in its folder, or download "
                "the file again."
            )


def _weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights of a model folder.

    Raises:
        DataError: there are none, or two sets of them, of which transformers reads one and ignores the other.
    """
    index, single = folder / INDEX, folder / WEIGHTS
    shards = sorted(set((read_object(index) or {"weight_map": {}})["weight_map"].values()))
    if shards and single.is_file() and shards != [WEIGHTS]:
        raise DataError(
            f"{str(folder)!r} has two sets of weights: {WEIGHTS!r}, and {shards[0]!r} and others of {INDEX!r}. Remove "
            "the older set."
        )
    if shards or single.is_file():
        return [folder / name for name in shards or [WEIGHTS]]
    others = sorted(file.name for file in folder.iterdir() if file.suffix in _OTHER_WEIGHTS and file.is_file())
    if parts := [name for name in others if name.endswith(".safetensors")]:
        cure = f"A single file of weights is called {WEIGHTS!r}." if len(parts) == 1 else "Download the index."
        raise DataError(f"{str(folder)!r} has {parts[0]!r}, but no index of such files ({INDEX!r}). {cure}")
    if others:
        raise DataError(
            f"{str(folder)!r} has weights only in {others[0]!r}. realign reads safetensors, since other formats can "
            "run code. Convert them: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained('NEW_FOLDER')."
        )
    raise DataError(f"{str(folder)!r} has no weights: neither {WEIGHTS!r} nor {INDEX!r}. Download the model again.")


def hash_of_folders(paths: Sequence[str]) -> str | None:
    """Return a hash of the files with weights in model folders; None if weights of one are not on this machine."""
    digest = hashlib.sha256()
    for path in paths:
        folder = _local_folder(path)
        if folder is None:
            return None
        for file in sorted(folder.iterdir()):
            if file.suffix in _HASHED and file.is_file():
                with file.open("rb") as content:
                    digest.update(f"{file.name}\0{hashlib.file_digest(content, 'sha256').hexdigest()}\0".encode())
    return digest.hexdigest()


def config_folder(path: str) -> Path | None:
    """Return the folder with the config of a model; None for a model of the hub that is not on this machine yet."""
    from huggingface_hub import try_to_load_from_cache

    if (folder := Path(path).expanduser()).is_dir():
        return folder
    config = try_to_load_from_cache(path, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def _local_folder(path: str) -> Path | None:
    """Return the folder of a model; None for a model of the hub of which weights are not on this machine yet."""
    folder = config_folder(path)
    if folder is None or Path(path).expanduser().is_dir():
        return folder
    # The memory estimate downloads the config alone, and models with equal configs have different weights.
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return folder if all((folder / name).is_file() for name in names) else None
    return folder if any(file.suffix in _HASHED for file in folder.iterdir()) else None


def check_hub(what: str, name: str, file: str = "config.json") -> None:
    """Check that the files of a hub name are in the local cache if HF_HUB_OFFLINE=1.

    Args:
        what: key of the setting, for messages.
        name: name on the hub.
        file: a file that is in the cache if the model was downloaded.

    Raises:
        ConfigError: the file is not in the cache. The message names the setting and HF_HUB_OFFLINE.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE and not isinstance(try_to_load_from_cache(name, file), str):
        raise ConfigError(
            f"{what}={name!r}: no such folder, and not in the cache of the hub, which HF_HUB_OFFLINE=1 disables. Set "
            f"{what} to a folder, or unset HF_HUB_OFFLINE."
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars of transformers, and its warnings about missing weights, which the caller reports."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def readable(what: str, kind: type[RealignError] = DataError) -> Iterator[None]:
    """Convert exceptions of transformers to an error of class `kind` in one line, with the original as the cause."""
    try:
        yield
    except RealignError as error:
        raise type(error)(f"{what}: {error}") from error
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        cure = " Set trust_remote_code=true of this role to run it." if "trust_remote_code" in str(error) else ""
        raise kind(f"{what}: {name}{first}{cure}") from error
