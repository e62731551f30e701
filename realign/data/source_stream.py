"""The endless stream of the rows of a source, which are read, shuffled and tokenized in blocks.

An epoch reads every row of a source once. Shuffling permutes the files of the source, and then the rows in blocks of
`shuffle_buffer` rows. The first block of an epoch has a random length, so the borders of blocks differ between epochs.
A block and its permutation are a pure function of the files, the seed and the position at which the block begins.
Therefore a few numbers per source are the whole position, and a resumed run continues with the same rows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from realign.api.seeds import derive_seed
from realign.data.order import epoch_order
from realign.data.row_files import Cursor, PlacedRow, Position, RowFile
from realign.data.rows import Dropped, EncodedRow, RowEncoder
from realign.errors import CheckpointError, DataError

logger = logging.getLogger(__name__)

READ_AHEAD = 256
"""Maximum number of rows that are read at once."""


class StreamSource(NamedTuple):
    """A source of a streamed dataset.

    Attributes:
        name: Name of the source in metrics.
        files: Its files.
        weight: Its weight; None if all sources are read in each epoch.
    """

    name: str
    files: Sequence[RowFile]
    weight: float | None = None


class RowKey(NamedTuple):
    """Identity of a row within an epoch: the file, counted from 0 in all sources, and the row or line number."""

    file: int
    number: int

    def __str__(self) -> str:
        return f"{self.file}.{self.number}"


@dataclass(frozen=True)
class StreamPosition:
    """Position in the endless stream of the rows of a source, and the counts of the rows before it.

    Attributes:
        epoch: Epoch, from 0.
        block: Block within the epoch.
        file: File at which the block begins, counted in the order of the epoch.
        start: Position in that file.
        index: Number of rows of the block that were read.
        kept: Number of rows of the epoch that were kept.
        per_epoch: Number of rows that an epoch keeps; None before the end of the first epoch.
        read: Number of rows read, in all epochs.
        dropped: Number of dropped rows by reason.
        truncated: Number of rows truncated on the left.
    """

    epoch: int = 0
    block: int = 0
    file: int = 0
    start: Position = None
    index: int = 0
    kept: int = 0
    per_epoch: int | None = None
    read: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    truncated: int = 0


class SourceStream:
    """The rows of a source in training order, repeated endlessly."""

    def __init__(
        self, source: StreamSource, indices: Sequence[int], encoder: RowEncoder, seed: int, shuffle: bool, buffer: int
    ) -> None:
        """Start before the first row.

        Args:
            source: The source.
            indices: Index of each leaf file of the source in all sources.
            encoder: Conversion of rows to tokens.
            seed: Seed of the order.
            shuffle: Whether to shuffle files and rows.
            buffer: Number of rows that are shuffled together.
        """
        self.source, self.seed, self.shuffle, self.buffer = source, seed, shuffle, buffer
        self._encoder = encoder
        leaves = [leaf for file in source.files for leaf in file.leaves()]
        self._indices = {id(leaf): index for leaf, index in zip(leaves, indices, strict=True)}
        self.position = StreamPosition()
        self._block: list[PlacedRow] | None = None
        self._after: tuple[int, Position] | None = None  # file and position at which the next block begins
        self._reader: tuple[int, Cursor, Iterator[PlacedRow]] | None = None
        self._restored = False  # whether the position is from `seek`, and was not used yet

    def seek(self, position: StreamPosition) -> None:
        """Continue at a position."""
        self.position, self._block, self._reader, self._restored = position, None, None, True

    def take(self, n: int) -> list[tuple[int, RowKey, EncodedRow]]:
        """Return epoch, key and tokens of the next `n` rows that are not dropped.

        Raises:
            DataError: a row is invalid (names its file and line), or an epoch has no row that is not dropped.
        """
        found: list[tuple[int, RowKey, EncodedRow]] = []
        while len(found) < n:
            rows = self._next_rows(n - len(found))
            encoded = list(self._encoder.encode((placed.where, placed.row) for placed in rows))
            epoch, counts = self.position.epoch, Counter(self.position.dropped)
            truncated = kept = 0
            for placed, one in zip(rows, encoded, strict=True):
                if isinstance(one, Dropped):
                    self._note_drop(placed, one, counts)
                    continue
                kept += 1
                truncated += one.truncated
                found.append((epoch, RowKey(self._indices[id(placed.file)], placed.number), one))
            self.position = replace(
                self.position,
                index=self.position.index + len(rows),
                kept=self.position.kept + kept,
                read=self.position.read + len(rows),
                dropped=dict(counts),
                truncated=self.position.truncated + truncated,
            )
        return found

    def _note_drop(self, placed: PlacedRow, dropped: Dropped, counts: Counter[str]) -> None:
        counts[dropped.reason] += 1
        if counts[dropped.reason] == 1:
            logger.warning(
                "%s was dropped (%s). The metric data/rows_dropped counts further ones.", placed.where, dropped.reason
            )

    def _next_rows(self, n: int) -> list[PlacedRow]:
        """Return up to `n` of the next rows, at least one, all of the same block."""
        if self._block is None:
            self._block = self._read_block()
        while self.position.index >= len(self._block):
            self._advance()
            self._block = self._read_block()
        return self._block[self.position.index : self.position.index + n]

    def _advance(self) -> None:
        """Move to the start of the next block."""
        at = self.position
        if self._after is not None:
            file, start = self._after
            self.position = replace(at, block=at.block + 1, file=file, start=start, index=0)
            return
        if not at.kept:
            raise DataError(f"no row is left of {self.report()}")
        if at.epoch == 0:
            logger.info("end of the first epoch: %s", self.report())
        self.position = replace(
            at, epoch=at.epoch + 1, block=0, file=0, start=None, index=0, kept=0, per_epoch=at.per_epoch or at.kept
        )

    def _read_block(self) -> list[PlacedRow]:
        """Read the block at the position, in training order; empty at the end of the files.

        Raises:
            DataError: a row is malformed.
            CheckpointError: the position is from a checkpoint and is none of the file.
        """
        restored, self._restored = self._restored, False
        try:
            return self._block_here()
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            if not restored:
                raise
            raise CheckpointError(
                f"data: the position {self.position.start!r} in the checkpoint is none of {self.source.name}. Resume "
                "from another checkpoint, or set resume_skip=[data] to start at the first row."
            ) from error

    def _block_here(self) -> list[PlacedRow]:
        at, files = self.position, self._files()
        size, rows = self._block_size(), list[PlacedRow]()
        index, self._after = at.file, None
        while index < len(files) and len(rows) < size:
            cursor, reader = self._open(files, index, at.start if index == at.file else None)
            while len(rows) < size and (placed := next(reader, None)) is not None:
                rows.append(placed)
            if len(rows) == size:
                self._after = (index, cursor.here())
                self._reader = (index, cursor, reader)
            else:
                index, self._reader = index + 1, None
        if not self.shuffle:
            return rows
        order = epoch_order(len(rows), derive_seed(self.seed, "block", at.epoch), at.block)
        return [rows[i] for i in order.tolist()]

    def _open(self, files: Sequence[RowFile], index: int, start: Position) -> tuple[Cursor, Iterator[PlacedRow]]:
        """Return the reader of a file at a position: that of the previous block, if it is there."""
        if self._reader is not None and self._reader[0] == index:
            return self._reader[1], self._reader[2]
        cursor = Cursor(start)
        return cursor, files[index].rows(cursor)

    def _files(self) -> list[RowFile]:
        """Return the files in the order of the epoch."""
        files = list(self.source.files)
        if not self.shuffle:
            return files
        return [
            files[i] for i in epoch_order(len(files), derive_seed(self.seed, "files"), self.position.epoch).tolist()
        ]

    def _block_size(self) -> int:
        """Return the number of rows of the block: random for the first one of an epoch, or else that of the buffer."""
        if not self.shuffle:
            return min(self.buffer, READ_AHEAD)
        if self.position.block:
            return self.buffer
        return 1 + derive_seed(self.seed, "first block", self.position.epoch) % self.buffer

    def report(self) -> str:
        """Return the counts of the rows that were read and dropped."""
        at = self.position
        kept = at.read - sum(at.dropped.values())
        parts = [f"{self.source.name}: {kept} of {at.read} rows"]
        parts += [f"{count} dropped ({reason})" for reason, count in at.dropped.items()]
        return "; ".join(parts)
