"""Where rows come from (files, folders, patterns, datasets of the Hugging Face hub), and tables and parts of them."""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from realign.cells import read_column
from realign.data.columns import Row
from realign.data.files import (
    FORMATS,
    SUFFIXES,
    Cursor,
    FirstRows,
    PlacedRow,
    RowFile,
    SavedFolder,
    WithColumns,
    is_hidden,
    recognize,
)
from realign.data.hub import choose_split, hub_files, is_hub_name, splits_of_folder
from realign.data.order import Ramp, epoch_order
from realign.errors import DataError, SettingsError
from realign.settings import Count, NonNegative, NonNegativeInt, Positive, Settings
from realign.text import brief

_PATTERN = re.compile(r"[*?[]")
_URL = re.compile(r"[A-Za-z][\w+.-]*://((huggingface\.co/)?datasets/(?P<name>[\w.-]+/[\w.-]+))?")


@dataclass
class RowSource(Settings):
    """One of several sources of rows."""

    path: str
    """A file, a folder, a pattern such as `data/*.jsonl`, or a hub name such as `org/name`."""
    subset: str | None = None
    """Subset (configuration) of a hub dataset, such as main; null uses the only one or the default."""
    split: str | None = None
    """Split of a hub dataset or of a folder with several splits, such as train; null uses the only one. `path` may also
    name it: `org/name:train`."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset; null uses the main branch."""
    limit: Count | None = None
    """Read only this many rows from the start; null reads all."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns to rename, as new name: old name, such as `{prompt: question, response: answers.0}`."""
    weight: NonNegative | None = None
    """How often to draw from this source, relative to the weights of the others. Either all sources of a list have a
    weight, or none."""
    final_weight: NonNegative | None = None
    """The weight changes linearly to this one during the first `ramp_prompts` prompts of training; null: it stays."""
    ramp_prompts: Count | None = None
    """Number of prompts after which the weight is `final_weight`."""
    name: str = ""
    """Name in metrics; empty uses the last part of the path."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise SettingsError("path='': must be a file, a folder or a hub name")
        if self.final_weight is None and self.ramp_prompts is None:
            if self.weight == 0:
                raise SettingsError("weight=0: must be above 0 and finite, unless final_weight is")
        elif self.weight is None or self.final_weight is None or self.ramp_prompts is None:
            raise SettingsError("final_weight: a weight that changes needs weight, final_weight and ramp_prompts")
        elif not self.weight and not self.final_weight:
            raise SettingsError("final_weight=0: must be above 0 if weight=0. Remove the source instead")

    @property
    def title(self) -> str:
        """Name of the source in metrics and tables."""
        return self.name or (self.path if is_hub_name(self.path) else Path(self.path).name) or self.path

    @property
    def share(self) -> float | Ramp | None:
        """The weight, which may change during training; None without weights."""
        if self.weight is None or self.final_weight is None or self.ramp_prompts is None:
            return self.weight
        return Ramp(self.weight, self.final_weight, self.ramp_prompts)

    def files(self, *, streaming: bool = False) -> list[RowFile]:
        """Return the files of the source, in order.

        Args:
            streaming: Whether rows of a hub dataset are read over the network during training. Otherwise the dataset is
                downloaded first.

        Raises:
            DataError: there is no such file or dataset, or a setting does not apply to it.
            TransientError: the hub is not reachable.
        """
        files = self._resolve(streaming)
        if self.columns:
            files = [WithColumns(file, self.columns) for file in files]
        return files if self.limit is None else [FirstRows(files, self.limit, self.path)]

    def read(self, limit: int | None = None, *, streaming: bool = False) -> Table:
        """Read the rows into memory.

        Args:
            limit: Maximum number of rows to read; None reads all.
            streaming: See `files`.

        Raises:
            DataError: see `files`; or a row is malformed (names its line), or there are no rows.
            TransientError: the hub is not reachable.
        """
        files = self.files(streaming=streaming)
        try:
            placed = list(islice(_rows(files), limit))
        except MemoryError as error:
            raise DataError(
                f"{self.path}: its rows need more memory than this process may use. Set streaming=true to read rows "
                "during training, set limit to read fewer rows, or give the process more memory."
            ) from error
        if not placed:
            raise DataError(f"{self.path} contains no rows.")
        return Table(self.path, placed)

    def _resolve(self, streaming: bool) -> list[RowFile]:
        if (url := _URL.match(self.path)) is not None:
            hub = (
                f"For a dataset of the hub, set path={url['name']}."
                if url["name"]
                else "Download the file, and set path to it."
            )
            raise DataError(f"path={brief(self.path, 300)}: URLs are not read. {hub}")
        # Local paths win over the hub, and the whole text over `path:split`, since a file name may contain a colon.
        if (local := _local(self.path, self.split, self.subset)) is not None:
            return local
        name, colon, split = self.path.partition(":")
        if colon and self.split is not None:
            raise DataError(f"split={self.split!r}: path={self.path!r} already names a split. Remove one of them.")
        if colon and split and (local := _local(name, split, self.subset)) is not None:
            return local
        if not is_hub_name(name) or (colon and not split):
            raise DataError(f"no file or folder {brief(self.path, 300)}{_near_file(self.path)}")
        return hub_files(name, self.subset, split or self.split, self.revision, streaming=streaming)


def read_rows(path: str | Path, limit: int | None = None) -> Table:
    """Read rows into memory.

    Args:
        path: Path of a file or folder, pattern of paths, or hub name; see `RowSource`. Blank lines are skipped. A
            `.json` file contains a list of objects, or one object per line.
        limit: Maximum number of rows to read, from the start; None reads all rows.

    Raises:
        DataError: the path does not exist, its format is unknown, a row is malformed (names its line), or there are no
            rows.
        TransientError: the hub is not reachable.
    """
    return RowSource(str(path)).read(limit)


def _rows(files: Sequence[RowFile]) -> Iterator[PlacedRow]:
    return (row for file in files for row in file.rows(Cursor()))


def _local(text: str, split: str | None, subset: str | None) -> list[RowFile] | None:
    """Return the files of a path or pattern; None if there are none."""
    path = Path(os.path.expanduser(text))  # leaves ~name unchanged if no such user exists
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:  # for example, the name is too long
        raise DataError(f"no file or folder {brief(text, 300)}: {error.strerror}") from error
    except ValueError as error:  # a null byte
        raise DataError(f"no file or folder {brief(text, 300)}: {error}") from error
    if is_folder:
        return _folder(path, split, subset)
    files = [path] if is_file else _match_files(path)
    if not files:
        return None
    for name, value in (("split", split), ("subset", subset)):
        if value is not None:
            raise DataError(f"{name}={value!r}: {text} is a file, which has no {name}s. Remove it.")
    return [recognize(file) for file in files]


def _match_files(path: Path) -> list[Path]:
    """Return the files that match a pattern, sorted."""
    if not _PATTERN.search(str(path)):
        return []
    try:
        return [file for file in map(Path, sorted(glob.glob(str(path), recursive=True))) if file.is_file()]
    except (ValueError, OSError, re.error):
        return []


def _folder(folder: Path, split: str | None, subset: str | None) -> list[RowFile]:
    """Return the files of a folder written by `save_to_disk`, or of a folder of data files."""
    if (folder / "state.json").is_file():
        for name, value in (("split", split), ("subset", subset)):
            if value is not None:
                raise DataError(f"{name}={value!r}: {folder} is a folder of one split. Remove it.")
        return [SavedFolder(folder)]
    if (folder / "dataset_dict.json").is_file():
        return [
            SavedFolder(
                folder / choose_split(sorted(p.parent.name for p in folder.glob("*/state.json")), split, folder)
            )
        ]
    near = (file for pattern in ("*", "*/*") for file in folder.glob(pattern))  # data files of a repository
    near = (file for file in near if not is_hidden(file.relative_to(folder)))
    if not any(file.suffix.lower() in (*SUFFIXES, ".gz") and file.is_file() for file in near):
        names = sorted(p.name for p in folder.iterdir())[:8]
        raise DataError(
            f"{folder} is neither a folder written by `save_to_disk` nor a folder of {FORMATS}; it contains {names}."
        )
    splits = splits_of_folder(folder, subset)
    return [recognize(file) for file in splits[choose_split(list(splits), split, folder)]]


def _near_file(path: str) -> str:
    file = Path(os.path.expanduser(path))
    if _PATTERN.search(path):
        return "; no file matches this pattern"
    folder = file.parent
    if file.exists():
        return "; the path is neither a file nor a folder"
    if not folder.is_dir():
        return f"; the folder {str(folder)!r} does not exist"
    names = {p.stem: p.name for p in folder.iterdir()}  # equal extensions say nothing about similarity
    near = [names[stem] for stem in difflib.get_close_matches(file.stem, names, n=1)]
    hub = "" if near or "/" in path or file.suffix else "; a hub dataset is written owner/name"
    return f"; did you mean {str(folder / near[0])!r}?" if near else hub


def as_sources(path: str | RowSource | Sequence[str | RowSource], shared: Mapping[str, Any]) -> list[RowSource]:
    """Return the sources of a `path` setting.

    Args:
        path: A path, a source, or a list of them.
        shared: Fields that apply to each source that does not set them.

    Raises:
        SettingsError: the list is empty, only some of the sources have a weight, or none has one in the end.
    """
    listed = [path] if isinstance(path, str | RowSource) else list(path)
    if not listed:
        raise SettingsError("path=[]: must contain at least one source")
    sources = [item if isinstance(item, RowSource) else RowSource(item) for item in listed]
    weighted = [source for source in sources if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        without = next(source for source in sources if source.weight is None)
        raise SettingsError(f"path: the source {without.path!r} has no weight, but others have. Set weight for all.")
    ends = [[x for x in pair if x is not None] for pair in ((s.weight, s.final_weight) for s in weighted)]
    for name, at in (("weight", 0), ("final_weight", -1)):
        if weighted and not any(weights[at] for weights in ends):
            raise SettingsError(f"path: {name}=0 of all sources, so no row could be drawn. Raise one of them.")
    return [
        replace(source, **{name: value for name, value in shared.items() if getattr(source, name) is None})
        for source in sources
    ]


def titles(sources: Sequence[RowSource]) -> tuple[str, ...]:
    """Return a different name for each source."""
    unique: list[str] = []
    for source in sources:
        number = sum(source.title == other.title for other in sources[: len(unique)]) + 1
        unique.append(source.title if number == 1 else f"{source.title}_{number}")
    return tuple(unique)


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of one or several files in memory, each with its place.

    Attributes:
        path: Path of the file, or name of the source.
        placed: The rows.
    """

    path: Path | str
    placed: Sequence[PlacedRow]

    def __len__(self) -> int:
        return len(self.placed)

    @property
    def rows(self) -> list[Row]:
        """The rows without their places."""
        return [placed.row for placed in self.placed]

    def where(self, index: int) -> str:
        """Return file and line (or row) of the row at `index`, for messages."""
        return self.placed[index].where

    def take(self, chosen: Sequence[int]) -> Table:
        """Return the rows at these indices."""
        return Table(self.path, [self.placed[i] for i in chosen])

    def column(self, name: str) -> list[Any]:
        """Return the values of a column.

        Args:
            name: Name of the column, or path to an item in it; see `read_column`.

        Raises:
            DataError: a row lacks the column; names the row, its columns and the nearest one.
        """
        values = []
        for placed in self.placed:
            try:
                values.append(read_column(placed.row, name))
            except DataError as error:
                raise DataError(f"{placed.where}: {error}") from error
        return values


@dataclass
class Split(Settings):
    """One of several disjoint, randomly assigned parts of the rows of a file.

    All stages set the same `weights` and `seed`, and a different `part`. The parts together contain every row once.
    DeepSpeed-Chat uses 20%, 40% and 40% of the rows for SFT, reward model and RLHF.
    """

    part: NonNegativeInt = 0
    """Index of the part, from 0."""
    weights: list[Positive] = field(default_factory=lambda: [2, 4, 4])
    """Relative sizes of the parts."""
    seed: int = 0
    """Seed of the assignment. It is independent of the seed of the run, so all runs use the same parts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part >= len(self.weights):
            raise SettingsError(f"part={self.part}: must be below the number of weights ({len(self.weights)})")

    def apply(self, table: Table) -> Table:
        """Return the rows of this part, in the order of the file.

        Raises:
            DataError: the file has too few rows, so this part is empty.
        """
        # The ends are rounded, not the sizes: each part begins where the one before it ends, so no row is left out.
        ends = np.rint(np.cumsum(self.weights) / sum(self.weights) * len(table)).astype(int)
        begin = ends[self.part - 1] if self.part else 0
        chosen = sorted(epoch_order(len(table), self.seed, 0)[begin : ends[self.part]].tolist())
        if not chosen:
            raise DataError(
                f"{table.path}: split.part={self.part} of split.weights={self.weights} contains none of {len(table)} "
                "rows."
            )
        return table.take(chosen)
