"""Reward functions of each scope. Workers load this file by its path."""

import asyncio
import os
import time


def length(prompt, response, row):
    return len(response) * row["price"]


def lengths_of_a_group(prompt, responses, row):
    return [length(prompt, response, row) for response in responses]


def lengths_of_a_batch(prompts, responses, rows):
    return [length(*one) for one in zip(prompts, responses, rows, strict=True)]


async def awaited_length(prompt, response, row):
    await asyncio.sleep(0)
    return length(prompt, response, row)


async def awaited_group(prompt, responses, row):
    await asyncio.sleep(0)
    return lengths_of_a_group(prompt, responses, row)


async def awaited_batch(prompts, responses, rows):
    await asyncio.sleep(0)
    return lengths_of_a_batch(prompts, responses, rows)


def above_the_shortest(prompt, responses, row):
    """Compare the responses of a group; no reward for an empty one."""
    shortest = min(map(len, responses))
    return [len(response) - shortest if response else None for response in responses]


def fails_on_b(prompt, responses, row):
    if prompt == "b":
        raise ValueError("b is not comparable")
    return [1.0] * len(responses)


def too_few(prompt, responses, row):
    return [1.0]


def mixed_names(prompt, responses, rows):
    return [1.0]


RUNNING = 0
MOST = 0


async def most_at_a_time(prompt, response, row):
    """Return the largest number of calls of this process at a time so far."""
    global RUNNING, MOST
    RUNNING += 1
    MOST = max(MOST, RUNNING)
    await asyncio.sleep(row["s"])
    RUNNING -= 1
    return MOST


async def behaves(prompt, response, row):
    match row.get("do"):
        case "hang":
            await asyncio.sleep(3600)
        case "block":
            time.sleep(3600)
        case "raise":
            raise KeyError("no such answer")
        case "timeout":
            raise TimeoutError("of the function")
        case "exit":
            raise SystemExit(3)
        case "os_exit":
            os._exit(7)
    return row["value"]


LOOPS = []


async def loops_seen(prompt, response, row):
    """Return the number of distinct event loops of this process so far."""
    if (loop := asyncio.get_running_loop()) not in LOOPS:
        LOOPS.append(loop)
    return len(LOOPS)
