"""Reward functions with all kinds of failures of user code. Workers load this file by its path."""

import ctypes
import os
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import numpy as np

KEPT = []


def act(prompt, response, row):
    """Do what the row says. A plain row returns its value."""
    match row.get("do"):
        case None:
            return row["value"]
        case "raise":
            raise KeyError("no such answer")
        case "exit":
            sys.exit(0)
        case "slow":
            time.sleep(row["s"])
            return row["value"]
        case "pid":
            return float(os.getpid())
        case "hang":
            if "file" in row:
                Path(row["file"]).touch()
            while True:
                time.sleep(0.05)
        case "os_exit":
            os._exit(7)
        case "segfault":
            ctypes.string_at(0)
        case "memory":
            blocks = []
            while True:
                blocks.append(bytearray(10**7))
        case "leak":
            KEPT.append(bytearray(20 * 2**20))
            return row["value"]
        case "leak_and_spawn":
            KEPT.append(bytearray(20 * 2**20))
            return float(subprocess.Popen(["sleep", "600"]).pid)
        case "load":
            if not KEPT:
                KEPT.append(bytearray(200 * 2**20))
            return float(os.getpid())
        case "small_memory":
            numbers = [0]
            while True:
                numbers.extend(range(len(numbers)))
        case "numpy":
            return np.float32(0.5)
        case "array0":
            return np.array(True)
        case "vector":
            return np.array([1.0])
        case "decimal":
            return Decimal("0.5")


def pid(prompt, response, row):
    return float(os.getpid())


def child_that_sleeps(prompt, response, row):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(row["file"]).write_text(str(child.pid))
    child.wait()
    return 1.0


def pops_its_row(prompt, response, row):
    return row.pop("value")


class Scaled:
    """Picklable callable with state."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, prompt, response, row):
        return self.scale * len(response)


async def asynchronous(prompt, response, row):
    return 1.0


def unknown_names(p, r, row):
    return 1.0


not_a_function = 3


def popping(prompt, response, row):
    """Return the length of a list of the row, and shorten it."""
    row["left"].pop()
    return 1.0 + len(row["left"])


async def popping_later(prompt, response, row):
    return popping(prompt, response, row)


def popping_group(prompt, responses, row):
    return [popping(prompt, response, row) for response in responses]


def popping_batch(prompts, responses, rows):
    return [popping("", "", row) for row in rows]
