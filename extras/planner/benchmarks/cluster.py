"""Simulation of 8 to 1,024 accelerators: throughput and staleness by placement and staleness bound.

    python -m extras.planner.benchmarks.cluster     # prints a table, draws a figure, and prints one JSON line

The costs come from a roofline model, whose constants are assumptions (`realign_planner.options`). They were not
measured on a cluster. Use the results to compare placements, not to predict seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, table
from realign_planner.options import Accelerator, Assumed
from realign_planner.simulator import (
    Costs,
    NetworkSizes,
    RuntimeSchedule,
    Tail,
    Work,
    decoding,
    rows_that_fit,
    simulate,
)

DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)
BOUNDS = (0, 1, 2, 4, 8)
SWITCH_S = 3.0
"""Assumed seconds between training and generation on the same devices, for resharding and allocating caches."""
SPLITS = (0.25, 0.5, 0.75)
"""Fractions of the devices that generate."""
ROUNDS = 2
"""Number of measured groups of `bound + 1` steps in a full pipeline. Waits for old prompts recur with this period."""


WORK = Work(
    batch_prompts=256,
    group=8,
    steps=0,
    prompt_tokens=512,
    lengths=Tail(4096, 0.8, 32768),
    reward_s=Tail(1.0, 1.0),
)
"""Each step has 2,048 responses on any number of devices. Lengths resemble reasoning: the median is 2,970 tokens, and
one response in 100 exceeds 19,000 tokens.
"""


@dataclass(frozen=True)
class Case:
    """One simulated run."""

    devices: int
    bound: int | None
    """Staleness bound; None if the same devices alternate between generation and training."""
    share: float = 1.0
    """Fraction of the devices that generate."""


def slots(device: Accelerator, network: NetworkSizes, assumed: Assumed, work: Work) -> int:
    """Return the number of rows of an engine on one device whose KV cache fits at twice the mean length."""
    return rows_that_fit(assumed.memory_used * device.memory - 2 * network.weights, network, assumed, work)


def roofline(bound: int | None, trainers: int, device: Accelerator, network: NetworkSizes, assumed: Assumed) -> Costs:
    """Estimate the costs of an engine on one device and of training on `trainers` devices, for a `Case.bound`."""
    operations = assumed.learning + (assumed.proximal if bound else 0.0)
    transfer_s = assumed.sync_call_s + 2 * network.weights / (device.link * assumed.link_used)
    return replace(
        decoding(network, device, assumed),
        train_step_s=assumed.train_call_s,
        train_token_s=operations * network.weights / (device.flops * assumed.flops_used * trainers),
        sync_s=0.0 if bound is None else transfer_s,  # colocated weights are not transferred; see `switch_s`
    )


def cases() -> Iterator[Case]:
    """Yield every combination of devices, bound and split."""
    for devices in DEVICES:
        yield Case(devices, None)
        for bound in BOUNDS:
            yield from (Case(devices, bound, share) for share in SPLITS)


def measure(case: Case) -> dict[str, Any]:
    """Simulate a case and return its throughput, staleness and device utilization."""
    device, network, assumed = Accelerator(), NetworkSizes(), Assumed()
    together = case.bound is None
    engines = round(case.devices * case.share)
    trainers = case.devices if together else case.devices - engines
    bound = case.bound or 0
    steps = max(6, ROUNDS * (bound + 1)) + 1 + 2 * bound
    work = Work(**{**vars(WORK), "steps": steps})
    costs = roofline(case.bound, trainers, device, network, assumed)
    plan = RuntimeSchedule(case.bound, engines, slots(device, network, assumed, work), switch_s=SWITCH_S * together)
    report = simulate(costs, work, plan)
    seconds = report.ends[-1]
    return {
        "devices": case.devices,
        "bound": case.bound,
        "share": case.share,
        "tokens_per_s": round(report.tokens_per_s),
        "step_s": round(report.step_s, 1),
        "staleness": {name: round(x, 2) for name, x in report.staleness().items()},
        "generating": round(report.generating_s / (seconds * engines), 3),
        "training": round(report.training_s / seconds, 3),
    }


def sweep(processes: int = 2) -> list[dict[str, Any]]:
    """Measure all cases."""
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(measure, cases(), chunksize=4))


def best(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int | None], Mapping[str, Any]]:
    """Return the row with the best split for each number of devices and bound."""
    top: dict[tuple[int, int | None], Mapping[str, Any]] = {}
    for row in rows:
        key = (row["devices"], row["bound"])
        if key not in top or row["tokens_per_s"] > top[key]["tokens_per_s"]:
            top[key] = row
    return top


def show(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the results as a table.

    Cells contain the throughput relative to the colocated run, and the fraction of devices that generate (best split).
    """
    top = best(rows)
    lines = []
    for devices in DEVICES:
        base = top[devices, None]["tokens_per_s"]
        cells = [f"{base / 1000:.0f}"]
        for bound in BOUNDS:
            row = top[devices, bound]
            cells.append(f"{row['tokens_per_s'] / base:.2f}x ({row['share']:.0%})")
        lines.append([str(devices), *cells])
    return table(("devices", "colocated, k tokens/s", *(f"bound {b}" for b in BOUNDS)), lines)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot relative throughput and staleness by number of devices."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    top = best(rows)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13.5, 4.2), layout="constrained")
    colors = plt.get_cmap("viridis")([0.0, 0.22, 0.45, 0.68, 0.88])
    each = [top[n, None]["tokens_per_s"] / n for n in DEVICES]
    left.plot(DEVICES, each, "k--", marker="s", label="colocated, synchronous")
    for bound, color in zip(BOUNDS, colors, strict=True):
        name = "separate, bound 0" if bound == 0 else f"asynchronous, bound {bound}"
        own = [top[n, bound] for n in DEVICES]
        left.plot(DEVICES, [r["tokens_per_s"] / r["devices"] for r in own], color=color, marker="o", label=name)
        ratio = [r["tokens_per_s"] / top[r["devices"], None]["tokens_per_s"] for r in own]
        middle.plot(DEVICES, ratio, color=color, marker="o")
        right.plot(DEVICES, [r["staleness"]["head"] for r in own], color=color, marker="o")
        right.plot(DEVICES, [r["staleness"]["max"] for r in own], color=color, ls=":", lw=1)
    middle.axhline(1, color="k", ls="--", lw=1)
    left.set(title="Response tokens per second and device", ylim=(0, None))
    middle.set(title="Throughput over colocated", ylim=(0, None))
    right.set(title="Staleness in versions: mean (dotted: maximum)", ylim=(-0.2, None))
    left.legend(fontsize=8, frameon=False)
    for axis in (left, middle, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(DEVICES, [f"{n:,}" for n in DEVICES], fontsize=8)
        axis.set_xlabel("devices (best split for each number)")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(given: Sequence[str] | None = None) -> None:
    """Simulate all numbers of accelerators; write the table, the figure and one JSON line."""
    words = arguments({"picture": "runs/scaling.png", "processes": "2"}, given)
    started = time.time()
    rows = sweep(int(words["processes"]))
    print(show(rows))
    picture = Path(words["picture"])
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, picture)
    print(json.dumps({"benchmark": "cluster", "seconds": round(time.time() - started), "rows": rows}))


if __name__ == "__main__":
    main()
