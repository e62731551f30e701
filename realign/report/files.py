"""Read the files in the folder of a run, which may be incomplete because the run continues or was killed.

Folders of runs are also passed on, so no value has a type that can be relied on. Each file has a schema here, and a
value that does not fit becomes the empty value of its kind.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from realign.errors import ConfigError
from realign.records.record_files import METRICS, json_object, yaml_object

_LEVELS = 3
"""Depth below a folder at which its runs are found."""
_Read = Callable[[Any], Any]
"""Converts any JSON value to the kind that the report expects."""


def is_run(folder: Path) -> bool:
    """Return whether a folder contains the records of a run."""
    return (folder / METRICS).is_file() or (folder / "run.json").is_file()


def find_runs(root: Path) -> list[Path]:
    """Return the folders of runs in `root`, which may be a run itself, up to three levels below; sorted by name.

    Links below `root` are not followed, because they can lead out of it.
    """
    if is_run(root):
        return [root]
    runs, level = [], [root]
    for _ in range(_LEVELS):
        level = [path for folder in level for path in _folders(folder)]
        runs += [path for path in level if is_run(path)]
    return sorted(runs)


def _folders(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    return []


def check_run(folder: Path) -> None:
    """Check that a folder contains a run.

    Raises:
        ConfigError: it does not exist, or contains no run.
    """
    if folder.is_file():
        raise ConfigError(f"{str(folder)!r}: this is a file. Name the folder of a run, such as runs/NAME.")
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r}: this folder does not exist. Name the folder of a run, such as runs/NAME.")
    if not is_run(folder):
        raise ConfigError(f"{str(folder)!r}: the folder contains no run ({METRICS}). Name the folder of a run.")


def flat_config(path: Path) -> dict[str, Any]:
    """Return the values of a YAML config by dotted key; empty if the file is missing or damaged."""
    return dict(_leaves(yaml_object(path), ""))


def signature(folder: Path) -> str:
    """Return a text that changes when a file of the run changes that the viewer shows."""
    states = []
    for path in sorted((*folder.glob("*.json*"), folder / "config.yaml")):
        with suppress(OSError):
            state = path.lstat()
            states.append(f"{path.name}:{state.st_ino}:{state.st_size}:{state.st_mtime_ns}")
    return "|".join(states)


def _leaves(node: Any, key: str) -> list[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        return [leaf for name, value in node.items() for leaf in _leaves(value, f"{key}.{name}" if key else str(name))]
    if isinstance(node, list):
        return [(key, json.dumps(_with_text_keys(node), default=str))]
    plain = node is None or isinstance(node, str | bool) or number(node) is not None
    return [(key, node if plain else str(node))] if key else []


def _with_text_keys(node: Any) -> Any:
    """Return a value whose mappings have texts as keys, as in JSON. Keys of YAML can be dates or null."""
    if isinstance(node, Mapping):
        return {str(key): _with_text_keys(value) for key, value in node.items()}
    return [_with_text_keys(value) for value in node] if isinstance(node, list) else node


# --- schemas ---


def number(value: Any) -> float | None:
    """Return a finite number; None for every other value."""
    with suppress(OverflowError):  # an integer beyond the floats
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return value
    return None


def text(value: Any) -> str:
    """Return a text, or a number as text; empty for every other value."""
    return value if isinstance(value, str) else "" if number(value) is None else str(value)


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _each(read: _Read) -> _Read:
    """Read a list; every other value is an empty list."""
    return lambda value: [read(item) for item in value] if isinstance(value, list) else []


def _by_name(read: _Read) -> _Read:
    """Read a mapping from names; every other value is an empty mapping."""
    return lambda value: {name: read(item) for name, item in value.items()} if isinstance(value, Mapping) else {}


def _if_list(read: _Read) -> _Read:
    """Read a list; None for every other value."""
    return lambda value: _each(read)(value) if isinstance(value, list) else None


def _record(**fields: _Read) -> _Read:
    """Read a mapping with these fields and no others; None for every other value."""
    return lambda value: (
        {name: read(value.get(name)) for name, read in fields.items()} if isinstance(value, Mapping) else None
    )


def _records(**fields: _Read) -> _Read:
    """Read a list of mappings with these fields; skips other items."""
    read = _record(**fields)
    return lambda value: [read(item) for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


_RUN_INFO = _record(
    name=text,
    id=text,
    steps=number,
    seed=number,
    versions=_by_name(text),
    device=_record(machine=text, cpu_cores=number, torch_threads=number, gpus=_each(text)),
    git=_record(commit=text, branch=text),
    models=_by_name(text),
    headline=_each(text),
    panels=_records(title=text, metrics=_by_name(text)),
    larger_is_better=_by_name(_flag),
    parent=_record(run=text, id=text, step=number),
    attempts=_records(
        **dict.fromkeys(("started", "ended", "status", "reason", "host"), text),
        **dict.fromkeys(("first_step", "last_step", "pid"), number),
        command=_if_list(text),
    ),
)
"""Schema of run.json, except for the graph."""
_SUMMARY = _record(
    **dict.fromkeys(("name", "status", "reason", "diagnosis"), text),
    **dict.fromkeys(("step", "steps", "seconds", "warnings"), number),
    metrics=_records(
        name=text, **dict.fromkeys(("first", "first_step", "last", "last_step", "best", "best_step"), number)
    ),
)
"""Schema of summary.json."""
_SAMPLE = _record(
    **dict.fromkeys(("id", "prompt", "response", "answer", "evaluation"), text),
    **dict.fromkeys(("step", "response_index", "episode", "reward", "kl", "pass_rate", "tokens"), number),
    rewards=_by_name(number),
)
_TOKEN_VALUES = (
    *("mask", "advantages", "logprobs", "trainer_logprobs", "ratio", "kl", "kl_penalty", "entropy", "values"),
    *("returns", "ref_logprobs", "versions"),
)
"""Values of tokens that the page shows, as in page_tokens.js."""
_TOKENS = _record(
    id=text,
    **dict.fromkeys(("step", "response", "episode", "reward", "start", "length"), number),
    tokens=_each(number),
    text=_each(text),
    **dict.fromkeys(("given", *_TOKEN_VALUES), _if_list(number)),
)
_SPAN = _record(**dict.fromkeys(("name", "kind", "thread"), text), **dict.fromkeys(("step", "start", "end"), number))
_RECORDS: Mapping[str, _Read] = MappingProxyType(
    {
        "samples": _SAMPLE,
        "eval_samples": _SAMPLE,
        "tokens": _TOKENS,
        "spans": _SPAN,
        "system": _by_name(number),
        "warnings": _record(step=number, message=text),
    }
)
"""Schema of the lines of each file of records."""


def run_info(folder: Path) -> dict[str, Any]:
    """Return the values of run.json, except for the graph."""
    return dict(_RUN_INFO(json_object(folder / "run.json")))


def summary(folder: Path) -> dict[str, Any]:
    """Return the values of summary.json."""
    return dict(_SUMMARY(json_object(folder / "summary.json")))


def usable(name: str, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of a file in the form of its schema, without those that the page cannot draw."""
    converted = [_RECORDS[name](record) for record in records]
    if name == "spans":
        return [entry for entry in converted if entry["start"] is not None and entry["end"] is not None]
    if name == "tokens":
        converted = [{key: value for key, value in entry.items() if value is not None} for entry in converted]
        complete = [entry for entry in converted if 0 < len(entry["tokens"]) == len(entry["text"])]
        return [entry for entry in complete if any(x is not None for key in _TOKEN_VALUES for x in entry.get(key, ()))]
    optional = (
        ("episode", "kl", "rewards", "evaluation", "pass_rate", "answer", "tokens")
        if name in ("samples", "eval_samples")
        else ()
    )
    absent: tuple[Any, ...] = (None, "", {})
    return [{k: value for k, value in entry.items() if k not in optional or value not in absent} for entry in converted]
