"""`Slots`: a limit on concurrent calls that is shared by the event loops of all threads."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Any, TypeAlias
from weakref import WeakSet

_Task: TypeAlias = "asyncio.Task[Any]"


class Slots:
    """A first-in first-out semaphore for tasks of several event loops. A task holds at most one slot.

    `asyncio.Semaphore` belongs to one loop, and `threading.Semaphore` blocks the event loop while it waits. The tasks
    of a blocked loop cannot release their slots, so `abandon` releases them.
    """

    def __init__(self, number: int) -> None:
        """Allow `number` tasks at a time."""
        self._lock = threading.Lock()  # guards the attributes below
        self._free = number
        self._waiting: deque[tuple[_Task, asyncio.Future[None]]] = deque()
        self._holders: dict[_Task, asyncio.AbstractEventLoop] = {}
        self._abandoned: WeakSet[asyncio.AbstractEventLoop] = WeakSet()

    async def __aenter__(self) -> None:
        """Wait for a slot.

        Raises:
            CancelledError: the loop was abandoned.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with self._lock:
            if loop in self._abandoned:
                raise asyncio.CancelledError("the event loop was abandoned")
            if self._free:
                self._free -= 1
                self._holders[task] = loop
                return
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append((task, turn))
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                if (task, turn) in self._waiting:
                    self._waiting.remove((task, turn))
                self._release(task)  # the slot may have been granted before the task was cancelled
            raise

    async def __aexit__(self, *raised: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            self._release(task)

    def abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Release the slots of this loop's tasks, and reject further tasks of the loop."""
        with self._lock:
            self._abandoned.add(loop)
            self._waiting = deque((task, turn) for task, turn in self._waiting if turn.get_loop() is not loop)
            for task in [task for task, home in self._holders.items() if home is loop]:
                self._release(task)

    def _release(self, task: _Task) -> None:
        """Pass the slot of this task to the next waiting task, if it holds one. The caller holds the lock."""
        if self._holders.pop(task, None) is None:
            return
        while self._waiting:
            following, turn = self._waiting.popleft()
            loop = turn.get_loop()
            try:
                loop.call_soon_threadsafe(_grant, turn)
            except RuntimeError:  # the loop is closed, so its task no longer waits
                continue
            self._holders[following] = loop
            return
        self._free += 1


def _grant(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
