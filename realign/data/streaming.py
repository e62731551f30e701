"""Streamed datasets: rows are read, shuffled and tokenized during training, with bounded memory.

An epoch reads every row of a source once. Shuffling permutes the files of the source, and then the rows in blocks of
`shuffle_buffer` rows. The first block of an epoch has a random length, so the borders of blocks differ between epochs.
A block and its permutation are a pure function of the files, the seed and the position at which the block begins.
Therefore a few numbers per source are the whole position, and a resumed run continues with the same rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from realign.api.sample import SequenceSample
from realign.api.seeds import derive_seed
from realign.data.dataset import Collected, Dataset, LoadReport, PackedDataset, collect
from realign.data.encoding import DroppedRow, EncodedRow, RowEncoder
from realign.data.files import Cursor, PlacedRow, Position, RowFile
from realign.data.order import Ramp, RowOrder, SourceChoice, epoch_order, fractions
from realign.errors import CheckpointError, DataError

logger = logging.getLogger(__name__)

_READ_AHEAD = 256
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
    weight: float | Ramp | None = None


class _RowKey(NamedTuple):
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


class _SourceStream:
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

    def take(self, n: int) -> list[tuple[int, _RowKey, EncodedRow]]:
        """Return epoch, key and tokens of the next `n` rows that are not dropped.

        Raises:
            DataError: a row is invalid (names its file and line), or an epoch has no row that is not dropped.
        """
        taken: list[tuple[int, _RowKey, EncodedRow]] = []
        while len(taken) < n:
            # The position moves after the rows are encoded. So a row with an error is read again by the next call.
            rows = self._next_rows(n - len(taken))
            encoded = list(self._encoder.encode((placed.where, placed.row) for placed in rows))
            epoch, counts = self.position.epoch, Counter(self.position.dropped)
            truncated = count = 0
            for placed, row in zip(rows, encoded, strict=True):
                if isinstance(row, DroppedRow):
                    self._note_drop(placed, row, counts)
                    continue
                count += 1
                truncated += row.truncated
                taken.append((epoch, _RowKey(self._indices[id(placed.file)], placed.number), row))
            self.position = replace(
                self.position,
                index=self.position.index + len(rows),
                kept=self.position.kept + count,
                read=self.position.read + len(rows),
                dropped=dict(counts),
                truncated=self.position.truncated + truncated,
            )
        return taken

    def _note_drop(self, placed: PlacedRow, dropped: DroppedRow, counts: Counter[str]) -> None:
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
        # Only a position from a checkpoint can be none of the file. Later, the same exception is a bug.
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
            # A block may span files. Only the first of them is entered at a position.
            cursor, reader = self._open(files, index, at.start if index == at.file else None)
            while len(rows) < size and (placed := next(reader, None)) is not None:
                rows.append(placed)
            if len(rows) == size:
                self._after = (index, cursor.here())
                # The reader stays open for the next block: opening a file at a position can mean reading up to it.
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
            return min(self.buffer, _READ_AHEAD)
        if self.position.block:
            return self.buffer
        return 1 + derive_seed(self.seed, "first block", self.position.epoch) % self.buffer

    def report(self) -> str:
        """Return the counts of the rows that were read and dropped."""
        at = self.position
        remaining = at.read - sum(at.dropped.values())
        parts = [f"{self.source.name}: {remaining} of {at.read} rows"]
        parts += [f"{count} dropped ({reason})" for reason, count in at.dropped.items()]
        return "; ".join(parts)


_ANCHORS = 16
"""Number of recent positions that are kept, to read earlier places again."""


class _Anchor(NamedTuple):
    """Position of all sources at a place of the stream."""

    place: int
    positions: tuple[StreamPosition, ...]


class StreamOrder(RowOrder):
    """Order of the rows of a streamed dataset. Rows can be requested from several threads.

    Recent positions are kept, and the first one. A place before the current one is read again from the nearest of them.
    """

    def __init__(self, dataset: StreamedDataset, seed: int, shuffle: bool) -> None:
        self._dataset = dataset
        self._streams = dataset.streams(seed, shuffle)
        self._choice = SourceChoice(dataset.weights, seed) if dataset.weights else None
        self._names = [source.name for source in dataset.sources]
        self._lock = RLock()
        self._place = 0
        self._anchors = [self._here()]
        self._ids: OrderedDict[int, tuple[int, _RowKey]] = OrderedDict()
        self._sources: dict[int, int] = {}
        self._request = 1
        self._drawn: Counter[int] = Counter()

    @property
    @override
    def rows_per_epoch(self) -> int | None:
        with self._lock:
            sizes = [stream.position.per_epoch for stream in self._streams]
            return None if None in sizes else sum(n for n in sizes if n is not None)

    @override
    def rows(self, places: Sequence[int]) -> list[tuple[int, _RowKey]]:
        """Return the (epoch, key) at each place. The dataset keeps the rows of the latest requests."""
        with self._lock:
            self._request = max(self._request, len(places))
            if missing := [place for place in places if place not in self._ids]:
                self._read(min(missing), max(missing) + 1)
            self._drawn = Counter(self._sources[place] for place in places)
            for place in places:  # as recent as those just read, so that none of this request is forgotten
                self._ids.move_to_end(place)
            rows = [self._ids[place] for place in places]
            # The previous request stays too: a batch that is sampled again would otherwise be read from an anchor.
            self._forget(2 * self._request)
            return rows

    @override
    def metrics(self) -> dict[str, float]:
        with self._lock:
            positions = [stream.position for stream in self._streams]
            metrics = {
                "data/epoch": float(min(at.epoch for at in positions)),
                "data/rows_read": float(sum(at.read for at in positions)),
                "data/rows_dropped": float(sum(sum(at.dropped.values()) for at in positions)),
                "data/rows_truncated": float(sum(at.truncated for at in positions)),
            }
            return metrics | (fractions(self._names, self._drawn) if self._choice is not None else {})

    @override
    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            anchors = [*self._anchors, *([self._here()] if self._place > self._anchors[-1].place else [])]
            return {"anchors": [{"place": a.place, "sources": [asdict(at) for at in a.positions]} for a in anchors]}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`.

        Raises:
            CheckpointError: the state is from another number of sources.
        """
        anchors = [
            _Anchor(anchor["place"], tuple(StreamPosition(**at) for at in anchor["sources"]))
            for anchor in state["anchors"]
        ]
        if any(len(anchor.positions) != len(self._streams) for anchor in anchors):
            raise CheckpointError(
                f"data: the dataset has {len(self._streams)} sources, but the checkpoint was written with another "
                "number. Restore the earlier sources, or set resume_skip=[data] to start at the first row."
            )
        with self._lock:
            self._anchors = anchors
            self._forget(0)
            self._seek(anchors[-1])

    def _here(self) -> _Anchor:
        return _Anchor(self._place, tuple(stream.position for stream in self._streams))

    def _seek(self, anchor: _Anchor) -> None:
        self._place = anchor.place
        for stream, position in zip(self._streams, anchor.positions, strict=True):
            stream.seek(position)

    def _read(self, first: int, last: int) -> None:
        """Read the places from `first` to before `last`."""
        if first < self._place:
            self._seek(self._anchors[bisect_right(self._anchors, first, key=lambda anchor: anchor.place) - 1])
        while self._place < last:
            if self._place >= self._anchors[-1].place + self._request:
                # The first anchor stays, so that any place can be reached again. The recent ones are for rollouts that
                # restart.
                self._anchors = [self._anchors[0], *self._anchors[1:][-_ANCHORS + 1 :], self._here()]
            n = min(last - self._place, _READ_AHEAD)
            for place, source, (epoch, key, row) in self._take(n):
                if place >= first:
                    self._ids[place] = (epoch, key)
                    # A place that was read again is as recent as a new one, and must not be forgotten first.
                    self._ids.move_to_end(place)
                    self._sources[place] = source
                    self._dataset.keep((epoch, key), row)

    def _take(self, n: int) -> list[tuple[int, int, tuple[int, _RowKey, EncodedRow]]]:
        """Return place, source and row of the next `n` places."""
        places = range(self._place, self._place + n)
        chosen = [0] * n if self._choice is None else [self._choice.of(place)[0] for place in places]
        # One call per source, so that its rows are tokenized together.
        taken = {source: iter(self._streams[source].take(count)) for source, count in sorted(Counter(chosen).items())}
        self._place += n
        return [(place, source, next(taken[source])) for place, source in zip(places, chosen, strict=True)]

    def _forget(self, most: int) -> None:
        while len(self._ids) > most:
            place, row = self._ids.popitem(last=False)
            del self._sources[place]
            self._dataset.forget(row)


class StreamedDataset(Dataset):
    """Rows that are read during training. `order` decides which rows are in memory, for `sample`."""

    def __init__(
        self,
        sources: Sequence[StreamSource],
        encoder: RowEncoder,
        pack: Callable[[Collected, LoadReport], PackedDataset],
        buffer: int,
        *,
        keep_rows: bool,
    ) -> None:
        """Initialize the dataset. No row is read before the first sample.

        Args:
            sources: The sources. All or none have a weight.
            encoder: Conversion of rows to tokens.
            pack: Returns encoded rows as a dataset.
            buffer: Number of rows that are shuffled together.
            keep_rows: Whether samples contain the rows themselves.
        """
        self.sources, self.encoder, self.buffer = sources, encoder, buffer
        self.weights = tuple(source.weight for source in sources if source.weight is not None)
        self._pack, self._keep_rows = pack, keep_rows
        self._rows: dict[tuple[int, _RowKey], EncodedRow] = {}
        self._keys = tuple(self._pack_rows([]).keys)  # a constant of the class of the packed rows

    def __len__(self) -> int:
        raise TypeError("the number of rows of a streamed dataset is unknown")

    @property
    @override
    def size(self) -> None:
        return

    @property
    @override
    def keys(self) -> tuple[str, ...]:
        return self._keys

    @property
    @override
    def longest_sequence(self) -> int:
        """Maximum length of a sequence, since the lengths of the rows are unknown."""
        return self.encoder.limit.tokens or 0

    @override
    def describe(self) -> str:
        files = sum(len(source.files) for source in self.sources)
        return f"streamed from {files} file{'s' if files > 1 else ''}, {self.buffer:,} rows shuffled at a time"

    @override
    def identity(self) -> str:
        """Return a SHA-256 of the identities of the files, and of the settings that decide about the order."""
        parts = [[*(file.identity() for file in source.files), source.weight] for source in self.sources]
        return hashlib.sha256(json.dumps([parts, self.buffer]).encode()).hexdigest()

    def streams(self, seed: int, shuffle: bool) -> list[_SourceStream]:
        """Return the rows of each source as a stream, or of all sources as one stream if they have no weights."""
        counts = np.cumsum([0, *(sum(len(file.leaves()) for file in s.files) for s in self.sources)])
        if not self.weights:
            joined = StreamSource(
                ", ".join(source.name for source in self.sources),
                [file for source in self.sources for file in source.files],
            )
            return [_SourceStream(joined, range(counts[-1]), self.encoder, seed, shuffle, self.buffer)]
        return [
            _SourceStream(
                source,
                range(counts[i], counts[i + 1]),
                self.encoder,
                derive_seed(seed, "source", i),
                shuffle,
                self.buffer,
            )
            for i, source in enumerate(self.sources)
        ]

    @override
    def order(self, seed: int, shuffle: bool) -> StreamOrder:
        return StreamOrder(self, seed, shuffle)

    def keep(self, row: tuple[int, _RowKey], encoded: EncodedRow) -> None:
        """Keep the tokens of a row in memory."""
        self._rows[row] = encoded

    def forget(self, row: tuple[int, _RowKey]) -> None:
        """Remove the tokens of a row from memory."""
        self._rows.pop(row, None)

    @override
    def sample(self, rows: Sequence[tuple[int, Any]]) -> SequenceSample:
        """Return the rows at the given (epoch, key) pairs, which the order has just returned."""
        return self._pack_rows(self._rows[row] for row in rows).with_ids([f"{key}@{epoch}" for epoch, key in rows])

    def _pack_rows(self, rows: Iterable[EncodedRow]) -> PackedDataset:
        collected = collect(rows, keep_rows=self._keep_rows)
        tokens = collected.tokens
        report = LoadReport("", len(tokens), len(tokens), {}, collected.truncated, len(tokens.ids), 0)
        return self._pack(collected, report)
