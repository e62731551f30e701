"""Read the files in the folder of a run, which may be incomplete because the run continues or was killed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from realign.errors import ConfigError
from realign.safe_yaml import load_yaml

METRICS = "metrics.jsonl"
LARGEST = 256 << 20
"""Size in bytes above which only the end of a file is read."""


def is_run(folder: Path) -> bool:
    """Return whether a folder contains the records of a run."""
    return (folder / METRICS).is_file() or (folder / "run.json").is_file()


def find_runs(root: Path) -> list[Path]:
    """Return the folders of runs in `root`, which may be a run itself, up to three levels below; sorted by name."""
    if is_run(root):
        return [root]
    patterns = ("*", "*/*", "*/*/*")
    return sorted(path for pattern in patterns for path in root.glob(pattern) if path.is_dir() and is_run(path))


def check_run(folder: Path) -> None:
    """Check that a folder contains a run.

    Raises:
        ConfigError: it does not exist, or contains no run.
    """
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r}: this folder does not exist. Name the folder of a run, such as runs/NAME.")
    if not is_run(folder):
        raise ConfigError(f"{str(folder)!r}: the folder contains no run ({METRICS}). Name the folder of a run.")


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects in the lines of a file; skips lines that are incomplete or damaged."""
    found = []
    for line in _bytes(path).splitlines():
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                found.append(record)
    return found


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing or damaged."""
    with suppress(ValueError, RecursionError):
        found = json.loads(_bytes(path) or b"{}")
        if isinstance(found, dict):
            return found
    return {}


def flat_config(path: Path) -> dict[str, Any]:
    """Return the values of a YAML config by dotted key; empty if the file is missing or damaged."""
    try:
        return dict(_leaves(load_yaml(_bytes(path).decode(errors="replace")), ""))
    except (yaml.YAMLError, RecursionError):
        return {}


def signature(folder: Path) -> str:
    """Return a text that changes when a record file of the run changes."""
    found = []
    for path in sorted(folder.glob("*.json*")):
        with suppress(OSError):
            state = path.stat()
            found.append(f"{path.name}:{state.st_size}:{state.st_mtime_ns}")
    return "|".join(found)


def _bytes(path: Path) -> bytes:
    """Return the content of a regular file; empty if there is none."""
    try:
        if not path.is_file() or path.is_symlink():
            return b""
        with path.open("rb") as file:
            if (size := path.stat().st_size) > LARGEST:
                file.seek(size - LARGEST)
                file.readline()
            return file.read(LARGEST)
    except OSError:
        return b""


def _leaves(node: Any, key: str) -> list[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        return [leaf for name, value in node.items() for leaf in _leaves(value, f"{key}.{name}" if key else str(name))]
    if isinstance(node, list):
        return [(key, json.dumps(node, default=str))]
    return [(key, node if isinstance(node, str | int | float | bool) or node is None else str(node))] if key else []


__all__ = ["METRICS", "check_run", "find_runs", "flat_config", "is_run", "json_lines", "json_object", "signature"]
