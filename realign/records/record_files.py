"""Read the record files of a run, which may be incomplete because the run continues or was killed.

A folder of a run may come from a stranger, so a link is not followed, and a damaged line is skipped.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from realign.safe_yaml import load_yaml

METRICS = "metrics.jsonl"
LARGEST = 128 << 20
"""Size in bytes above which only the end of a file of records is read."""
LARGEST_OBJECT = 16 << 20
"""Size in bytes above which a line, or a file with one object, is skipped."""


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects in the lines of a file; skips lines that are incomplete or damaged."""
    with open_or_empty(path) as file:
        return [record for _, line in lines(file) if (record := parse_object(line))]


def first_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the first line of a file; empty if the file is missing or damaged."""
    with open_or_empty(path) as file:
        return parse_object(file.readline(LARGEST_OBJECT))


def lines(file: BinaryIO, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the lines from a byte on, or from `LARGEST` bytes before the end, each with the place of its end.

    A line that is too long is skipped, but not the end of the file without a line break.
    """
    file.seek(0, os.SEEK_END)
    whole, earliest = True, file.tell() - LARGEST
    if earliest > start:
        start, whole = earliest, False  # the rest of a line that was cut
    file.seek(start)
    while part := file.readline(LARGEST_OBJECT):
        start += len(part)
        ends = part.endswith(b"\n")
        if whole and (ends or len(part) < LARGEST_OBJECT):
            yield start, part
        whole = ends


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing or damaged."""
    return parse_object(_bytes(path))


def parse_object(content: bytes) -> dict[str, Any]:
    """Return a JSON object; empty if the content is damaged."""
    with suppress(ValueError, RecursionError):
        value = json.loads(content)
        if isinstance(value, dict):
            return value
    return {}


def yaml_object(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; empty if the file is missing or damaged."""
    with suppress(yaml.YAMLError):
        value = load_yaml(_bytes(path).decode(errors="replace"))
        if isinstance(value, dict):
            return value
    return {}


@contextmanager
def open_or_empty(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read it. Anything else, or a file that cannot be read, is an empty file."""
    file: BinaryIO = io.BytesIO()
    with suppress(OSError):
        # A link can lead out of the folder, which may come from a stranger, and opening a pipe would wait.
        if path.is_file() and not path.is_symlink():
            file = path.open("rb")
    with file:
        yield file


def _bytes(path: Path) -> bytes:
    """Return the content of a regular file; empty if there is none, or if it is too large."""
    with open_or_empty(path) as file:
        content = file.read(LARGEST_OBJECT + 1)
    return content if len(content) <= LARGEST_OBJECT else b""
