"""Folders of models: names and paths, ordinary Hugging Face folders, and what lies in them beside the weights."""

from __future__ import annotations

import difflib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

AVERAGED = "_ema"
"""What the folder of averaged weights is called behind the name of the model's own."""


RUN_FILES = (
    *("config.yaml", "metrics.jsonl", "samples.jsonl", "eval_samples.jsonl", "curves.png"),
    *("final", "final/*", "best", "best/*", "step_*", "step_*/*", "checkpoints", "checkpoints/step_*"),
    "tensorboard",
)
"""What a run may write into its folder, as patterns."""


def warn_if_misread(what: str, tokenizer: Any, path: str) -> None:
    """Warn when a tokenizer cuts text otherwise than the `tokenizer.json` that it was read from.

    transformers chooses the class by the model's family, and may rebuild a tokenizer of another kind as that family's
    own, without a word: a word-level vocabulary beside a qwen2 model is then read as characters.
    """
    file = Path(path, "tokenizer.json")
    if not file.is_file():
        return
    from tokenizers import Tokenizer

    saved = Tokenizer.from_file(str(file))
    ids = sorted(saved.get_vocab().values())
    text = saved.decode(ids[:: max(1, len(ids) // 64)])
    found = tokenizer(text, add_special_tokens=False)["input_ids"]
    expected = saved.encode(text, add_special_tokens=False).ids
    if found != expected:
        warnings.warn(
            f"{what}: transformers reads {file} as {type(tokenizer).__name__}, which cuts text "
            f"otherwise than that file says ({len(found)} tokens of a probe instead of {len(expected)}); keep the "
            f"tokenizer in a folder without the model's config.json, and name it in {what}.tokenizer",
            stacklevel=2,
        )


def check_path(what: str, path: str, patterns: tuple[str, ...] = ("config.json",)) -> str:
    """The path of an existing folder, or a hub name; nothing here asks the network.

    Hub names are `name` or `owner/name`; whatever cannot be one, or starts in an existing folder, is meant as local.

    Args:
        what: name of the setting, for messages.
        path: its value.
        patterns: files of which the folder must hold one.

    Raises:
        ValueError: names the setting and the path, if it is meant for a local folder and is none.
    """
    folder = Path(os.path.expanduser(path))  # which leaves a ~name that nobody has
    if folder.is_dir():
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            raise ValueError(f"{what}={path!r} is a folder without {' or '.join(patterns)}{_inside(folder, patterns)}")
        return str(folder)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path) or folder.exists() or Path(path.split("/")[0]).is_dir():
        raise ValueError(
            f"{what}={path!r} is neither an existing model folder nor a hub name (owner/name){_near_folder(folder)}"
        )
    return path


def _inside(folder: Path, patterns: tuple[str, ...]) -> str:
    """The end of a message about a folder that holds no model: a model further down, as a run leaves it."""
    found = [file.parent for below in ("", "*/", "final/*/") for p in patterns for file in folder.glob(below + p)]
    return f"; did you mean {str(found[0])!r}?" if found else ""


def _near_folder(folder: Path) -> str:
    """The end of a message about a folder that is not there: the nearest name where the path leaves the disk."""
    there = next(parent for parent in folder.absolute().parents if parent.is_dir())
    parts = folder.absolute().relative_to(there).parts
    near = difflib.get_close_matches(parts[0], [p.name for p in there.iterdir() if p.is_dir()], n=1)
    if near:
        return f"; did you mean {str(Path(*folder.parts[: len(folder.parts) - len(parts)], near[0], *parts[1:]))!r}?"
    return f"; {str(there)!r} has no {parts[0]!r}"


def check_name(what: str, name: str) -> None:
    """Refuse what cannot be the name of one file or folder, since it becomes one (of a role, a run, a tracker).

    Raises:
        ValueError: the name is empty or long, starts with a dot or dash, or holds a separator or a control character.
    """
    fits = 0 < len(name.encode(errors="replace")) <= 100 and name.isprintable() and name == name.strip()
    if not fits or name[0] in ".-" or "/" in name or "\\" in name:
        raise ValueError(
            f"{what} {name!r} cannot name a file: expected up to 100 characters without / \\ or control characters, "
            "not starting with a dot, dash or blank"
        )


def check_run_folder(folder: Path) -> None:
    """Refuse links among what a run writes into its folder: it would write, or remove, what lies elsewhere.

    The folder itself may be a link, to a larger disk, say.

    Raises:
        ValueError: names the link and what it leads to.
    """
    for pattern in RUN_FILES:
        for path in folder.glob(pattern):
            refuse_link(path)


def refuse_link(path: Path) -> None:
    """Raise ValueError if `path`, a file or folder of a run, is a link."""
    if path.is_symlink():
        raise ValueError(
            f"{str(path)!r} is a link to {str(path.readlink())!r}, and a run writes only into its own folder; remove "
            "the link, or choose another output_dir"
        )


def save_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a folder beside `path` and rename it, so that `path` never holds half a model.

    Raises:
        ValueError: `path` is a link.
        OSError: the disk is full, or does not let us write; what stood at `path` stands there as before.
    """
    refuse_link(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        new = Path(scratch, "new")
        try:
            write(new)
        except (OSError, SafetensorError) as error:  # the second is no OSError, also where the disk is full
            raise OSError(f"{path} was not saved: {error.__cause__ or error}") from error
        if path.exists():
            path.rename(Path(scratch, "old"))
        new.rename(path)


def state_file(role: str | None = None) -> str:
    """Name of the file with the state of the interface that a model was saved with; `role`: of a view of the model."""
    return "interface_state.json" if role is None else f"interface_state_{role}.json"


def write_state(folder: Path, state: Mapping[str, Any], role: str | None = None) -> None:
    """Put the `state_dict` of an interface into the folder of its model, as JSON; nothing if it is empty."""
    if not state:
        return
    new = folder / f".{state_file(role)}"
    new.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    new.replace(folder / state_file(role))


def read_states(path: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What `write_state` put into a local folder: for the model's own role, and for each role that shared it.

    Both are empty where nothing was put, and for a hub name.

    Raises:
        ValueError: a file holds no JSON object.
    """
    prefix, suffix = state_file("").split(".")
    files = {f.stem.removeprefix(prefix): f for f in sorted(Path(path).expanduser().glob(f"{prefix}?*.{suffix}"))}
    own = Path(path).expanduser() / state_file()
    return _read_json(own) if own.is_file() else {}, {role: _read_json(file) for role, file in files.items()}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is no JSON: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{str(file)!r} must hold a JSON object, found {type(state).__name__}")
    return state
