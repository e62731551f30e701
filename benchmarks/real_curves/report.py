"""The table and the picture of the study, from its records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.real_curves.runs import RUNS, Record
from benchmarks.real_curves.tasks import HELD_OUT, TASKS

TITLES: Mapping[str, str] = {
    "grpo": "GRPO",
    "rloo": "RLOO",
    "ppo": "PPO",
    "grpo_control": "control: rewards shuffled",
    "sft_grpo": "SFT, then GRPO",
    "sft_grpo_control": "control after SFT: rewards shuffled",
}
"""Title of a group of runs, without its task."""
CONSTANT = "best constant answer"
COMPARED: Sequence[tuple[str, str]] = (
    ("sums_grpo", "sums_grpo_control"),
    ("sums_grpo", CONSTANT),
    ("sums_rloo", "sums_grpo_control"),
    ("sums_ppo", "sums_grpo_control"),
    ("sums_rloo", "sums_grpo"),
    ("sums_ppo", "sums_grpo"),
    ("syllogisms_grpo", "syllogisms_grpo_control"),
    ("syllogisms_grpo", CONSTANT),
    ("reversal_sft_grpo", "reversal_sft_grpo_control"),
    ("reversal_sft_grpo", "reversal_grpo"),
)
"""Groups, and the groups or constant answers to which the page compares them after the last step."""
WINDOW = 5
"""Steps over which the picture averages training rewards."""


class Share(NamedTuple):
    """A share of right answers and its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.1%} ± {self.error:.1%}"

    def minus(self, other: Share) -> Share:
        """Return the difference of two independent shares."""
        return Share(self.mean - other.mean, math.hypot(self.error, other.error))


def share(values: Sequence[float], questions: int = HELD_OUT) -> Share:
    """Return the mean over runs, and the larger of two standard errors: between runs, and of the questions asked.

    Two or three runs say little about their spread, and all of them answer the same questions.

    Args:
        values: Share of right answers of each run.
        questions: Number of questions behind each share.
    """
    mean = statistics.fmean(values)
    between = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Share(mean, max(between, math.sqrt(mean * (1 - mean) / questions)))


def groups(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records of runs by group, in the order of the study."""
    by_run = {record["run"]: record for record in records if "run" in record}
    members: dict[str, list[Record]] = {}
    for name, run in RUNS.items():
        if name in by_run and by_run[name]["held_out"]:
            members.setdefault(run.group, []).append(by_run[name])
    return members


def constants(records: Sequence[Record]) -> dict[str, Record]:
    """Return the best constant answer of each task."""
    return {record["task"]: record for record in records if "constant" in record}


def held_out(records: Sequence[Record], which: int) -> Share:
    """Return the share of right held-out answers of a group at its first (0) or last (-1) evaluation."""
    return share([list(record["held_out"].values())[which] for record in records])


def table(records: Sequence[Record]) -> str:
    """Return the tables of the page in Markdown: shares before and after, and differences of groups."""
    grouped, constant = groups(records), constants(records)
    lines = ["| task | runs | seeds | before | after |", "|---|---|---|---|---|"]
    for name, members in grouped.items():
        task, kind = name.split("_", 1)
        lines.append(f"| {task} | {TITLES[kind]} | {len(members)} | {held_out(members, 0)} | {held_out(members, -1)} |")
    best = (f"{task} {record['constant']!r} {record['share']:.1%}" for task, record in constant.items())
    lines += ["", f"Best constant answers: {'; '.join(best)}."]
    lines += ["", "| difference after training | points | survives |", "|---|---|---|"]
    for first, second in COMPARED:
        task, kind = first.split("_", 1)
        if second == CONSTANT and task in constant:
            other, name = share([constant[task]["share"]]), CONSTANT
        elif second in grouped:
            other, name = held_out(grouped[second], -1), TITLES[second.split("_", 1)[1]].partition(":")[0]
        else:
            continue
        if first in grouped:
            gap = held_out(grouped[first], -1).minus(other)
            verdict = "yes" if abs(gap.mean) > 2 * gap.error else "no"
            points = f"{100 * gap.mean:+.1f} ± {100 * gap.error:.1f}"
            lines.append(f"| {task}: {TITLES[kind]} minus {name} | {points} | {verdict} |")
    missing = [name for name in RUNS if name not in {record.get("run") for record in records}]
    lines += ["", f"{len(RUNS) - len(missing)} of {len(RUNS)} runs are in this table."]
    if missing:
        lines.append(f"Not run yet: {', '.join(f'`{name}`' for name in missing)}.")
    return "\n".join(lines)


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw a panel per task: training rewards as lines, held-out answers as points with standard errors."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from realign.records.metrics.curves import FURTHER, GRAY, HELD_OUT, SETTINGS, TRAINING

    grouped, constant = groups(records), constants(records)
    colors = dict(zip(TITLES, (TRAINING, HELD_OUT, FURTHER[0], GRAY, FURTHER[1], GRAY), strict=True))
    with mpl.rc_context({**SETTINGS, "legend.fontsize": 9}):
        shown = [task for task in TASKS if any(name.split("_", 1)[0] == task for name in grouped)]
        figure = Figure(figsize=(6.4, 3.3 * len(shown)), layout="constrained")
        for ax, task in zip(figure.subplots(len(shown), squeeze=False)[:, 0], shown, strict=True):
            for name, members in grouped.items():
                if name.split("_", 1)[0] == task:
                    kind = name.split("_", 1)[1]
                    _curve(ax, members, TITLES[kind], colors[kind], "--" if kind.endswith("control") else "-")
            if task in constant:
                ax.axhline(constant[task]["share"], color="#111827", linestyle=":", linewidth=1.2, label=CONSTANT)
            ax.set_title(TASKS[task].title)
            ax.set_ylabel("share of right answers")
            ax.set_yticks([tick for tick in ax.get_yticks() if 0 <= tick <= 1])
            ax.set_ylim(0, 1.45 * ax.get_ylim()[1])  # room for the legend
            ax.legend(loc="upper left", ncols=2)
            ax.set_xlabel("step")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _curve(ax: Any, members: Sequence[Record], title: str, color: str, style: str) -> None:
    rewards = np.array([record["reward"] for record in members])
    kernel = np.ones(WINDOW) / WINDOW
    smooth = np.stack([np.convolve(row, kernel, mode="valid") for row in rewards])
    steps = np.arange(WINDOW // 2 + 1, WINDOW // 2 + 1 + smooth.shape[1])
    label = f"{title} ({len(members)})"
    ax.plot(steps, smooth.mean(0), color=color, linestyle=style, linewidth=1.6, label=label)
    if len(members) > 1:
        error = smooth.std(0, ddof=1) / math.sqrt(len(members))
        ax.fill_between(steps, smooth.mean(0) - error, smooth.mean(0) + error, color=color, alpha=0.15, linewidth=0)
    at = [int(step) for step in members[0]["held_out"]]
    shares = [share([list(record["held_out"].values())[i] for record in members]) for i in range(len(at))]
    ax.errorbar(at, [x.mean for x in shares], [x.error for x in shares], color=color, fmt="o", markersize=4, capsize=2)
