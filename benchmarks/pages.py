"""How many rows share a KV cache in pages, compared with slots of full length; counted, without a GPU.

    python -m benchmarks.pages
    python -m benchmarks.pages limit=16384 gigabytes=50

The rows are a long-tailed batch (log-normal lengths with a median of 600 tokens, cut at the limit) with the
shapes of Qwen2.5-7B in bf16. The bookkeeping is that of rollouts: admission, one token per row and step, and rows that
wait because no page is free. No model runs, and the cache is on the device `meta`, so bytes and steps are exact and
nothing is timed. Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import deque

import torch

from benchmarks.report import arguments, table
from realign.models.network.decoder import EXPECTED
from realign.models.network.kernels import PAGE
from realign.models.network.kv_cache import PagedKVCache, bytes_per_slot

LAYERS, HEADS, SIZE = 28, 4, 128
PROMPT = 200
SYNC_EVERY = 8


def lengths_of(responses: int, limit: int) -> list[int]:
    """Return the response lengths of a batch."""
    rng = random.Random(0)
    return [min(limit, max(1, round(rng.lognormvariate(math.log(600), 1.3)))) for _ in range(responses)]


def in_slots(lengths: list[int], slots: int) -> tuple[float, int]:
    """Return the mean number of rows and the number of steps if each row reserves its limit."""
    waiting, rows, steps, busy = deque(lengths), [], 0, 0
    while waiting or rows:
        rows += [waiting.popleft() for _ in range(min(slots - len(rows), len(waiting)))]
        steps, busy = steps + 1, busy + len(rows)
        rows = [left - 1 for left in rows if left > 1]
    return busy / steps, steps


def in_pages(lengths: list[int], limit: int, size: int) -> dict[str, float]:
    """Return the same for pages, and the tokens that rows computed again after they had waited."""
    kv = torch.empty(HEADS, PROMPT + limit, SIZE, dtype=torch.bfloat16, device="meta")
    like = dict.fromkeys(range(LAYERS), (kv, kv))
    expected = PROMPT + max(limit // EXPECTED, PAGE)
    slots = min(len(lengths), size // bytes_per_slot(like, expected))
    cache = PagedKVCache(like, slots, PROMPT + limit, size // bytes_per_slot(like, PAGE))
    waiting = deque((length, 0) for length in lengths)
    rows: list[tuple[int, int]] = []
    """Length of each response, and its tokens so far."""
    steps = busy = again = held = interrupted = 0
    while waiting or rows:
        while waiting and len(rows) < slots and cache.room(PROMPT + waiting[0][1]):
            length, done = waiting.popleft()
            text = kv[:, : PROMPT + done]
            cache.fill(len(rows), len(rows) + 1, dict.fromkeys(like, (text, text)))
            again += done
            rows.append((length, done))
        while not cache.reserve(len(rows), SYNC_EVERY):
            waiting.appendleft(rows.pop())
            cache.drop(len(rows))
            interrupted += 1
        for _ in range(SYNC_EVERY):
            cache.advance(len(rows))
        steps, busy = steps + SYNC_EVERY, busy + SYNC_EVERY * len(rows)
        rows = [(length, done + SYNC_EVERY) for length, done in rows]
        pages = sum(cache.pages_of(PROMPT + done) for _, done in rows)
        held += SYNC_EVERY * pages * bytes_per_slot(like, PAGE)
        for row in reversed([row for row, (length, done) in enumerate(rows) if done >= length]):
            last = rows.pop()
            cache.drop(row)
            if row < len(rows):
                rows[row] = last
                cache.move([len(rows)], [row], 0)
    return {"rows": busy / steps, "steps": steps, "bytes": held / busy, "again": again, "interrupted": interrupted}


def main(words: list[str]) -> int:
    """Print the comparison."""
    options = arguments({"responses": "2048", "limit": "8192", "gigabytes": "25"}, words)
    limit, size = int(options["limit"]), int(float(options["gigabytes"]) * 1e9)
    lengths = lengths_of(int(options["responses"]), limit)
    row = LAYERS * 2 * HEADS * SIZE * 2 * (PROMPT + limit)
    slots = size // row
    mean, steps = in_slots(lengths, slots)
    pages = in_pages(lengths, limit, size)
    print(f"{len(lengths)} responses of {sum(lengths) / len(lengths):.0f} tokens on average, limit {limit}")
    header = ("cache", "MB per row", "rows at once (mean)", "decode steps", "tokens computed again")
    lines = [("slots", f"{row / 1e6:.0f}", f"{mean:.0f}", f"{steps}", "0")]
    numbers = (pages["bytes"] / 1e6, pages["rows"], pages["steps"], pages["again"])
    lines.append(("pages", *(f"{x:.0f}" for x in numbers)))
    print(table(header, lines))
    ratio = {"memory_per_row": row / pages["bytes"], "rows": pages["rows"] / mean, "steps": steps / pages["steps"]}
    print(json.dumps({"slots": {"rows": mean, "steps": steps}, "pages": pages, "ratio": ratio}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
