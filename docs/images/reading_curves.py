"""Train five runs of the demo's task, one healthy and four sick, and draw `reading_curves.png` from them.

python docs/images/reading_curves.py [FOLDER]     # about 15 minutes of processor time; repeats only what is missing
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from realign.records.metrics.curves import HELD_OUT, SETTINGS, TRAINING

HERE = Path(__file__).parent
STEPS = 60
COMMON = ("experiment=grpo_arithmetic", f"steps={STEPS}", "evaluation.every_steps=10", "overwrite=true")
# The policy is rewarded for long answers, whatever they say; held-out answers are still scored by their value.
LOOPHOLE = "def score(prompt, response, row):\n    return min(len(response.strip()), 5) / 5\n"
RUNS: Mapping[str, Sequence[str]] = {
    "healthy": (),
    "learning rate too high": ("models.actor.optimizer.lr=6e-3",),
    "learning rate too low": ("models.actor.optimizer.lr=1e-6",),
    "no signal: it never succeeds": ("models.actor.path=runs/arithmetic/model",),
    "a reward with a loophole": ("interfaces.reward.function=loophole.py:score",),
}
COLUMNS: Mapping[str, Sequence[str]] = {
    "reward": ("reward", "eval/reward"),
    "entropy (nats per token)": ("entropy",),
    "response length (tokens)": ("response_tokens",),
    "groups with equal rewards": ("zero_std_fraction",),
}

FRACTIONS = ("reward", "groups with equal rewards")
"""Columns from 0 to 1."""


def train(folder: Path) -> None:
    """Run what `folder` lacks."""
    realign = [sys.executable, "-m", "realign"]

    def call(*words: str) -> None:
        subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=os.environ)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "loophole.py").write_text(LOOPHOLE, encoding="utf-8")
    if not (folder / "runs" / "arithmetic").exists():
        call(sys.executable, "-m", "realign.demo.arithmetic", "runs/arithmetic")
    if not (folder / "runs" / "sft_arithmetic" / "final").exists():
        call(*realign, "experiment=sft_arithmetic", "evaluation=null", "overwrite=true")
    for name, overrides in RUNS.items():
        out = Path("runs") / name.replace(" ", "_").replace(":", "")
        if len(history(folder / out)) <= STEPS:
            call(*realign, *COMMON, f"output_dir={out}", *overrides)


def history(run: Path) -> list[dict[str, float]]:
    """Return the metrics of each step of a run; empty if there is none."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def draw(folder: Path) -> None:
    """Draw a row for each run."""
    import matplotlib.pyplot as plt

    plt.rcParams.update(SETTINGS)
    figure, axes = plt.subplots(len(RUNS), len(COLUMNS), figsize=(11, 9.5), sharex=True)
    for row, name in enumerate(RUNS):
        steps = history(folder / "runs" / name.replace(" ", "_").replace(":", ""))
        for column, (title, metrics) in enumerate(COLUMNS.items()):
            panel = axes[row][column]
            for metric, color in zip(metrics, (TRAINING, HELD_OUT), strict=False):
                points = [(step["step"], step[metric]) for step in steps if metric in step]
                label = "held out" if metric.startswith("eval/") else "training"
                panel.plot(*zip(*points, strict=True), color=color, label=label)
            if title in FRACTIONS:
                panel.set_ylim(-0.05, 1.05)
            if row == 0:
                panel.set_title(title)
        axes[row][0].set_ylabel(name.replace(": ", ":\n").replace("rate too", "rate\ntoo").replace("with a", "with\na"))
    axes[0][0].legend(loc="lower right")
    for panel in axes[-1]:
        panel.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(HERE / "reading_curves.png")


if __name__ == "__main__":
    runs = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/reading_curves").absolute()
    train(runs)
    draw(runs)
