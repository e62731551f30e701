"""Spawned processes that do not run the parent's main script again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

# Two pools may start workers at once from threads of their own; each must restore what the other did not hide.
_main_lock = threading.Lock()


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Hide where `__main__` came from, so that a process spawned meanwhile does not run it again.

    A spawned process otherwise executes the parent's script under another name: seconds of imports for a training
    script, and the whole training for one without a guard. There is no public switch for it.
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
    """The multiprocessing context whose processes start without the parent's main script."""

    Process = _ProcessWithoutMain
