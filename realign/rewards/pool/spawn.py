"""Spawn processes without running the parent's main script again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

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


class _ProcessWithoutMain(SpawnProcess):
    def start(self) -> None:
        with _hidden_main():
            super().start()


class SpawnWithoutMain(SpawnContext):
    """A multiprocessing context whose processes start without the parent's main script."""

    Process = _ProcessWithoutMain
