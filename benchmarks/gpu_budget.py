"""Launches, synchronizations and memory of training, counted on the virtual CUDA device; needs a C++ compiler.

    python -m benchmarks.gpu_budget                # launches and synchronizations, also of decoding
    python -m benchmarks.gpu_budget parts=memory   # memory of one rank of several, beside the estimate

Prints a table, the lines of realign at which the host waits, and, as the last line, one JSON object. Launches are lower
bounds (tests/virtual_cuda/README.md). No time is measured, so the load of the machine does not matter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.virtual_cuda import device

device.install()

import torch  # noqa: E402

from benchmarks.report import arguments, table  # noqa: E402
from realign.engines import Sharding  # noqa: E402
from tests.virtual_cuda.budgets import LayerCost, decode, of_layers, train  # noqa: E402
from tests.virtual_cuda.rank_memory import SIZES, Case, config_of, estimated, full_depth  # noqa: E402

MICROSECONDS = 5
"""Time of one launch on the host, an assumption for the last column."""
RANKS = (1, 8, 64)
DECODE: dict[str, dict[str, Any]] = {
    "decode step, bf16": {},
    "decode step, fp32": {"dtype": torch.float32},
    "decode step, bf16, modules of transformers": {"fused_rollout": False},
    "decode step, bf16, modules, frozen model": {"fused_rollout": False, "frozen": True},
}
TRAIN: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, gradient checkpointing": {"gradient_checkpointing": True},
    "fp32": {"dtype": torch.float32},
}


def measure() -> dict[str, LayerCost]:
    """Return every cost by its name."""
    costs = {name: of_layers(lambda layers, s=settings: decode(layers, **s)) for name, settings in DECODE.items()}
    for name, settings in TRAIN.items():
        two, four = train(2, **settings), train(4, **settings)
        costs[f"micro-batch, {name}"] = LayerCost(two[0], four[0])
        costs[f"rest of a training step, {name}"] = LayerCost(two[1], four[1])
    return costs


def main() -> int:
    """Print the requested parts."""
    parts = arguments({"parts": "launches"})["parts"].split(",")
    if "launches" in parts:
        launches()
    if "memory" in parts:
        memory()
    return 0


def memory() -> None:
    """Print the memory of one rank in a training step: the estimate of `realign check`, and what torch tracks."""
    rows = []
    for model in SIZES:
        for ranks in RANKS:
            if ranks == 1 and "experts" in model:
                continue  # its experts stay fp32, which torch's `grouped_mm` refuses for fake tensors
            rows.append(memory_row(model, Case(model, ranks)))
    for context in (1, 2, 4):
        case = Case("7B", 16, 131072, sharding=Sharding(context=context), sequences=1)
        rows.append(memory_row(f"7B, 128k tokens, context={context}", case))
    for divided in ({"expert": 8}, {"tensor": 4}, {"tensor": 2, "expert": 4}):
        case = Case("30B of 128 experts", 16, sharding=Sharding(**divided))
        rows.append(memory_row(f"{case.model}, " + ", ".join(f"{name}={n}" for name, n in divided.items()), case))
    print(table(("GiB on a rank", "ranks", "estimate", "tracked", "tracked while loading", "ratio"), rows))


def memory_row(name: str, case: Case) -> tuple[str, ...]:
    """Return the cells of a case."""
    guess, counted = estimated(case, config_of(case.model)), full_depth(case)
    sizes = (guess, counted.step, counted.loading)
    row = (name, str(case.ranks), *(f"{size / 2**30:.1f}" for size in sizes), f"{guess / counted.step:.2f}")
    print(*row, file=sys.stderr, flush=True)
    return row


def launches() -> None:
    """Print launches and synchronizations."""
    costs = measure()
    rows = [
        (name, f"{cost.per_layer:.1f}", f"{cost.rest:.1f}", f"{cost.two.waits:g}", f"{milliseconds(cost):.1f}")
        for name, cost in costs.items()
    ]
    print(table(("what", "launches per layer", "other launches", "host waits", "ms of launches, 24 layers"), rows))
    for name, cost in costs.items():
        for (reason, line), times in cost.two.synchronizations.most_common():
            print(f"{name}: {times:g} x {reason} at {line}")
    print(json.dumps({name: as_json(cost) for name, cost in costs.items()}))


def milliseconds(cost: LayerCost) -> float:
    """Return the time of the launches of a model of 24 layers on the host."""
    return MICROSECONDS * (24 * cost.per_layer + cost.rest) / 1000


def as_json(cost: LayerCost) -> dict[str, float]:
    """Return the numbers of a cost."""
    return {"per_layer": cost.per_layer, "rest": cost.rest, "host_waits": cost.two.waits}


if __name__ == "__main__":
    sys.exit(main())
