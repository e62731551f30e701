"""Simulation of 8 to 1,024 accelerators: throughput and staleness by placement and staleness bound.

The costs come from a roofline model whose constants are assumptions, listed in this file. They were not measured on a
cluster. Use the results to compare placements, not to predict seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.costs import Costs
from benchmarks.plans import Plan, Tail, Work
from benchmarks.report import table
from benchmarks.simulate import simulate

DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)
BOUNDS = (0, 1, 2, 4, 8)
SPLITS = (0.25, 0.5, 0.75)
"""Fractions of the devices that generate."""
ROUNDS = 2
"""Number of measured groups of `bound + 1` steps in a full pipeline. Waits for old prompts recur with this period."""


@dataclass(frozen=True)
class Accelerator:
    """Peak rates of a device. Defaults: NVIDIA's data sheet of the H100 SXM5 (dense bf16, HBM3), in a DGX H100."""

    flops: float = 989e12
    bandwidth: float = 3.35e12
    """Memory bandwidth in bytes per second."""
    memory: float = 80e9
    link: float = 50e9
    """Bandwidth to other nodes in bytes per second: one port of 400 Gb/s per device."""


@dataclass(frozen=True)
class Network:
    """Dense bf16 model with 7 billion weights and the shape of Qwen2.5-7B (from its config.json)."""

    weights: float = 7.6e9
    layers: int = 28
    kv_heads: int = 4
    head_size: int = 128

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes of the KV cache per token of context, in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


@dataclass(frozen=True)
class Assumed:
    """Assumptions that data sheets do not contain."""

    bandwidth_used: float = 0.7
    """Fraction of the memory bandwidth used in decoding."""
    flops_used: float = 0.4
    """Fraction of the peak FLOP/s used in training and prefill."""
    decode_call_s: float = 0.003
    """Seconds of a decoding step besides memory reads: launches, sampling and scheduling."""
    train_call_s: float = 2.0
    """Seconds of a training step besides its tokens: splitting, final reductions and the optimizer."""
    sync_call_s: float = 1.0
    """Seconds of a weight update besides the transfer."""
    link_used: float = 0.5
    """Fraction of the link bandwidth used by weight transfers."""
    switch_s: float = 3.0
    """Seconds of a switch between training and generation on the same devices: resharding, allocating caches."""
    learning: float = 6.0
    """Floating-point operations per weight and token of a training step."""
    proximal: float = 2.0
    """Additional operations where responses may be stale: a forward pass for the proximal log-probs."""
    slots: int = 256
    """Maximum number of rows of an engine. The KV cache may limit it further."""


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


def slots(device: Accelerator, network: Network, assumed: Assumed, work: Work) -> int:
    """Return the number of rows of an engine on one device whose KV cache fits at twice the mean length."""
    free = 0.9 * device.memory - 2 * network.weights
    length = work.prompt_tokens + 2 * work.lengths.mean
    return max(1, min(assumed.slots, int(free / (network.bytes_per_token * length))))


def roofline(bound: int | None, trainers: int, device: Accelerator, network: Network, assumed: Assumed) -> Costs:
    """Estimate the costs of an engine on one device and of training on `trainers` devices, for a `Case.bound`."""
    read = device.bandwidth * assumed.bandwidth_used
    compute = device.flops * assumed.flops_used
    operations = assumed.learning + (assumed.proximal if bound else 0.0)
    transfer_s = assumed.sync_call_s + 2 * network.weights / (device.link * assumed.link_used)
    return Costs(
        decode_step_s=assumed.decode_call_s + 2 * network.weights / read,
        decode_row_s=2 * network.weights / compute,
        decode_context_s=network.bytes_per_token / read,
        prefill_token_s=2 * network.weights / compute,
        train_step_s=assumed.train_call_s,
        train_token_s=operations * network.weights / (compute * trainers),
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
    device, network, assumed = Accelerator(), Network(), Assumed()
    together = case.bound is None
    engines = round(case.devices * case.share)
    trainers = case.devices if together else case.devices - engines
    bound = case.bound or 0
    steps = max(6, ROUNDS * (bound + 1)) + 1 + 2 * bound
    work = Work(**{**vars(WORK), "steps": steps})
    costs = roofline(case.bound, trainers, device, network, assumed)
    plan = Plan(case.bound, engines, slots(device, network, assumed, work), switch_s=assumed.switch_s * together)
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
    found: dict[tuple[int, int | None], Mapping[str, Any]] = {}
    for row in rows:
        key = (row["devices"], row["bound"])
        if key not in found or row["tokens_per_s"] > found[key]["tokens_per_s"]:
            found[key] = row
    return found


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
    colours = plt.get_cmap("viridis")([0.0, 0.22, 0.45, 0.68, 0.88])
    each = [top[n, None]["tokens_per_s"] / n for n in DEVICES]
    left.plot(DEVICES, each, "k--", marker="s", label="colocated, synchronous")
    for bound, colour in zip(BOUNDS, colours, strict=True):
        name = "separate, bound 0" if bound == 0 else f"asynchronous, bound {bound}"
        own = [top[n, bound] for n in DEVICES]
        left.plot(DEVICES, [r["tokens_per_s"] / r["devices"] for r in own], color=colour, marker="o", label=name)
        ratio = [r["tokens_per_s"] / top[r["devices"], None]["tokens_per_s"] for r in own]
        middle.plot(DEVICES, ratio, color=colour, marker="o")
        right.plot(DEVICES, [r["staleness"]["head"] for r in own], color=colour, marker="o")
        right.plot(DEVICES, [r["staleness"]["max"] for r in own], color=colour, ls=":", lw=1)
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
