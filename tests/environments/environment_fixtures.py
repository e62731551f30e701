"""Environments for tests. The row of the dataset selects how an environment fails."""

from __future__ import annotations

import asyncio
import builtins
import importlib.util
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

from realign.errors import ConfigError


class Tool:
    """Environment that returns the items of the row's `script` from `step`, one per turn."""

    made: ClassVar[list[Tool]] = []
    """Instances of the current test in the order of construction; the test clears the list."""

    def __init__(self, tag: str = "") -> None:
        self.tag, self.heard, self.closed, self.seed = tag, [], 0, None
        Tool.made.append(self)

    async def reset(self, row, *, seed):
        self.script, self.seed = list(row["script"]), seed
        return row.get("opening", ""), {}

    async def step(self, response):
        self.heard.append(response)
        return self.script[response.turn]

    async def close(self):
        self.closed += 1


class Bad:
    """Environment that fails in `reset` or `step`, as the row selects."""

    closed = 0

    def reset(self, row, *, seed):
        self.how = row["how"]
        if self.how == "reset":
            raise KeyError("no such page")
        return ("", {}) if self.how != "one value" else ""

    async def step(self, response):
        if self.how == "raise":
            raise RuntimeError("the tool broke")
        if self.how in ("TimeoutError", "ConnectionError"):
            raise getattr(builtins, self.how)("the service is slow")
        if self.how == "exit":
            sys.exit(3)
        if self.how == "cancel":
            raise asyncio.CancelledError
        if self.how == "hang":
            await asyncio.sleep(60)
        return {
            "good": ("", 1.0, True, False, {}),
            "four": ("", 1.0, True, {}),
            "nan": ("", float("nan"), True, False, {}),
            "huge": ("", 10**400, True, False, {}),
            "half a character": ("\ud800", 1.0, False, False, {}),
            "text": ("", "1", True, False, {}),
            "ends": ("", 1.0, "yes", False, {}),
            "observation": (3.5, 1.0, False, False, {}),
            "unknown": ([5, 97], 1.0, False, False, {}),
            "negative": ([-1], 1.0, False, False, {}),
            "messages": ([{"role": "tool", "content": "x"}], 1.0, False, False, {}),
        }[self.how]

    def close(self):
        Bad.closed += 1
        if self.how == "good":
            raise OSError("cannot close")


class Board:
    """Environment that plays on the board of its row, and ends after two turns. The reward is the board's size."""

    def reset(self, row):
        self.board = row["board"]
        return "", {}

    def step(self, response):
        self.board.append(1)
        return "", float(len(self.board)), response.turn == 1, False, {}


class Plain:
    """Environment with plain functions that take 0.2 s each."""

    threads: ClassVar[set[int]] = set()

    def reset(self, row):
        return "", {}

    def step(self, response):
        Plain.threads.add(threading.get_ident())
        time.sleep(0.2)
        return "", 1.0, True, False, {}


class Stuck:
    """Environment with a plain function that exceeds its time limit."""

    def reset(self, row):
        time.sleep(5)
        return "", {}

    def step(self, response):
        raise AssertionError("never asked")


class Threaded:
    """Environment that exceeds its time limit in a thread of asyncio."""

    async def reset(self, row):
        return "", {}

    async def step(self, response):
        await asyncio.to_thread(Blocking.release.wait)


class Busy:
    """Environment that counts the concurrent calls of all threads."""

    lock = threading.Lock()
    now = most = 0

    async def reset(self, row):
        return "", {}

    async def step(self, response):
        with Busy.lock:
            Busy.now += 1
            Busy.most = max(Busy.most, Busy.now)
        await asyncio.sleep(0.02)
        with Busy.lock:
            Busy.now -= 1
        return "", 1.0, True, False, {}


class BadConstructor:
    """A user's environment whose constructor rejects its argument."""

    def __init__(self, pages=0):
        if pages < 1:
            raise ValueError("pages must be positive")

    async def reset(self, row):
        return "", {}

    async def step(self, response):
        return "", 1.0, True, False, {}


class NoStep:
    def reset(self, row):
        return "", {}


class OddStep:
    def reset(self, row):
        return "", {}

    def step(self):
        return None


def function(row):
    return row


class Blocking:
    """Coroutines that block the event loop or ignore their cancellation, as the row selects, until `release` is set."""

    release = threading.Event()
    """Set by a test at its end, so that blocked threads end."""
    closed: ClassVar[list[str]] = []
    """Names of the rows whose environments were closed."""

    async def reset(self, row):
        self.name, self.how = row["name"], row["how"]
        if self.how == "reset blocks":
            Blocking.release.wait()
        return "", {}

    async def step(self, response):
        if self.how == "step blocks" or (self.how == "second step blocks" and response.turn == 1):
            blocked_here()
        if self.how == "waits":
            await asyncio.sleep(60)
        if self.how == "swallows":
            await swallow()
        if self.how == "stops the loop":
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0.01)
        if self.how == "exits in a task":
            self.task = asyncio.create_task(leave())
            await asyncio.sleep(0.01)
        if self.how == "leaves a task":
            self.task = asyncio.create_task(swallow())
        if self.how in ("two turns", "second step blocks") and response.turn == 0:
            return "", 0.0, False, False, {}
        return "", 1.0, True, False, {}

    async def close(self):
        Blocking.closed.append(self.name)
        if self.how == "close swallows":
            await swallow()
        if self.how == "close blocks":
            Blocking.release.wait()


def blocked_here():
    Blocking.release.wait()


async def swallow():
    """Wait until `release` is set, and ignore cancellation."""
    while not Blocking.release.is_set():
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue


async def leave():
    sys.exit(3)


class Checked(Tool):
    """Environment whose check fails."""

    @classmethod
    def check(cls, **arguments):
        raise ConfigError(", ".join(f"{name}={value}" for name, value in arguments.items()))


SPEC = importlib.util.find_spec("mcp")
PACKAGES = str(Path(SPEC.origin).parents[1]) if SPEC and SPEC.origin else ""  # a server gets few environment variables
COMMAND = shlex.join(["env", f"PYTHONPATH={PACKAGES}", sys.executable, str(Path(__file__).parent / "mcp_server.py")])
