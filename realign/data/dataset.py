"""Datasets in memory: token ids packed in one array, handed out as `SequenceSample`s."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realign.api.lengths import IntArray, Lengths
from realign.api.sample import SequenceSample


class Dataset(ABC):
    """Rows that can be sampled as packed sequences, such as `PromptDataset`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def keys(self) -> Sequence[str]:
        """Keys that every sample has."""

    @abstractmethod
    def sample(self, rows: Sequence[tuple[int, int]]) -> SequenceSample:
        """Return the rows given as (epoch, row)."""

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence of a row; 0: unknown."""
        return 0

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row, all its sequences together; 0: unknown."""
        return self.longest_sequence

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that comes with the rows, such as pretraining text; 0: there is none."""
        return 0


class DataSpec(ABC):
    """Loads a dataset, such as `PromptData`. Inherit from it and implement `load`."""

    @abstractmethod
    def load(self, tokenizer: Any) -> Dataset:
        """Read, check and tokenize the rows."""

    def check(self, where: str) -> None:  # noqa: B027 (optional)
        """Check the spec at the config key `where` before anything is loaded.

        Raises:
            ValueError: names the key, the value found and what is valid.
        """


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """The token ids of N texts: `ids` [T] int32 one after another, and `starts` [N + 1] where each begins."""

    ids: npt.NDArray[np.int32]
    starts: IntArray

    @classmethod
    def pack(cls, texts: Iterable[Sequence[int]]) -> PackedTokens:
        """Pack one list of ids after another; only one of them needs to exist at a time."""
        ids = array("i")
        starts = [0]
        for text in texts:
            ids.extend(text)
            starts.append(len(ids))
        return cls(np.array(ids, dtype=np.int32), np.array(starts, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def gather(self, rows: IntArray) -> tuple[Tensor, Lengths]:
        """The texts of these rows, packed (int64), with one sequence per prompt."""
        parts = [self.ids[a:b] for a, b in zip(self.starts[rows], self.starts[rows + 1], strict=True)]
        packed = np.concatenate(parts) if parts else self.ids[:0]
        lengths = self.starts[rows + 1] - self.starts[rows]
        return torch.from_numpy(packed.astype(np.int64)), Lengths(np.ones_like(rows), lengths)


@dataclass(frozen=True)
class LoadReport:
    """What became of the rows of a file.

    Attributes:
        path: of the file.
        rows_read: rows in it, up to the limit, and of the part that was asked for.
        rows_kept: rows of the dataset.
        rows_dropped: number of rows by the reason why they were left out.
        rows_truncated: rows kept whose prompt lost its beginning.
        tokens: number of tokens kept.
        longest: tokens of the longest text kept.
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
    """Rows that can be drawn in any order, any number of times.

    Attributes:
        tokens: the token ids of each row.
        report: what was read and what was left out.
    """

    tokens: PackedTokens
    report: LoadReport

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def longest_sequence(self) -> int:
        """See `Dataset`."""
        return self.report.longest

    @property
    def longest_row(self) -> int:
        """See `Dataset`."""
        return self.report.longest

    def sample(self, rows: Sequence[tuple[int, int]]) -> SequenceSample:
        """The rows at these places, as `order.batch_indices` gives them, with the keys of the dataset.

        Ids are `"{row}@{epoch}"`, so a row drawn in two epochs may stand in one batch twice, as two prompts.

        Args:
            rows: (epoch, row) of each prompt; rows count from 0.

        Raises:
            ValueError: a row is outside the dataset, or one (epoch, row) is asked for twice.
        """
        chosen = np.array([row for _, row in rows], dtype=np.int64)
        if len(outside := chosen[(chosen < 0) | (chosen >= len(self))]):
            raise ValueError(f"row {outside[0]} is outside the dataset of {len(self)} rows")
        return self._sample(chosen, tuple(f"{row}@{epoch}" for epoch, row in rows))

    @abstractmethod
    def _sample(self, rows: IntArray, ids: tuple[Hashable, ...]) -> SequenceSample: ...


def content_hash(dataset: Any) -> str | None:
    """sha256 of what a dataset holds: tokens, lengths, the rows of its file; None if it holds no `PackedTokens`."""
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
            if field.name != "report":  # of what was left out: it names the file
                yield from _contents(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _contents(item)
    elif isinstance(value, Mapping | str | int | float | None):
        yield json.dumps(value, default=str, sort_keys=True).encode()
