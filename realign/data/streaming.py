"""Streamed datasets: rows are read and tokenized during training, with bounded memory."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from threading import RLock
from typing import Any, NamedTuple

import numpy as np

from realign.api.sample import SequenceSample
from realign.api.seeds import derive_seed
from realign.data.collect import Collected, collect
from realign.data.dataset import Dataset, LoadReport, PackedDataset
from realign.data.mixture import SourceChoice, fractions
from realign.data.order import RowOrder
from realign.data.rows import EncodedRow, RowEncoder
from realign.data.source_stream import READ_AHEAD, RowKey, SourceStream, StreamPosition, StreamSource
from realign.errors import CheckpointError

ANCHORS = 16
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
        self._ids: OrderedDict[int, tuple[int, RowKey]] = OrderedDict()
        self._sources: dict[int, int] = {}
        self._request = 1
        self._drawn: Counter[int] = Counter()

    @property
    def rows_per_epoch(self) -> int | None:
        """See `RowOrder`."""
        with self._lock:
            found = [stream.position.per_epoch for stream in self._streams]
            return None if None in found else sum(n for n in found if n is not None)

    def rows(self, places: Sequence[int]) -> list[tuple[int, RowKey]]:
        """See `RowOrder`. The dataset keeps the rows of the latest requests."""
        with self._lock:
            self._request = max(self._request, len(places))
            if missing := [place for place in places if place not in self._ids]:
                self._read(min(missing), max(missing) + 1)
            self._drawn = Counter(self._sources[place] for place in places)
            found = [self._ids[place] for place in places]
            self._forget(2 * self._request)
            return found

    def metrics(self) -> dict[str, float]:
        """See `RowOrder`."""
        with self._lock:
            positions = [stream.position for stream in self._streams]
            found = {
                "data/epoch": float(min(at.epoch for at in positions)),
                "data/rows_read": float(sum(at.read for at in positions)),
                "data/rows_dropped": float(sum(sum(at.dropped.values()) for at in positions)),
                "data/rows_truncated": float(sum(at.truncated for at in positions)),
            }
            return found | (fractions(self._names, self._drawn) if self._choice is not None else {})

    def state_dict(self) -> dict[str, Any]:
        """See `RowOrder`."""
        with self._lock:
            anchors = [*self._anchors, *([self._here()] if self._place > self._anchors[-1].place else [])]
            return {"anchors": [{"place": a.place, "sources": [asdict(at) for at in a.positions]} for a in anchors]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `RowOrder`.

        Raises:
            CheckpointError: the state is from another number of sources.
        """
        anchors = [
            _Anchor(one["place"], tuple(StreamPosition(**at) for at in one["sources"])) for one in state["anchors"]
        ]
        if any(len(one.positions) != len(self._streams) for one in anchors):
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
                self._anchors = [self._anchors[0], *self._anchors[1:][-ANCHORS + 1 :], self._here()]
            n = min(last - self._place, READ_AHEAD)
            for place, source, (epoch, key, row) in self._take(n):
                if place >= first:
                    self._ids[place] = (epoch, key)
                    self._ids.move_to_end(place)
                    self._sources[place] = source
                    self._dataset.keep((epoch, key), row)

    def _take(self, n: int) -> list[tuple[int, int, tuple[int, RowKey, EncodedRow]]]:
        """Return place, source and row of the next `n` places."""
        places = range(self._place, self._place + n)
        chosen = [0] * n if self._choice is None else [self._choice.of(place)[0] for place in places]
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
        self._rows: dict[tuple[int, RowKey], EncodedRow] = {}
        self._keys = tuple(self._packed([]).keys)  # a constant of the class of the packed rows

    def __len__(self) -> int:
        raise TypeError("the number of rows of a streamed dataset is unknown")

    @property
    def size(self) -> None:
        """See `Dataset`."""
        return

    @property
    def keys(self) -> tuple[str, ...]:
        """See `Dataset`."""
        return self._keys

    @property
    def longest_sequence(self) -> int:
        """Maximum length of a sequence, since the lengths of the rows are unknown."""
        return self.encoder.limit.tokens or 0

    def describe(self) -> str:
        """See `Dataset`."""
        files = sum(len(source.files) for source in self.sources)
        return f"streamed from {files} file{'s' if files > 1 else ''}, {self.buffer:,} rows shuffled at a time"

    def identity(self) -> str:
        """Return a SHA-256 of the identities of the files, and of the settings that decide about the order."""
        parts = [[*(file.identity() for file in source.files), source.weight] for source in self.sources]
        return hashlib.sha256(json.dumps([parts, self.buffer]).encode()).hexdigest()

    def streams(self, seed: int, shuffle: bool) -> list[SourceStream]:
        """Return the rows of each source as a stream, or of all sources as one stream if they have no weights."""
        counts = np.cumsum([0, *(sum(len(file.leaves()) for file in s.files) for s in self.sources)])
        if not self.weights:
            joined = StreamSource(
                ", ".join(source.name for source in self.sources),
                [file for source in self.sources for file in source.files],
            )
            return [SourceStream(joined, range(counts[-1]), self.encoder, seed, shuffle, self.buffer)]
        return [
            SourceStream(
                source,
                range(counts[i], counts[i + 1]),
                self.encoder,
                derive_seed(seed, "source", i),
                shuffle,
                self.buffer,
            )
            for i, source in enumerate(self.sources)
        ]

    def order(self, seed: int, shuffle: bool) -> StreamOrder:
        """See `Dataset`."""
        return StreamOrder(self, seed, shuffle)

    def keep(self, row: tuple[int, RowKey], encoded: EncodedRow) -> None:
        """Keep the tokens of a row in memory."""
        self._rows[row] = encoded

    def forget(self, row: tuple[int, RowKey]) -> None:
        """Remove the tokens of a row from memory."""
        self._rows.pop(row, None)

    def sample(self, rows: Sequence[tuple[int, Any]]) -> SequenceSample:
        """Return the rows at the given (epoch, key) pairs, which the order has just returned."""
        return self._packed(self._rows[row] for row in rows).with_ids([f"{key}@{epoch}" for epoch, key in rows])

    def _packed(self, rows: Iterable[EncodedRow]) -> PackedDataset:
        found = collect(rows, keep_rows=self._keep_rows)
        tokens = found.tokens
        report = LoadReport("", len(tokens), len(tokens), {}, found.truncated, len(tokens.ids), 0)
        return self._pack(found, report)
