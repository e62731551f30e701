"""Spawn the processes of a reward pool: each with a keeper, and without running the parent's main script again."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from pebble.pool.channel import WorkerChannel
from pebble.pool.process import Acknowledgement

from realign.rewards.pool.keeper import become_worker

# Two pools may start workers concurrently in different threads; the lock keeps hiding and restoring in order.
_main_lock = threading.Lock()


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Hide the file of `__main__`, so that a process spawned inside this context does not run it again.

    By default, a spawned process executes the parent's script under another name. For a training script this costs
    seconds of imports; without a guard it starts the training again. Python has no public switch for it.
    """
    main = sys.modules["__main__"]
    with _main_lock:
        names: dict[str, Any] = vars(main)
        hidden: dict[str, Any] = {name: names[name] for name in ("__file__", "__spec__") if name in names}
        names["__spec__"] = None
        names.pop("__file__", None)
        try:
            yield
        finally:
            names.update(hidden)


class _KeptProcess(SpawnProcess):
    """A worker process of `pebble` with a keeper, which is the process that `pebble` starts and stops."""

    def run(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        if (keeper := become_worker(parent.sentinel)) is not None:
            _, channel = self._args  # type: ignore[attr-defined]
            _known_as(keeper, channel)
        super().run()


class _KeptProcessWithoutMain(_KeptProcess):
    def start(self) -> None:
        with _hidden_main():
            super().start()


class SpawnKept(SpawnContext):
    """A multiprocessing context whose processes are pool workers with a keeper."""

    Process = _KeptProcess


class SpawnWithoutMain(SpawnContext):
    """A multiprocessing context whose processes are kept pool workers without the parent's main script."""

    Process = _KeptProcessWithoutMain


def _known_as(keeper: int, channel: WorkerChannel) -> None:
    """Let the worker acknowledge tasks with the pid of its keeper, which is the pid that `pebble` knows."""
    send = channel.send

    def send_known(message: object) -> None:
        send(replace(message, worker=keeper) if isinstance(message, Acknowledgement) else message)

    channel.send = send_known
