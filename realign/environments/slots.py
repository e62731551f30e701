"""`Slots`: a bound on what is under way at a time, over the event loops of all threads."""

from __future__ import annotations

import asyncio
import threading
from collections import deque


class Slots:
    """A semaphore that coroutines of several event loops share, each in a thread of its own; first come, first served.

    `asyncio.Semaphore` belongs to one loop, and one of `threading` would hold a loop up while it waits.
    """

    def __init__(self, number: int) -> None:
        """Let `number` coroutines in at a time."""
        self._lock = threading.Lock()  # guards what follows
        self._free = number
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._free:
                self._free -= 1
                return
            self._waiting.append((loop, turn))
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                if (loop, turn) in self._waiting:
                    self._waiting.remove((loop, turn))
            if not turn.cancelled():  # it was this one's turn already
                self._leave()
            raise

    async def __aexit__(self, *raised: object) -> None:
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            while self._waiting:
                loop, turn = self._waiting.popleft()
                try:
                    loop.call_soon_threadsafe(self._let_in, turn)
                    return
                except RuntimeError:  # its loop has ended, and with it whoever waited
                    continue
            self._free += 1

    def _let_in(self, turn: asyncio.Future[None]) -> None:
        if turn.cancelled():
            self._leave()
        else:
            turn.set_result(None)
