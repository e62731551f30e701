"""Recognize the format of a file of rows by its content."""

from __future__ import annotations

import json
from pathlib import Path

from realign.data.arrow_files import Arrow, Parquet
from realign.data.row_files import RowFile
from realign.data.text_files import DELIMITERS, Delimited, JsonLines, JsonList, opened
from realign.errors import DataError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Suffixes of data files. `.gz` may follow those of text formats."""
FORMATS = "JSONL, JSON, CSV, TSV, parquet and arrow files"
_HEAD = 65536


def recognize(path: Path) -> RowFile:
    """Return a file of rows in the format that its content has, or else the format of its suffix.

    Raises:
        DataError: the format is unknown.
    """
    with opened(path) as file:
        head = file.read(_HEAD)
    suffixes = [suffix.lower() for suffix in path.suffixes]
    suffix = suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else (suffixes or [""])[-1]
    if head.startswith(b"PAR1") or (suffix == ".parquet" and head[:1] not in b"{["):
        return Parquet(path)
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")) or (suffix == ".arrow" and head[:1] not in b"{["):
        return Arrow(path)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if suffix in (".csv", ".tsv") and not _is_json_line(text):
        return Delimited(path, _delimiter(text, suffix))
    if suffix == ".json" and not _is_json_line(text):
        return JsonList(path)
    if text.startswith(b"["):
        return JsonList(path)
    if suffix in (".jsonl", ".ndjson", ".json") or _is_json_line(text):
        return JsonLines(path)
    found = f"unknown file type {suffix!r}" if suffix else "the file has no suffix"
    raise DataError(
        f"{path}: {found}, and its content is none of the supported formats. Supported: {FORMATS}, and folders of them."
    )


def _is_json_line(text: bytes) -> bool:
    """Return whether the first line is a JSON object, and another line follows it."""
    line, _, rest = text.partition(b"\n")
    if not line.startswith(b"{"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return len(text) >= _HEAD and not rest  # the first line is longer than the part that was read
    return bool(rest.strip())


def _delimiter(text: bytes, suffix: str) -> str:
    """Return the delimiter of a header: that of the suffix if the header has it, or else one that it has."""
    header = text.partition(b"\n")[0].decode(errors="replace")
    usual = "," if suffix == ".csv" else "\t"
    return next((sign for sign in (usual, *DELIMITERS) if sign in header), usual)
