"""Rollouts of realign, vLLM and llama.cpp from the same weights, with one thread each.

Sides are processes that take turns. All sample the same numbers of tokens for the same prompts, at temperature 1 from
the whole vocabulary, in fp32. If a scenario has bf16, so do realign and vLLM. Before the first rollout, each side
decodes a prompt greedily, and the results are compared unless precisions differ. Ratios are of CPU seconds, which other
programs hardly affect.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peer.process import STEPS_OF_A_TURN, Worker, missing, turns
from benchmarks.peer.work import Scenario
from benchmarks.report import table as columns

SIDES = {"sampler": "realign", "vllm": "vLLM", "llama": "llama.cpp"}
"""Modules of the sides (`benchmarks.peer.side_...`) and their names in the table."""


def compare(scenario: Scenario, steps: int) -> dict[str, Any]:
    """Run the rollouts of every installed side in alternation, and measure the second rollout of each turn."""
    absent = {side: found for side in SIDES if (found := missing(side)) is not None}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        scenario.save_models(folder)
        worked = steps * STEPS_OF_A_TURN
        workers = {side: Worker(side, scenario, folder, worked, 1) for side in SIDES if side not in absent}
        answers = list(turns(workers, steps))
    return summary(scenario, {side: [answer[side] for answer in answers] for side in workers}, absent)


def summary(scenario: Scenario, results: dict[str, list[dict[str, Any]]], absent: dict[str, str]) -> dict[str, Any]:
    """Return the medians of the rollouts, and the ratios to realign.

    Args:
        scenario: The work.
        results: Answers of each side, one per measured rollout.
        absent: For each side that is not installed, what to install.
    """
    ours = results["sampler"]
    for side, found in results.items():
        assert all(a["lengths"] == b["lengths"] for a, b in zip(ours, found, strict=True)), f"{side}: other lengths"
        agree = found[0]["greedy"] == ours[0]["greedy"] or scenario.bf16
        assert agree, f"{side}: other tokens than realign, so other weights"

    def median(side: str, key: str) -> float:
        return statistics.median(turn[key] for turn in results[side])

    def ratios(side: str, key: str) -> list[float]:
        return [b[key] / a[key] for a, b in zip(ours, results[side], strict=True)]

    return {
        "scenario": scenario.name,
        "tokens": sum(ours[-1]["lengths"]),
        "seconds": {side: {key: round(median(side, key), 4) for key in ("wall", "cpu")} for side in results},
        "ratio": {
            side: {key: round(statistics.median(ratios(side, key)), 2) for key in ("wall", "cpu")} for side in results
        },
        "ratio_range": {side: [round(f(ratios(side, "cpu")), 2) for f in (min, max)] for side in results},
        "not_installed": absent,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Format the results as a table of CPU seconds, and name what to install for missing sides."""
    others = [side for side in SIDES if side != "sampler"]
    head = ["rollout, one thread", "realign CPU s", *(f"{SIDES[side]} CPU s" for side in others)]
    head += [f"{SIDES[side]} / realign" for side in others]
    lines = []
    for row in rows:
        seconds, ratio, spread = row["seconds"], row["ratio"], row["ratio_range"]
        cells = [row["scenario"], f"{seconds['sampler']['cpu']:.2f}"]
        cells += [f"{seconds[side]['cpu']:.2f}" if side in seconds else "not installed" for side in others]
        cells += [
            f"{ratio[side]['cpu']:.2f} ({spread[side][0]:.1f}-{spread[side][1]:.1f})" if side in ratio else ""
            for side in others
        ]
        lines.append(cells)
    absent = {side: what for row in rows for side, what in row["not_installed"].items()}
    return "\n".join([columns(head, lines), *(f"{SIDES[side]}: {what}" for side, what in absent.items())])
