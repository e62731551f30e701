"""Learning curves of GRPO and its variants on the additions of the demo, one panel each: docs/images/grpo_kin.png.

    python -m realign.demo.arithmetic runs/arithmetic
    realign experiment=sft_arithmetic
    python benchmarks/grpo_kin.py [OVERRIDES]

All algorithms train the same model on the same prompts with the same learning rate, for 60 steps of 32 prompts with 8
responses. Algorithms with a ratio use 4 optimizer steps per batch, so that the ratio differs from 1. The others use one
optimizer step. Existing runs in runs/grpo_kin/NAME are reused. The control is GRPO on randomly permuted rewards. The
last lines are a table of held-out accuracy at the first, the middle and the last evaluation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from realign.config import build_experiment, compose
from realign.config.files import list_algorithms
from realign.runtime import run

OUT = Path("runs/grpo_kin")
COMMON = [
    "experiment=grpo_arithmetic",
    "steps=60",
    "batch_prompts=32",
    "interfaces.actor.generation.n=8",
    "models.actor.optimizer={lr: 3.0e-4, schedule: {kind: constant, warmup: 5}}",
    "interfaces.reward.workers=0",
    "evaluation.every_steps=10",
    "evaluation.batch_prompts=256",
]
ON_POLICY = {"gpg", "opo", "remax", "rloo"}
MORE = {"dapo": ["interfaces.actor.truncation.overlong_buffer=1"]}
CONTROL = "grpo_shuffled_rewards"
METRIC = "eval/reward"
BLUE, GREY = "#0072B2", "#8C8C8C"

Points = list[tuple[float, float]]


def curve(name: str, overrides: list[str], *, label: str | None = None) -> Points:
    """Return the held-out accuracy over steps of an existing run in its folder (`label` or `name`), or of a new run."""
    folder = OUT / (label or name)
    if not (folder / "final").exists():
        ratio = [] if name in ON_POLICY else ["interfaces.actor.n_minibatches=4"]
        own = [f"algorithm={name}", f"name={name}", f"output_dir={folder}", "overwrite=true", *ratio]
        run(build_experiment(compose([*COMMON, *own, *MORE.get(name, []), *overrides])))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r[METRIC]) for r in records if METRIC in r]


def draw(curves: dict[str, Points], path: Path) -> None:
    """Draw one panel per algorithm, with the curve of GRPO in the background."""
    from matplotlib.figure import Figure

    columns = 5
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(2.5 * columns, 2.1 * rows + 0.5), layout="constrained")
    figure.suptitle("Held-out accuracy (greedy) on additions over steps; dashed: GRPO", fontsize=12)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True).flatten()
    for ax in axes[len(curves) :]:
        ax.set_visible(False)
    for ax, (name, points) in zip(axes, curves.items(), strict=False):
        ax.plot(*zip(*curves["grpo"], strict=True), color=GREY, linestyle="--", linewidth=1.2)
        ax.plot(*zip(*points, strict=True), color=BLUE, marker="o", markersize=3, linewidth=1.6)
        ax.set_title(name, fontsize=9)
        ax.set_ylim(0, 1.04)
        ax.tick_params(labelsize=8, labelbottom=True)
        ax.grid(alpha=0.25)
    figure.savefig(path, dpi=110)


def main(overrides: list[str]) -> None:
    names = sorted(list_algorithms(), key=lambda name: (name != "grpo", name))
    curves = {}
    for name in names:
        curves[name] = curve(name, overrides)
    curves[CONTROL] = curve("grpo", [*overrides, "interfaces.reward.shuffle=true"], label=CONTROL)
    for name, points in curves.items():
        print(f"{name:<30} {points[0][1]:.2f} -> {points[len(points) // 2][1]:.2f} -> {points[-1][1]:.2f}")
    draw(curves, OUT / "curves.png")


if __name__ == "__main__":
    main(sys.argv[1:])
