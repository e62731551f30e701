"""Files of user code for attacked runs: reward functions, an environment, and a clock that jumps."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.torture.runs import REWARD

FAULTY = """
import os
import time

def worth(prompt, response, row):
    return len(response) / 5 + (response[:1] in "13579")

def bad(prompt):
    return int(prompt[:2]) % 16 == 0

def raises(prompt, response, row):
    if bad(prompt):
        raise RuntimeError("no reward for this prompt")
    return worth(prompt, response, row)

def hangs(prompt, response, row):
    while bad(prompt):
        time.sleep(1)
    return worth(prompt, response, row)

def exits(prompt, response, row):
    if bad(prompt):
        os._exit(3)
    return worth(prompt, response, row)

def fills_memory(prompt, response, row):
    kept = []
    while bad(prompt):
        kept.append(bytearray(1 << 26))
    return worth(prompt, response, row)
"""
"""Reward functions that fail for the same prompts in different ways."""

EPISODES = """
import asyncio
import time

def bad(prompt):
    return int(prompt[:2]) % 16 == 0

class Episode:
    resets = 0

    def __init__(self, fault, first=0, last=0):
        self.fault, self.first, self.last = fault, first, last

    async def reset(self, row, *, seed):
        Episode.resets += 1
        if self.first <= Episode.resets <= self.last:
            if self.fault == "block":
                time.sleep(3600)
            raise RuntimeError("no page")
        self.bad = not self.last and bad(row["prompt"])
        return "", {}

    async def step(self, response):
        if self.bad and self.fault == "raise":
            raise RuntimeError("no answer")
        while self.bad:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if self.fault == "hang":
                    raise
        return "", len(response.text) / 5 + (response.text[:1] in "13579"), True, False, {}
"""
"""An environment whose calls fail, hang or swallow their cancellation for the same prompts, or block the event loop."""

JUMPS = """
import datetime
import os
import time

DAYS = [float(days) * 86400 for days in os.environ["REALIGN_TORTURE_DAYS"].split()]
seconds, nanoseconds, Plain = time.time, time.time_ns, datetime.datetime

def shift():
    return DAYS[int(time.monotonic() * 20) % len(DAYS)]

class Shifted(Plain):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)

time.time = lambda: seconds() + shift()
time.time_ns = lambda: nanoseconds() + int(shift() * 1e9)
datetime.datetime = Shifted
"""
"""A `sitecustomize` that shifts the wall clock of Python by the next of some numbers of days, 20 times a second."""

CODE: Mapping[str, str] = {
    "reward.py": REWARD,
    "faulty.py": FAULTY,
    "episodes.py": EPISODES,
    "jumps/sitecustomize.py": JUMPS,
}
"""Content by path."""
