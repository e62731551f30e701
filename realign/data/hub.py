"""Datasets of the Hugging Face hub, and folders in the layout of its repositories. Code of a dataset is never run."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from realign.data.files import SUFFIXES, Cursor, PlacedRow, RowFile, is_hidden, rows_of
from realign.errors import DataError, TransientError
from realign.text import first_line

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_UNREACHABLE = (
    "ConnectError",
    "ConnectTimeout",
    "ConnectionError",
    "LocalEntryNotFoundError",
    "NetworkError",
    "ReadError",
    "ReadTimeout",
    "RemoteProtocolError",
    "TimeoutException",
)
"""Names of exceptions of the network libraries of `datasets` that a restart may fix."""


def is_hub_name(text: str) -> bool:
    """Return whether a text is an `owner/name` of the hub, rather than a path of a missing local file."""
    name = text.partition(":")[0]
    if not _NAME.fullmatch(name) or Path(name).suffix.lower() in SUFFIXES or name.startswith("."):
        return False
    return not Path(name).parent.exists()


def hub_files(
    name: str, subset: str | None, split: str | None, revision: str | None, *, streaming: bool
) -> list[RowFile]:
    """Return the rows of one split of a hub dataset.

    Args:
        name: `owner/name`.
        subset: Subset (configuration); None uses the only one or the default.
        split: Split; None uses the only one. Without `streaming` it may be a slice such as `train[:10%]`.
        revision: Branch, tag or commit; None uses the main branch.
        streaming: Whether rows are read over the network when they are needed. Otherwise the dataset is downloaded.

    Raises:
        DataError: the dataset, its subset or its split does not exist, or is not readable.
        TransientError: the hub is not reachable.
    """
    import datasets

    with _one_line(name, subset):
        builder = datasets.load_dataset_builder(name, subset, revision=revision)
        splits = list(map(str, builder.info.splits or builder.config.data_files or ()))
        split_name = choose_split(splits, None if split is None else split.partition("[")[0], name)
        label = f"{name}:{split or split_name}"
        if not streaming:
            return [_Downloaded(label, subset, builder, split or split_name)]
        shards = builder.as_streaming_dataset(split=split or split_name).num_shards
        # One per file of the split, so that an epoch can permute the files, as for local ones.
        return [_Shard(label, subset, builder, split or split_name, index, shards) for index in range(shards)]


def splits_of_folder(folder: Path, subset: str | None) -> dict[str, list[Path]]:
    """Return the data files of a local folder by split, as for a repository of the hub.

    Raises:
        DataError: the folder has no such subset, or files that belong to no split.
    """
    import datasets

    with _one_line(str(folder), subset):
        builder = datasets.load_dataset_builder(str(folder.absolute()), subset)
        data_files = builder.config.data_files or {}
    splits = {str(split): [Path(str(file)) for file in files] for split, files in data_files.items()}
    read = {file.resolve() for files in splits.values() for file in files}
    # Only the most common format of a folder is read. README.md may select files.
    left = [
        file
        for file in sorted(folder.rglob("*"))
        if file.suffix in SUFFIXES and file.resolve() not in read and not is_hidden(file.relative_to(folder))
    ]
    if left and not (folder / "README.md").exists():
        same = any(file.suffix == left[0].suffix for file in read)
        why = (
            f"which belongs to none of the splits {', '.join(splits)}" if same else "of another format than the others"
        )
        raise DataError(f"{folder} contains {left[0].name!r}, {why}. Set path to a list of the files to read.")
    return splits


def choose_split(splits: Sequence[str], split: str | None, path: str | Path) -> str:
    """Return the split to read.

    Raises:
        DataError: it does not exist, or there are several and none is chosen.
    """
    if split is None and len(splits) == 1:
        return splits[0]
    if split in splits:
        return str(split)
    choice = f"Choose one: {', '.join(f'split={name}' for name in splits)}."
    if split is None:
        raise DataError(f"{path} contains several splits. {choice}")
    near = difflib.get_close_matches(split, splits, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise DataError(f"split={split!r}: {path} has no such split. {choice}{hint}")


@dataclass(frozen=True, eq=False)
class _Split(RowFile):
    """A split of a hub dataset."""

    label: str
    subset: str | None
    builder: Any
    split: str

    @property
    @override
    def name(self) -> str:
        return self.label

    @override
    def identity(self) -> str:
        """Return the revision of the dataset with its subset and split."""
        return f"{self.builder.hash} {self.builder.config.name} {self.split}"


@dataclass(frozen=True, eq=False)
class _Downloaded(_Split):
    """A split in the cache of this machine. A position is the number of rows before it."""

    @override
    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        with _one_line(self.label, self.subset):
            self.builder.download_and_prepare()
            for number, row in rows_of(self.builder.as_dataset(split=self.split), cursor, self.name):
                yield PlacedRow(self, number, row)


@dataclass(frozen=True, eq=False)
class _Shard(_Split):
    """One of the files of a split, read over the network. A position is [state of `datasets`, rows before it]."""

    index: int
    shards: int

    @override
    def rows(self, cursor: Cursor) -> Iterator[PlacedRow]:
        with _one_line(self.label, self.subset):
            dataset = self.builder.as_streaming_dataset(split=self.split)
            dataset = dataset.shard(num_shards=self.shards, index=self.index)
            number = 0
            if cursor.position is not None:
                state, number = cursor.position
                dataset.load_state_dict(json.loads(state))
            # On demand, so that a row costs no state of `datasets` unless somebody asks where the reader is.
            cursor.find = lambda: [json.dumps(dataset.state_dict()), number]
            for row in dataset:
                number += 1
                yield PlacedRow(self, number, row)

    @override
    def identity(self) -> str:
        return f"{super().identity()} {self.index}/{self.shards}"

    @override
    def where(self, number: int) -> str:
        of = f", file {self.index + 1} of {self.shards}" if self.shards > 1 else ""
        return f"{self.name}{of}, row {number}"


@contextmanager
def _one_line(name: str, subset: str | None) -> Iterator[None]:
    """Raise errors of `datasets` as errors with one line."""
    from huggingface_hub import constants

    try:
        yield
    except (DataError, TransientError):
        raise
    except Exception as error:  # `datasets` and its network libraries raise various exceptions
        # `datasets` has no exception class for an unknown or missing subset, so only the message tells.
        if isinstance(error, ValueError) and "onfig" in str(error).splitlines()[0] and "Available" in str(error):
            raise DataError(f"subset={subset!r}: {name} has no such subset. {first_line(error)[:300]}") from error
        if "Config name is missing" in str(error):
            choices = ", ".join(re.findall(r"'([^']+)'", str(error).partition("configs:")[2].splitlines()[0]))
            raise DataError(f"{name} contains several subsets. Choose one with subset: {choices}.") from error
        if _unreachable(error):
            if constants.HF_HUB_OFFLINE:
                raise DataError(
                    f"{name}: no such file or folder, and not in the cache of the hub, which HF_HUB_OFFLINE=1 "
                    "disables. Set path to a file, or unset HF_HUB_OFFLINE."
                ) from error
            raise TransientError(
                f"{name}: the hub at {constants.ENDPOINT} is not reachable, and there is no such local file or folder. "
                "Check the network and start again."
            ) from error
        if type(error).__name__ in ("DatasetNotFoundError", "RepositoryNotFoundError"):
            raise DataError(
                f"{name}: no such file or folder, and the hub has no such dataset, or it needs a token "
                f"({first_line(error)[:300]})."
            ) from error
        raise DataError(
            f"{name} cannot be read as a dataset: {type(error).__name__}: {first_line(error)[:300]}"
        ) from error


def _unreachable(error: BaseException | None) -> bool:
    """Return whether an exception or one of its causes is a failure of the network or of the server."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", 0) or 0
        if status >= 500 or status == 429:
            return True
        # By name: whether httpx or requests raises it depends on the version of huggingface_hub. An error with a status
        # is an answer of the hub, such as 404, which a restart does not change.
        if {kind.__name__ for kind in type(error).__mro__} & {*_UNREACHABLE, "OfflineModeIsEnabled"} and not status:
            return True
        error = error.__cause__ or error.__context__
    return False
