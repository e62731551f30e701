"""Record files of a run with one line per step or response, and how a resumed run continues them."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from realign.errors import CheckpointError
from realign.runtime.checkpoint.resume import Start
from realign.runtime.checkpoint.schema import RECORDS
from realign.runtime.metrics.live_display import JsonLines, Nowhere


class Records:
    """The record files metrics.jsonl, samples.jsonl and eval_samples.jsonl."""

    NAMES = RECORDS

    def __init__(self, folder: Path, start: Start | None) -> None:
        """Open the files in `folder`. When resuming from `start`, truncate them to their size at its checkpoint."""
        state: Mapping[str, Any] = {"seconds": 0.0, "sizes": {}}
        if start is not None and not start.new_run:
            state = start.state["records"]
            self._take_over(folder, start, state["sizes"])
        self.metrics, self.samples, self.eval_samples = (
            JsonLines(folder / f"{name}.jsonl", state["sizes"].get(name, 0), seconds=state["seconds"])
            for name in self.NAMES
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        with ExitStack() as stack:  # close all files, even if one fails to close
            for file in (self.metrics, self.samples, self.eval_samples):
                stack.callback(file.close)

    def state_dict(self) -> dict[str, Any]:
        """Sync the files to disk, and return the elapsed seconds and the size of each file in bytes."""
        files = dict(zip(self.NAMES, (self.metrics, self.samples, self.eval_samples), strict=True))
        return {"seconds": self.metrics.seconds, "sizes": {name: file.sync() for name, file in files.items()}}

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

    def _take_over(self, folder: Path, start: Start, sizes: Mapping[str, int]) -> None:
        if unknown := sizes.keys() - set(self.NAMES):
            raise CheckpointError(
                f"records.sizes={sorted(map(str, unknown))} in the checkpoint: expected only {', '.join(self.NAMES)}. "
                "The checkpoint was changed. Resume from another one."
            )
        for name, size in sizes.items():
            source = start.run / f"{name}.jsonl"
            found = source.stat().st_size if source.is_file() else 0
            if found < size:
                warnings.warn(
                    f"{source} has {found} bytes, but had {size} at the checkpoint of step {start.step}. The run "
                    "continues; some of the earlier lines are missing.",
                    stacklevel=2,
                )
            if not start.own and source.is_file():
                with source.open("rb") as file:
                    (folder / source.name).write_bytes(file.read(size))


class NoRecords(Records):
    """No-op record writer for ranks other than 0."""

    def __init__(self) -> None:
        self.metrics = self.samples = self.eval_samples = Nowhere()
