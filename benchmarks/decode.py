"""Time of a decode step: compiled library, operators of torch, and llama.cpp if the package xllamacpp is installed.

    python -m benchmarks.decode
    python -m benchmarks.decode rows=1,64 repeats=9 tokens=96 threads=1

All sides sample from the same random Qwen2 weights in fp32 at temperature 1 from the whole vocabulary. The time of a
step is the difference between rollouts of two lengths, divided by the difference of the lengths, so that it excludes
prefill. Sides alternate. Seconds are CPU seconds of the process, which other programs hardly affect. The column `trunk`
is the ratio of the layers alone, without the head and the draw.

llama.cpp needs the packages xllamacpp and gguf, which `make bench` installs in .bench/venv. It decodes all rows in one
batch, with one slot for each row.

Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.batches import make_actor
from benchmarks.peer.process import missing
from benchmarks.peer.work import SCENARIOS, Scenario
from benchmarks.report import alternate, arguments, facts, table
from realign.api import GenerationConfig, Model, SequenceSample
from realign.models.network.kv_cache import DecodeContext, KVCache
from realign.samplers.in_process.compiled.library import CompiledDecode
from realign.samplers.in_process.compiled.trunk import CompiledTrunk
from realign.samplers.in_process.settings import InProcessSampling

PROMPT = 40
"""Tokens of each prompt."""

STEPS = 4
"""Decode steps of the trunk in one measured call."""

Side = Callable[[int, int], object]
"""Samples `rows` responses of `tokens` tokens."""


def prompts_for(rows: int) -> list[list[int]]:
    """Return the tokens of a prompt for each row."""
    return [list(range(3 + row, 3 + row + PROMPT)) for row in range(rows)]


def our_side(scenario: Scenario, setting: CompiledDecode) -> tuple[Model, Side]:
    """Return an actor and its rollouts."""
    actor = make_actor(scenario, sampling=InProcessSampling(compiled_decode=setting))

    def sample(rows: int, tokens: int) -> object:
        ids = [[torch.tensor(prompt)] for prompt in prompts_for(rows)]
        data = SequenceSample.from_sequences(range(rows), {"prompt_ids": ids})
        config = GenerationConfig(n=1, max_new_tokens=tokens, fixed_length=True)
        return actor.engine.generate(data, config, seed=0)

    return actor, sample


def llama_side(model: Any, folder: Path, rows: int, tokens: int) -> Side:
    """Return the rollouts of llama.cpp with one thread."""
    from benchmarks.peer.side_llama import Llama

    llama = Llama(model, folder, rows, PROMPT + tokens)
    return lambda rows, tokens: llama.sample(prompts_for(rows), [tokens] * rows)


def trunk_ratio(actor: Model, rows: int, repeats: int) -> tuple[float, float]:
    """Return the seconds of a decode step of the layers in torch and in the library."""
    compiled = actor.engine.fusion.trunk(2 * PROMPT, torch.float32)
    assert isinstance(compiled, CompiledTrunk)
    layers, size = compiled.fused.layers, 2 * compiled.fused.turns.shape[-1]
    like = {i: (torch.zeros(x.heads[1], 1, size),) * 2 for i, x in enumerate(layers)}
    cache = KVCache(like, rows, 2 * PROMPT)
    positions_B = torch.full((rows,), 2 * PROMPT - 1)
    ids_B = torch.arange(rows) + 3

    def steps(trunk: Any) -> Callable[[], object]:
        def call() -> object:
            return [trunk(ids_B, positions_B, DecodeContext(cache, positions_B, 2 * PROMPT - 1)) for _ in range(STEPS)]

        return call

    with torch.no_grad():
        found = alternate({"torch": steps(compiled.fused), "compiled": steps(compiled)}, repeats)
    return found["torch"].cpu / STEPS, found["compiled"].cpu / STEPS


def step_seconds(sides: dict[str, Side], rows: int, tokens: int, repeats: int) -> dict[str, float]:
    """Return the median CPU seconds of a decode step of each side."""
    few = max(1, tokens // 4)
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeats + 1):
        calls = {
            (name, count): (lambda side=side, count=count: side(rows, count))
            for name, side in sides.items()
            for count in (few, tokens)
        }
        times = alternate(calls, 1, warm_up=False)
        for name in sides:
            if number:  # the first round is warm-up
                found[name].append((times[name, tokens].cpu - times[name, few].cpu) / (tokens - few))
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def measure(scenario: Scenario, rows: list[int], tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Measure every number of rows."""
    actor, compiled = our_side(scenario, CompiledDecode.on)
    _, plain = our_side(scenario, CompiledDecode.off)
    results = []
    for count in rows:
        sides: dict[str, Side] = {"torch": plain, "compiled": compiled}
        with tempfile.TemporaryDirectory() as folder:
            if missing("llama") is None:
                sides["llama.cpp"] = llama_side(actor.engine.module, Path(folder), count, tokens)
            found = step_seconds(sides, count, tokens, repeats)
        torch_s, compiled_s = trunk_ratio(actor, count, repeats)
        results.append(
            {
                "rows": count,
                **{f"{name}_ms": round(1000 * seconds, 3) for name, seconds in found.items()},
                "ratio": round(found["torch"] / found["compiled"], 2),
                "trunk_ratio": round(torch_s / compiled_s, 2),
            }
        )
    return results


def show(rows: list[dict[str, Any]]) -> str:
    """Format the results as a table."""
    head = ("rows", "torch, ms", "compiled, ms", "torch / compiled", "trunk", "llama.cpp, ms")
    cells = [
        (
            str(r["rows"]),
            f"{r['torch_ms']:.2f}",
            f"{r['compiled_ms']:.2f}",
            f"{r['ratio']:.2f}x",
            f"{r['trunk_ratio']:.2f}x",
            f"{r['llama.cpp_ms']:.2f}" if "llama.cpp_ms" in r else "not installed",
        )
        for r in rows
    ]
    absent = missing("llama")
    return table(head, cells) + (f"\nllama.cpp: {absent}" if absent else "")


def main(given: list[str] | None = None) -> None:
    """Measure the requested numbers of rows; print the table and the JSON line."""
    defaults = {"rows": "1,2,8,64", "tokens": "64", "repeats": "7", "threads": "1", "scenario": "long_tail"}
    words = arguments(defaults, given)
    torch.set_num_threads(int(words["threads"]))
    scenario = SCENARIOS[words["scenario"]]
    rows = [int(word) for word in words["rows"].split(",")]
    found = measure(scenario, rows, int(words["tokens"]), int(words["repeats"]))
    print(show(found))
    print(json.dumps({"benchmark": "decode", **facts(), "rows": found}))


if __name__ == "__main__":
    main()
