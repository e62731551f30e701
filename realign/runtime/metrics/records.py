"""Record files of a run with one line per step or response, and how a resumed run continues them."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from realign.engines.files.folders import open_regular
from realign.runtime.checkpoint.resume import Start
from realign.runtime.checkpoint.schema import DETAILS, RECORDS
from realign.runtime.metrics.json_lines import JsonLines, Nowhere, prefix, prefix_hash


class Records:
    """The record files of a run, such as metrics.jsonl and samples.jsonl."""

    NAMES = (*RECORDS, *DETAILS)

    def __init__(self, folder: Path, start: Start | None) -> None:
        """Open the files in `folder`. When resuming from `start`, truncate them to their size at its checkpoint."""
        state: Mapping[str, Any] = {"seconds": 0.0, "sizes": {}}
        if start is not None and not start.new_run:
            state = start.state["records"]
            self._take_over(folder, start, state)
        self._hold(
            JsonLines(folder / f"{name}.jsonl", state["sizes"].get(name, 0), seconds=state["seconds"])
            for name in self.NAMES
        )

    def _hold(self, files: Iterable[JsonLines]) -> None:
        """Keep the files, in the order of `NAMES`."""
        opened = list(files)
        self.metrics, self.samples, self.eval_samples, self.tokens, self.spans, self.warnings, self.system = opened
        self._files = dict(zip(self.NAMES, opened, strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        with ExitStack() as stack:  # close all files, even if one fails to close
            for file in self._files.values():
                stack.callback(file.close)

    def state_dict(self) -> dict[str, Any]:
        """Sync the files to disk, and return the elapsed seconds and the size (bytes) and sha256 of each file."""
        sizes = {name: file.sync() for name, file in self._files.items()}
        hashes = {name: file.sha256 for name, file in self._files.items()}
        return {"seconds": self.metrics.seconds, "sizes": sizes, "sha256": hashes}

    def history(self) -> list[dict[str, float]]:
        """Return the metrics of all steps so far. Unreadable lines are skipped with a warning."""
        records = []
        for number, line in enumerate(self.metrics.path.read_bytes().splitlines(), 1):
            try:
                record = json.loads(line)
                record.pop("seconds", None)
                records.append({name: math.nan if value is None else value for name, value in record.items()})
            except (ValueError, AttributeError) as error:
                warnings.warn(f"{self.metrics.path}, line {number}: {error}. The line is skipped.", stacklevel=2)
        return records

    def _take_over(self, folder: Path, start: Start, state: Mapping[str, Any]) -> None:
        """Warn about files that differ from those at the checkpoint, and copy the files of another run."""
        for name, size in state["sizes"].items():
            source = start.run / f"{name}.jsonl"
            if size or os.path.lexists(source):
                _compare(source, size, state.get("sha256", {}).get(name), start.step)
            if not start.own and os.path.lexists(source):
                with (folder / source.name).open("wb") as copy:
                    copy.writelines(prefix(source, size))


def _compare(path: Path, size: int, sha256: str | None, step: int) -> None:
    """Warn if the first `size` bytes of a record file are not those that the checkpoint counts."""
    if not os.path.lexists(path):
        found = 0
    else:
        with open_regular(path, os.O_RDONLY, "rb") as file:
            found = os.fstat(file.fileno()).st_size
    if found < size:
        warnings.warn(
            f"{path} has {found} bytes, but had {size} at the checkpoint of step {step}. The run continues; some of "
            "the earlier lines are missing.",
            stacklevel=2,
        )
    elif sha256 is not None and prefix_hash(path, size).hexdigest() != sha256:
        warnings.warn(
            f"{path} was changed after the checkpoint of step {step} (sha256 mismatch in its first {size} bytes). The "
            "run continues and keeps the changed lines; its weights are not affected.",
            stacklevel=2,
        )


class NoRecords(Records):
    """No-op record writer for ranks other than 0."""

    def __init__(self) -> None:
        self._hold(Nowhere() for _ in self.NAMES)
