"""Collect encoded rows in memory, and count the rows that are dropped or truncated."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from realign.api.lengths import IntArray, Lengths
from realign.data.columns import Row
from realign.data.dataset import LoadReport, PackedTokens
from realign.data.image_files import RowImages
from realign.data.mixture import Mixture
from realign.data.rows import Dropped, Encoded, RowEncoder
from realign.data.table import Table
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
        kept: Indices of the rows among all rows that were encoded.
        mixture: Sources of the rows; None if there is one source.
        images: Images of each row; empty without images.
    """

    tokens: PackedTokens
    lengths: Lengths
    trained: npt.NDArray[np.bool_]
    labels: npt.NDArray[np.float32]
    margins: npt.NDArray[np.float32]
    rows: tuple[Row, ...]
    dropped: dict[str, int]
    truncated: int
    kept: IntArray
    mixture: Mixture | None = None
    images: tuple[RowImages, ...] = ()


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
    kept: array[int] = field(default_factory=lambda: array("q"))
    images: list[RowImages] = field(default_factory=list)

    def read(self, encoded: Iterable[Encoded]) -> Iterator[list[int]]:
        """Store each row, and yield the token ids of the kept ones."""
        for index, row in enumerate(encoded):
            if isinstance(row, Dropped):
                self.dropped[row.reason] += 1
                continue
            self.kept.append(index)
            self.counts.append(len(row.sequences))
            self.lengths.extend(len(sequence.ids) for sequence in row.sequences)
            for sequence in row.sequences:
                self.trained += sequence.trained
            self.labels.extend(row.labels)
            self.margins.extend(row.margins)
            self.truncated += row.truncated
            if self.keep_rows:
                self.rows.append(row.row)
            if row.images is not None:
                self.images.append(row.images)
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
        np.array(found.kept, dtype=np.int64),
        images=tuple(found.images),
    )


def collect_tables(
    tables: Sequence[Table], encoder: RowEncoder, *, keep_rows: bool = False
) -> tuple[Collected, LoadReport, list[int]]:
    """Return the rows of several tables in packed arrays, the report on them, and the number of rows of each table.

    Raises:
        DataError: a row is invalid (names its file and line), or no row is left.
    """
    placed = ((table.where(index), row) for table in tables for index, row in enumerate(table.rows))
    found = collect(encoder.encode(placed), keep_rows=keep_rows)
    bounds = np.searchsorted(found.kept, np.cumsum([0, *map(len, tables)]))
    report = load_report(tables, found.tokens, found.dropped, found.truncated)
    return found, report, np.diff(bounds).tolist()


def load_report(
    tables: Sequence[Table], tokens: PackedTokens, dropped: dict[str, int], truncated: int = 0
) -> LoadReport:
    """Return the report on the rows of `tables`, and log it if any row was dropped or truncated.

    Args:
        tables: The rows that were read.
        tokens: The rows of the resulting dataset.
        dropped: Number of dropped rows by reason.
        truncated: Number of rows truncated on the left.

    Raises:
        DataError: no row is left.
    """
    report = LoadReport(
        path=", ".join(str(table.path) for table in tables),
        rows_read=sum(map(len, tables)),
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
