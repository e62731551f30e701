"""Run a function in a process group of torch.distributed, with gloo over loopback and a file store."""

from __future__ import annotations

import datetime
import faulthandler
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.processes import FORKS


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any, seconds: int = 120) -> list[Any]:
    """Return the result of `function(*arguments)` on each of `size` ranks, each in a separate process.

    Args:
        size: number of ranks.
        function: function in a module that the processes can import; it can call `ranks.current()` to get its rank.
        arguments: arguments of the function.
        seconds: timeout of collectives.

    Raises:
        AssertionError: a rank raised or was killed. The message is the traceback of the lowest rank whose error is not
            about another rank. For a killed rank, it contains the signal, and the stacks of all threads of all ranks.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        everything = (size, folder, seconds, dict(os.environ), function, arguments)
        started = mp.start_processes(_rank, everything, nprocs=size, join=False, start_method=FORKS.get_start_method())
        try:
            while not started.join():
                pass
        except mp.ProcessExitedException as error:  # the other ranks have been terminated
            raise AssertionError(_report_of(folder, error)) from None
        errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
        # The root cause is the error that does not complain about another rank.
        assert not errors, min(errors, key=lambda text: any(said in text for said in ("gloo", "Connection")))
        return [torch.load(folder / f"{rank}.result", weights_only=False) for rank in range(size)]


def _report_of(folder: Path, error: mp.ProcessExitedException) -> str:
    """Describe how a rank ended, with what `faulthandler` and the ranks have written."""
    ended = f"signal {error.signal_name}" if error.signal_name else f"exit code {error.exit_code}"
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (".stacks", ".error") and path.stat().st_size]
    written = "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in files)
    return f"rank {error.error_index} ended with {ended}\n{written}"


def _rank(
    rank: int,
    size: int,
    folder: Path,
    seconds: int,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= environment  # the first process has that of an earlier test
    stacks = (folder / f"{rank}.stacks").open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGTERM, stacks, chain=True)  # of the other ranks, when one was killed
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=limit)
    try:
        torch.save(function(*arguments), folder / f"{rank}.result")
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        dist.destroy_process_group()
