"""Base classes of datasets and their config nodes, and datasets in memory: encoded rows packed in a few arrays."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from realign.api.lengths import IntArray, Lengths
from realign.api.sample import SequenceSample
from realign.data.columns import Row
from realign.data.encoding import DroppedRow, Encoded, RowEncoder
from realign.data.images import RowImages
from realign.data.order import EpochOrder, Mixture, RowOrder
from realign.data.row_sources import Table
from realign.data.token_cache import CachedEncoder
from realign.errors import DataError
from realign.settings import Settings

logger = logging.getLogger(__name__)


class Dataset(ABC):
    """Rows that can be sampled as packed sequences, such as `PromptDataset`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def size(self) -> int | None:
        """Number of rows; None if it is unknown, because the rows are streamed."""
        return len(self)

    def order(self, seed: int, shuffle: bool) -> RowOrder:
        """Return the training order of the rows. Without `shuffle`, each epoch has the order of the dataset."""
        return EpochOrder(len(self), seed, shuffle)

    def describe(self) -> str:
        """Return the number of rows as text."""
        return f"{len(self):,} rows"

    def identity(self) -> str | None:
        """Return a hash that differs if the rows differ, for datasets without their rows in memory; None for others."""
        return None

    def source_rows(self) -> Sequence[Row]:
        """Return the rows as they were read, with all columns; empty if the dataset doesn't keep them."""
        return self.sample([(0, row) for row in range(len(self))]).metadata.get("row", ())

    @property
    @abstractmethod
    def keys(self) -> Sequence[str]:
        """Keys that every sample has."""

    @abstractmethod
    def sample(self, rows: Sequence[tuple[int, int]]) -> SequenceSample:
        """Return the rows at the given (epoch, row) pairs."""

    @property
    def longest_sequence(self) -> int:
        """Length of the longest sequence in tokens; 0 if unknown."""
        return 0

    @property
    def longest_row(self) -> int:
        """Length of the longest row in tokens, summed over its sequences; 0 if unknown."""
        return self.longest_sequence

    @property
    def longest_text(self) -> int:
        """Length in tokens of the longest additional text of the rows, such as pretraining text; 0 if there is none."""
        return 0


class DataSpec(Settings, ABC):
    """Base class of config nodes that load a dataset, such as `PromptData`. Subclasses implement `load`."""

    @property
    def streams(self) -> bool:
        """Whether rows are read during training, so that their number is unknown."""
        return False

    def describe_source(self) -> str:
        """Return where the rows come from, for the launch table; empty if unknown."""
        return ""

    def describe_columns(self) -> str:
        """Return what the columns of the first row were recognized as; empty if unknown."""
        return ""

    @property
    def has_images(self) -> bool:
        """Whether the rows have images."""
        return False

    @abstractmethod
    def load(self, tokenizer: Any) -> Dataset:
        """Read, validate and tokenize the rows.

        Raises:
            DataError: the file, a row or the tokenizer is unusable; names the file and line.
            ConfigError: the tokenizer does not support a setting.
        """

    def check(self, where: str) -> None:
        """Validate the spec at the config key `where` before anything is loaded.

        Raises:
            DataError: a file is missing or unusable; names the key, the value and the nearest valid one.
        """


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """Token ids of N texts: `ids` [T] int32, concatenated, and `starts` [N + 1], the offset of each text."""

    ids: npt.NDArray[np.int32]
    starts: IntArray

    @classmethod
    def pack(cls, texts: Iterable[Sequence[int]]) -> PackedTokens:
        """Concatenate lists of ids. Reads one list at a time, so `texts` may be a generator."""
        ids = array("i")  # 4 bytes per token; a list would take about 36
        starts = [0]
        for text in texts:
            ids.extend(text)
            starts.append(len(ids))
        return cls(np.array(ids, dtype=np.int32), np.array(starts, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def gather(self, rows: IntArray) -> tuple[Tensor, Lengths]:
        """Return the texts of the given rows, packed (int64), with one sequence per prompt."""
        parts = [self.ids[a:b] for a, b in zip(self.starts[rows], self.starts[rows + 1], strict=True)]
        packed = np.concatenate(parts) if parts else self.ids[:0]
        lengths = self.starts[rows + 1] - self.starts[rows]
        return torch.from_numpy(packed.astype(np.int64)), Lengths(np.ones_like(rows), lengths)


@dataclass(frozen=True)
class LoadReport:
    """Counts of the rows that were read, kept, dropped and truncated while loading a file.

    Attributes:
        path: Path of the file.
        rows_read: Number of rows read, after applying the limit and the split.
        rows_kept: Number of rows in the dataset.
        rows_dropped: Number of dropped rows by reason.
        rows_truncated: Number of kept rows whose prompt was truncated on the left.
        tokens: Number of tokens in the dataset.
        longest: Length of the longest kept text in tokens.
    """

    path: str
    rows_read: int
    rows_kept: int
    rows_dropped: dict[str, int]
    rows_truncated: int
    tokens: int
    longest: int

    def __str__(self) -> str:
        parts = [
            f"{self.path}: {self.rows_kept} of {self.rows_read} rows, {self.tokens} tokens, longest {self.longest}"
        ]
        parts += [f"{count} dropped ({reason})" for reason, count in self.rows_dropped.items()]
        parts += [f"{self.rows_truncated} truncated on the left"] if self.rows_truncated else []
        return "; ".join(parts)


@dataclass(frozen=True, eq=False)
class PackedDataset(Dataset):
    """Base class of datasets whose rows can be drawn in any order, any number of times.

    Attributes:
        tokens: Token ids of each row.
        report: Counts of the rows that were read and dropped.
        mixture: Sources of the rows; None if there is one source.
        images: Images of each row, which samples contain in the keys `IMAGE_KEYS`; empty without images.
    """

    tokens: PackedTokens
    report: LoadReport
    mixture: Mixture | None = dataclasses.field(default=None, kw_only=True)
    images: tuple[RowImages, ...] = dataclasses.field(default=(), kw_only=True)

    def __len__(self) -> int:
        return len(self.tokens)

    @override
    def order(self, seed: int, shuffle: bool) -> RowOrder:
        return super().order(seed, shuffle) if self.mixture is None else self.mixture.order(seed, shuffle)

    @override
    def describe(self) -> str:
        rows = super().describe()
        return rows if self.mixture is None else f"{rows}: {self.mixture.describe()}"

    def with_ids(self, ids: Sequence[Hashable]) -> SequenceSample:
        """Return all rows, with these ids."""
        return self._take_rows(np.arange(len(self)), tuple(ids))

    @property
    @override
    def longest_sequence(self) -> int:
        return self.report.longest

    @property
    @override
    def longest_row(self) -> int:
        return self.report.longest

    @override
    def sample(self, rows: Sequence[tuple[int, int]]) -> SequenceSample:
        """Return the rows at the given (epoch, row) pairs, with the keys of the dataset.

        Ids are `"{row}@{epoch}"`, so one batch may contain a row twice, as two prompts from two epochs.

        Args:
            rows: (epoch, row) of each prompt, as returned by `order.batch_indices`; rows count from 0.

        Raises:
            ValueError: a row is outside the dataset, or an (epoch, row) pair occurs twice.
        """
        chosen = np.array([row for _, row in rows], dtype=np.int64)
        if len(outside := chosen[(chosen < 0) | (chosen >= len(self))]):
            raise ValueError(f"row {outside[0]} is outside the dataset of {len(self)} rows.")
        return self._take_rows(chosen, tuple(f"{row}@{epoch}" for epoch, row in rows))

    def _take_rows(self, rows: IntArray, ids: tuple[Hashable, ...]) -> SequenceSample:
        sample = self._sample(rows, ids)
        if not self.images or not len(rows):
            return sample
        patches = [self._patches(row) for row in rows.tolist()]
        return sample.merge(
            SequenceSample.from_sequences(ids, {key: [[x[key]] for x in patches] for key in patches[0]})
        )

    def _patches(self, row: int) -> dict[str, Tensor]:
        try:
            return self.images[row].patches()
        except DataError as error:  # a file was changed or removed since the start
            raise DataError(f"{self.report.path}, row {row} (from 0, without dropped rows): {error}") from error

    @abstractmethod
    def _sample(self, rows: IntArray, ids: tuple[Hashable, ...]) -> SequenceSample: ...


@dataclass(frozen=True, eq=False)
class SequenceDataset(PackedDataset):
    """Base class of datasets whose rows have one or several sequences of prompt and response tokens.

    A row stores the tokens of all its sequences, concatenated. `report.longest` is the length of the longest row, which
    a micro-batch must fit.

    Attributes:
        lengths: Lengths of the sequences of each row.
        trained: For each token, whether the model writes it and trains on it.
        train_on_prompt: Whether the loss includes all other tokens too.
    """

    lengths: Lengths
    trained: npt.NDArray[np.bool_]
    train_on_prompt: bool = dataclasses.field(default=False, kw_only=True)

    @classmethod
    def of(cls, rows: Collected, report: LoadReport, **own: Any) -> Self:
        """Return a dataset of encoded rows; `own` are the fields that a subclass adds, and `train_on_prompt`."""
        return cls(rows.tokens, report, rows.lengths, rows.trained, mixture=rows.mixture, images=rows.images, **own)

    @property
    @override
    def longest_sequence(self) -> int:
        """Length in tokens of the longest sequence."""
        return int(self.lengths.flat.max(initial=0))

    @override
    def _sample(self, rows: IntArray, ids: tuple[Hashable, ...]) -> SequenceSample:
        tokens_T, _ = self.tokens.gather(rows)
        sequences, counts = self.lengths.sequences_of(rows)
        lengths = Lengths(counts, self.lengths.flat[sequences])
        first_T = np.arange(lengths.total) == np.repeat(lengths.starts[:-1], lengths.flat)
        spans = zip(self.tokens.starts[rows], self.tokens.starts[rows + 1], strict=True)
        # The empty slice is for a batch without rows: numpy cannot concatenate nothing.
        trained_T = np.concatenate([self.trained[:0], *(self.trained[a:b] for a, b in spans)])
        loss_T = (trained_T | self.train_on_prompt) & ~first_T  # nothing predicts the first token
        data = {
            "input_ids": tokens_T,
            "prompt_mask": torch.from_numpy(~trained_T),
            "loss_mask": torch.from_numpy(loss_T),
        }
        return SequenceSample(ids, data, dict.fromkeys(data, lengths))


def content_hash(dataset: Any) -> str | None:
    """Return the SHA-256 of the contents of a dataset: tokens, lengths, and rows of its file.

    Returns:
        The hex digest, or the identity of a dataset that does not contain its rows; None if the dataset contains no
        `PackedTokens` and has no identity.
    """
    if isinstance(dataset, Dataset) and (own := dataset.identity()) is not None:
        return own
    if not _holds_tokens(dataset):
        return None
    digest = hashlib.sha256()
    for part in _contents(dataset):
        digest.update(part)
    return digest.hexdigest()


def _holds_tokens(value: Any) -> bool:
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return isinstance(value, PackedTokens) or any(_holds_tokens(getattr(value, field.name)) for field in fields)


def _contents(value: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, np.ndarray):
        yield np.ascontiguousarray(value).data
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            content = getattr(value, field.name)
            if field.name != "report":  # contains paths, which are not content
                yield from _contents(content)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _contents(item)
    elif isinstance(value, bytes):
        yield value
    elif isinstance(value, Mapping | str | int | float | None):
        yield json.dumps(value, default=str, sort_keys=True).encode()


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
        indices: Indices of the rows among all rows that were encoded.
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
    indices: IntArray
    mixture: Mixture | None = None
    images: tuple[RowImages, ...] = ()


def collect(encoded: Iterable[Encoded], *, keep_rows: bool = False) -> Collected:
    """Return encoded rows in packed arrays.

    Args:
        encoded: The rows, as `RowEncoder.encode` yields them.
        keep_rows: Whether to keep the rows themselves.
    """
    # arrays, since a list takes several times as much memory per number
    indices, counts, lengths = array("q"), array("q"), array("q")
    labels, margins, trained = array("f"), array("f"), bytearray()
    rows: list[Row] = []
    images: list[RowImages] = []
    dropped = Counter[str]()
    truncated = 0

    def kept_ids() -> Iterator[list[int]]:
        """Store each row, and yield the token ids of those that are not dropped."""
        nonlocal truncated
        for index, row in enumerate(encoded):
            if isinstance(row, DroppedRow):
                dropped[row.reason] += 1
                continue
            indices.append(index)
            counts.append(len(row.sequences))
            lengths.extend(len(sequence.ids) for sequence in row.sequences)
            for sequence in row.sequences:
                trained.extend(sequence.trained)
            labels.extend(row.labels)
            margins.extend(row.margins)
            truncated += row.truncated
            if keep_rows:
                rows.append(row.row)
            if row.images is not None:
                images.append(row.images)
            yield [token for sequence in row.sequences for token in sequence.ids]

    # `pack` pulls the rows through `kept_ids` one at a time, so the rows as Python objects never exist all at once.
    tokens = PackedTokens.pack(kept_ids())
    return Collected(
        tokens,
        Lengths(np.array(counts, dtype=np.int64), np.array(lengths, dtype=np.int64)),
        np.frombuffer(bytes(trained), dtype=np.bool_),
        np.array(labels, dtype=np.float32),
        np.array(margins, dtype=np.float32),
        tuple(rows),
        dict(dropped),
        truncated,
        np.array(indices, dtype=np.int64),
        images=tuple(images),
    )


def collect_tables(
    tables: Sequence[Table], encoder: RowEncoder | CachedEncoder, *, keep_rows: bool = False
) -> tuple[Collected, LoadReport, list[int]]:
    """Return the rows of several tables in packed arrays, the report on them, and the number of rows of each table.

    Raises:
        DataError: a row is invalid (names its file and line), or no row is left.
    """
    placed = ((placed.where, placed.row) for table in tables for placed in table.placed)
    collected = collect(encoder.encode(placed), keep_rows=keep_rows)
    # Rows were dropped, so the sizes of the tables are not those of what is left: their borders are searched for.
    bounds = np.searchsorted(collected.indices, np.cumsum([0, *map(len, tables)]))
    report = load_report(tables, collected.tokens, collected.dropped, collected.truncated)
    return collected, report, np.diff(bounds).tolist()


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
