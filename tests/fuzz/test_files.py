"""Fuzz data files with arbitrary bytes and suffixes, and shipped datasets that read them.

Oracle: either the rows equal those of Python's own reader, or the error names the file. Rows accepted by a dataset
can
be sampled, and have the tokens of their text.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from realign.data import PreferenceData, PromptData, SupervisedData, TextData, read_rows
from tests.data.text_tokenizer import make_tokenizer
from tests.fuzz.refusals import BOUNDED, Refused, attempt

TEXT = st.one_of(st.text("ab1 ", min_size=1, max_size=4), st.text(max_size=3), st.just("\ud800"))
VALUE = st.one_of(TEXT, TEXT, TEXT, st.none(), st.integers(), st.floats(), st.booleans(), st.lists(TEXT, max_size=3))
ROW = st.dictionaries(
    st.sampled_from(["prompt", "response", "chosen", "rejected", "text", "a.b", "0"]), VALUE, min_size=1, max_size=4
)
ROWS = st.lists(ROW, min_size=1, max_size=3)
SEPARATOR = st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n", b"\r", b" ", b",", b"\x00"])


@st.composite
def damaged(draw: Any, whole: st.SearchStrategy[bytes]) -> bytes:
    """Return bytes with some of them changed, removed or inserted."""
    data = draw(whole)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 8)))
        data = data[:at] + draw(st.binary(max_size=4)) + data[end:]
    return data


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    """Return the rows as a parquet file. All values are text, since a column has one type."""
    names = sorted({name for row in rows for name in row})
    columns = {n: [str(r[n]).encode(errors="replace").decode() if n in r else None for r in rows] for n in names}
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def as_arrow(rows: list[dict[str, Any]]) -> bytes:
    """Return the rows of `as_parquet` as an Arrow stream."""
    table = pyarrow.parquet.read_table(io.BytesIO(as_parquet(rows)))
    out = io.BytesIO()
    with pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def as_csv(records: list[list[str]]) -> bytes:
    """Return the records as a CSV file."""
    out = io.StringIO()
    csv.writer(out).writerows(records)
    return out.getvalue().encode(errors="replace")


LINES = st.tuples(SEPARATOR, ROWS).map(lambda both: both[0].join(json.dumps(row).encode() for row in both[1]))
LIST = ROWS.map(lambda rows: json.dumps(rows).encode())
CSV = st.lists(st.lists(TEXT, min_size=2, max_size=2), min_size=1, max_size=4).map(as_csv)
FILES = st.one_of(
    st.tuples(st.just("x.jsonl"), st.one_of(damaged(LINES), LINES, st.binary(max_size=40))),
    st.tuples(st.just("x.json"), st.one_of(damaged(LIST), LIST, LINES, st.binary(max_size=40))),
    st.tuples(st.just("x.parquet"), st.one_of(damaged(ROWS.map(as_parquet)), st.binary(max_size=40))),
    st.tuples(st.just("x.arrow"), damaged(ROWS.map(as_arrow))),
    st.tuples(st.just("x.csv"), st.one_of(damaged(CSV), CSV, LINES, st.binary(max_size=40))),
    st.tuples(st.sampled_from(["x", "x.jsonl.gz", "x.pkl", "x.arrow"]), st.one_of(LINES, LIST, st.binary(max_size=9))),
)


@contextmanager
def written(name: str, data: bytes) -> Iterator[Path]:
    """Write a file with these bytes for the duration of the block."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, name)
        file.write_bytes(data)
        yield file


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object whose keys differ."""
    if len(members := dict(pairs)) < len(pairs):
        raise ValueError("duplicate key")
    return members


def validated(data: bytes) -> Iterator[Any]:
    """Yield the batches of an Arrow stream whose values can be read."""
    for batch in pyarrow.ipc.open_stream(io.BytesIO(data)):
        batch.validate(full=True)
        yield batch


def plain_rows(name: str, data: bytes) -> list[Any] | None:
    """Return the rows that Python reads from the bytes, or None if it reads none."""
    readers: list[Callable[[], Any]] = [
        lambda: json.loads(data, object_pairs_hook=unique),
        lambda: [json.loads(line, object_pairs_hook=unique) for line in io.BytesIO(data) if line.strip()],
        lambda: pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist(),
        lambda: [row for batch in validated(data) for row in batch.to_pylist()],
    ]
    if name.endswith(".csv"):
        readers.append(lambda: list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""))))
    for read in readers:
        try:
            if isinstance(content := read(), list):
                return content
        except (ValueError, RecursionError, OSError, MemoryError, SystemError, pyarrow.ArrowException):
            continue
    return None


def must_be_read(name: str, data: bytes) -> bool:
    """Return whether the suffix fits the content."""
    lines = [line for line in data.removeprefix(b"\xef\xbb\xbf").splitlines() if line.strip()]
    starts = {".jsonl": b"{", ".json": b"[", ".parquet": b"PAR1"}
    start = starts.get(Path(name).suffix)
    return start is not None and bool(lines) and lines[0].lstrip().startswith(start)


def is_text(row: Any) -> bool:
    """Return whether a row can be encoded. Half of a surrogate pair cannot."""
    try:
        return bool(json.dumps(row, ensure_ascii=False, default=str).encode())
    except UnicodeEncodeError:
        return False


@BOUNDED
@given(FILES, st.one_of(st.none(), st.integers(1, 3)))
@example(("x.json", b"[" * 200_000), None)
@example(("x.jsonl", b'{"a":' * 100_000), None)
@example(("x.jsonl", b'{"a": ' + b"9" * 5000 + b"}"), None)
@example(("x.jsonl", '{"a": 1}'.encode("utf-16")), None)
def test_rows_of_any_file(file, limit):
    name, data = file
    with written(name, data) as path:
        outcome = attempt(lambda: read_rows(path, limit), name)
    expected = plain_rows(name, data)
    if isinstance(outcome, Refused):
        rows = expected if must_be_read(name, data) else None
        assert not (rows and all(isinstance(row, dict) and is_text(row) for row in rows)), outcome.message
        return
    assert expected is not None
    assert 0 < len(outcome) <= (limit or len(expected))
    assert repr(list(outcome.rows)) == repr(expected[:limit])  # NaN differs from itself
    assert all(isinstance(row, dict) for row in outcome.rows)


TOKENIZER = make_tokenizer()
SOURCES: dict[str, Callable[[str], Any]] = {
    "prompts": lambda path: PromptData(path, max_prompt_tokens=8),
    "chat": lambda path: PromptData(path, prompt_column="a.b"),
    "supervised": lambda path: SupervisedData(path, max_tokens=8),
    "preferences": lambda path: PreferenceData(path),
    "text": lambda path: TextData(path, block_tokens=4),
}


@BOUNDED
@given(st.sampled_from(sorted(SOURCES)), ROWS, st.sampled_from(["x.jsonl", "x.json", "x.parquet"]))
def test_a_dataset_of_any_rows(kind, rows, name):
    data = {
        "x.jsonl": lambda: b"\n".join(json.dumps(row).encode() for row in rows),
        "x.json": lambda: json.dumps(rows).encode(),
        "x.parquet": lambda: as_parquet(rows),
    }[name]()
    with written(name, data) as path:
        dataset = attempt(lambda: SOURCES[kind](str(path)).load(TOKENIZER), name)
    if isinstance(dataset, Refused):
        return
    assert len(dataset) >= 1
    report = dataset.report
    assert report.rows_kept == len(dataset)
    sample = dataset.sample([(0, i) for i in range(len(dataset))])
    assert set(dataset.keys) == sample.keys
    tokens = sample["prompt_ids" if "prompt_ids" in sample else "input_ids"]
    assert len(tokens) == report.tokens
    assert bool(((tokens >= 0) & (tokens < len(TOKENIZER))).all())
    assert "loss_mask" not in sample or bool(sample["loss_mask"].any())


@cache
def saved() -> tempfile.TemporaryDirectory[str]:
    """Return a folder written by `save_to_disk` to copy. It is removed at the end of the process."""
    import datasets

    folder = tempfile.TemporaryDirectory()
    datasets.disable_progress_bars()
    datasets.Dataset.from_list([{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]).save_to_disk(folder.name)
    return folder


@BOUNDED
@given(st.data())
def test_a_folder_of_datasets_with_a_damaged_file(data):
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "split")
        shutil.copytree(saved().name, folder)
        file = data.draw(st.sampled_from(sorted(folder.iterdir())))
        if data.draw(st.booleans()):
            file.write_bytes(data.draw(damaged(st.just(file.read_bytes()))))
        elif file.suffix == ".json":
            content = json.loads(file.read_bytes())
            content[data.draw(st.sampled_from(sorted(content)))] = data.draw(st.one_of(VALUE, ROW))
            file.write_text(json.dumps(content))
        else:
            file.unlink()
        outcome = attempt(lambda: read_rows(folder), "split")
        if not isinstance(outcome, Refused):
            assert all(isinstance(row, dict) for row in outcome.rows)
            assert len(outcome) >= 1


@BOUNDED
@given(
    st.one_of(
        st.text(max_size=6), st.sampled_from(["~nobody-there/x.jsonl", "a\0b.json", "x" * 5000, "/dev", ".", "a/b"])
    )
)
def test_any_text_as_a_path(path):
    with tempfile.TemporaryDirectory() as work, pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)  # "." in a checkout is its whole virtual environment
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        refused(path)


def refused(path):
    outcome = attempt(lambda: read_rows(path))
    assert isinstance(outcome, Refused)
