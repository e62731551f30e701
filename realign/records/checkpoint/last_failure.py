"""`last_failure.json`: the last failure of a run, from which a restart script sees that restarts make no progress.

A script that restarts a run after exit code 75 stops when `count` reaches its limit, such as 3.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from realign.errors import ConfigError, ExitCode
from realign.own_files import OwnFiles, read_regular, replace_text
from realign.records.checkpoint.folder import CHECKPOINTS, list_checkpoints
from realign.signals import SIGNALS

NAME = "last_failure.json"
"""Name of the file in `output_dir`."""
_NO_FAILURE = frozenset(128 + number for number in SIGNALS)
"""Exit codes of a run that a signal stopped. They leave the file unchanged."""


@dataclass(frozen=True)
class LastFailure:
    """The last failure of a run."""

    step: int
    """Step of the newest checkpoint, after which `resume=auto` continues; 0 without a checkpoint."""
    time: str
    """Time of the failure in UTC, in ISO 8601 format."""
    exit_code: int
    """Exit code of the process."""
    message: str
    """Error message."""
    count: int
    """Number of consecutive failures at this step with this exit code."""
    attempt: str = ""
    """Id of the attempt that failed, the same for all of its processes; empty if unknown."""


def recorder(output_dir: Path, attempt: str) -> Callable[[BaseException, int], None]:
    """Return a function that records the error that ends a run, and its exit code; see `record_end`.

    A configuration error is no failure of the run, and is not recorded.
    """

    def record(error: BaseException, code: int) -> None:
        if not isinstance(error, ConfigError):
            record_end(output_dir, code, str(error), attempt)

    return record


def record_end(output_dir: Path, exit_code: int, message: str = "", attempt: str = "") -> LastFailure | None:
    """Write `last_failure.json` for a run that failed, or remove it for a run that succeeded.

    Does nothing if a signal stopped the run, if the folder does not exist, or if the failure of this attempt is already
    recorded. An error of the disk is a warning, so that it does not hide the failure of the run.

    Args:
        output_dir: Folder of the run.
        exit_code: Exit code of the process.
        message: Error message of the run.
        attempt: Id of this attempt. Several processes of one attempt may record the same failure.

    Returns:
        The failure, or None if there is none to record.
    """
    if exit_code in _NO_FAILURE or not output_dir.is_dir():
        return None
    try:
        if exit_code == ExitCode.success:
            OwnFiles(output_dir).remove(NAME)
            return None
        before = last_failure(output_dir)
        # several ranks of one attempt can fail for one reason, which is one failure
        if before is not None and attempt and before.attempt == attempt:
            return before
        failure = _next(output_dir, before, LastFailure(0, "", int(exit_code), message, 1, attempt))
        OwnFiles(output_dir).claim(NAME)
        replace_text(output_dir / NAME, json.dumps(dataclasses.asdict(failure), indent=2) + "\n")
    except (OSError, ConfigError) as error:
        warnings.warn(f"{output_dir / NAME} could not be written ({error}). The failure is not recorded.", stacklevel=2)
        return None
    return failure


def last_failure(output_dir: Path) -> LastFailure | None:
    """Return the recorded failure of a run; None if there is none, or if the file is damaged."""
    try:
        record = json.loads(read_regular(output_dir / NAME, 1 << 20))
        return LastFailure(
            int(record["step"]),
            str(record["time"]),
            int(record["exit_code"]),
            str(record["message"]),
            int(record["count"]),
            str(record.get("attempt", "")),
        )
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError):
        return None


def _next(output_dir: Path, before: LastFailure | None, failure: LastFailure) -> LastFailure:
    """Complete the new failure, whose count starts again if the run made progress or failed differently."""
    step = max((checkpoint.step for checkpoint in list_checkpoints(output_dir / CHECKPOINTS)), default=0)
    again = before is not None and (before.step, before.exit_code) == (step, failure.exit_code)
    count = before.count + 1 if before is not None and again else 1
    return dataclasses.replace(failure, step=step, time=datetime.now(UTC).isoformat(timespec="seconds"), count=count)
