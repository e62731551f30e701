"""Collect encoded rows in memory, and count the rows that are dropped or truncated."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from realign.api.lengths import Lengths
from realign.data.columns import Row
from realign.data.dataset import LoadReport, PackedTokens
from realign.data.files import Table
from realign.data.rows import Dropped, Encoded, RowEncoder
from realign.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Collected:
    """Encoded rows in packed arrays.

    Attributes:
        tokens: Token ids of each row, of all its sequences.
        lengths: Lengths of the sequences of each row.
        trained: For each token, whether the model writes it and trains on it.
        labels: Label of each sequence; empty without labels.
        margins: Preference margin of each sequence; empty without margins.
        rows: The rows themselves; empty if they were not kept.
        dropped: Number of dropped rows by reason.
        truncated: Number of rows truncated on the left.
    """

    tokens: PackedTokens
    lengths: Lengths
    trained: npt.NDArray[np.bool_]
    labels: npt.NDArray[np.float32]
    margins: npt.NDArray[np.float32]
    rows: tuple[Row, ...]
    dropped: dict[str, int]
    truncated: int


@dataclass
class _Collector:
    """Arrays that grow row by row."""

    keep_rows: bool
    counts: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    trained: bytearray = field(default_factory=bytearray)
    labels: array[float] = field(default_factory=lambda: array("f"))
    margins: array[float] = field(default_factory=lambda: array("f"))
    rows: list[Row] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0

    def read(self, encoded: Iterable[Encoded]) -> Iterator[list[int]]:
        """Store each row, and yield the token ids of the kept ones."""
        for row in encoded:
            if isinstance(row, Dropped):
                self.dropped[row.reason] += 1
                continue
            self.counts.append(len(row.sequences))
            self.lengths.extend(len(sequence.ids) for sequence in row.sequences)
            for sequence in row.sequences:
                self.trained += sequence.trained
            self.labels.extend(row.labels)
            self.margins.extend(row.margins)
            self.truncated += row.truncated
            if self.keep_rows:
                self.rows.append(row.row)
            yield [token for sequence in row.sequences for token in sequence.ids]


def collect(encoded: Iterable[Encoded], *, keep_rows: bool = False) -> Collected:
    """Return encoded rows in packed arrays.

    Args:
        encoded: The rows, as `RowEncoder.encode` yields them.
        keep_rows: Whether to keep the rows themselves.
    """
    found = _Collector(keep_rows)
    tokens = PackedTokens.pack(found.read(encoded))
    return Collected(
        tokens,
        Lengths(np.array(found.counts, dtype=np.int64), np.array(found.lengths, dtype=np.int64)),
        np.frombuffer(bytes(found.trained), dtype=np.bool_),
        np.array(found.labels, dtype=np.float32),
        np.array(found.margins, dtype=np.float32),
        tuple(found.rows),
        dict(found.dropped),
        found.truncated,
    )


def collect_table(table: Table, encoder: RowEncoder, *, keep_rows: bool = False) -> tuple[Collected, LoadReport]:
    """Return the rows of a table in packed arrays, and the report on them.

    Raises:
        DataError: a row is invalid (names its file and line), or no row is left.
    """
    placed = ((table.where(index), row) for index, row in enumerate(table.rows))
    found = collect(encoder.encode(placed), keep_rows=keep_rows)
    return found, load_report(table, found.tokens, {**table.dropped, **found.dropped}, found.truncated)


def load_report(table: Table, tokens: PackedTokens, dropped: dict[str, int], truncated: int = 0) -> LoadReport:
    """Return the report on the rows of `table`, and log it if any row was dropped or truncated.

    Args:
        table: The rows of the file.
        tokens: The rows of the resulting dataset.
        dropped: Number of dropped rows by reason.
        truncated: Number of rows truncated on the left.

    Raises:
        DataError: no row is left.
    """
    report = LoadReport(
        path=str(table.path),
        rows_read=len(table) + sum(table.dropped.values()),
        rows_kept=len(tokens),
        rows_dropped=dropped,
        rows_truncated=truncated,
        tokens=len(tokens.ids),
        longest=int((tokens.starts[1:] - tokens.starts[:-1]).max(initial=0)),
    )
    if not len(tokens):
        raise DataError(f"no row is left of {report}")
    if dropped or truncated:
        logger.warning("%s", report)
    return report
