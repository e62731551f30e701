"""The main job of the README: SFT, then GRPO with a verifiable reward, through the same configs as the CLI.

python -m realign.demo [seed=0] [shuffle=true] [output_dir=runs/demo]
                       [overrides of the GRPO run] [sft.KEY=VALUE: overrides of the SFT run]
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from rich.table import Table

from realign.config import build_experiment, compose
from realign.demo.arithmetic import Task, prepare
from realign.runtime import Experiment, RunResult, run
from realign.runtime.curves import draw_curves

SFT = "sft."
TASK = "task"
LEFT = {TASK, "sft", "grpo", "curves.png"}


@dataclass(frozen=True)
class Demo:
    """What was asked for on the command line."""

    seed: int
    shuffle: bool
    output_dir: Path
    overrides: tuple[str, ...]

    @classmethod
    def parse(cls, arguments: list[str]) -> Demo:
        """Take the demo's own settings out of `key=value` arguments; the rest are overrides of the runs."""
        own = {"seed": "0", "shuffle": "false", "output_dir": ""}
        rest = []
        for argument in arguments:
            key, _, value = argument.partition("=")
            if key in own:
                own[key] = value
            else:
                rest.append(argument)
        if not own["seed"].isdigit():
            raise ValueError(f"seed must be a whole number, found {own['seed']!r}")
        if own["shuffle"] not in ("true", "false"):
            raise ValueError(f"shuffle must be true or false, found {own['shuffle']!r}")
        shuffle = own["shuffle"] == "true"
        folder = own["output_dir"] or f"runs/demo-seed{own['seed']}" + ("-shuffled" if shuffle else "")
        return cls(int(own["seed"]), shuffle, Path(folder), tuple(rest))


def main(arguments: list[str]) -> int:
    """Run the demo; the last line of stdout is one JSON object."""
    transformers.utils.logging.disable_progress_bar()  # the bars of reading and writing a tiny model only flicker
    console = Console()
    try:
        demo = Demo.parse(arguments)
        console.print(
            f"[bold]realign demo[/]: two-digit addition, seed {demo.seed}; everything goes to {demo.output_dir}"
        )
        sft, grpo, seconds = train(demo, console)
    except ValueError as error:
        print(f"realign: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("realign: interrupted", file=sys.stderr)
        return 130
    title = "Two-digit addition: SFT, then GRPO" + (" with shuffled rewards (control)" if demo.shuffle else "")
    picture = draw_curves({"SFT": sft.history, "GRPO": grpo.history}, demo.output_dir / "curves.png", title=title)
    summary = summarize(demo, sft, grpo, seconds)
    console.print(report(summary, sft, grpo))
    for sample in three_samples(grpo.samples):
        shown, reward = f"{sample['prompt']}{sample['response']}", sample["reward"]
        reward = "none" if reward is None else f"{reward:g}"
        console.print(f"  {shown:<12} reward {reward}", markup=False, highlight=False)
    console.print(f"learning curves: {picture}", highlight=False)
    print(json.dumps(summary | {"curves": str(picture)}), flush=True)
    return 0


def train(demo: Demo, console: Console) -> tuple[RunResult, RunResult, float]:
    """Prepare the task, then the two runs; seconds are those of the runs.

    Raises:
        ValueError: an override is wrong, or the output folder is not one of this demo's; nothing was touched yet.
    """
    sft, grpo = experiments(demo)
    remove_earlier(demo.output_dir)
    prepare(demo.output_dir / TASK, seed=demo.seed)
    started = time.perf_counter()
    results = run(sft, console=console), run(grpo, console=console)
    return *results, time.perf_counter() - started


def experiments(demo: Demo) -> tuple[Experiment, Experiment]:
    """The two runs, checked; nothing is read or written."""
    task = Task.of(demo.output_dir / TASK)
    held_out = f"evaluation.data.path={task.held_out}"
    sft = [
        "experiment=sft_arithmetic",
        f"seed={demo.seed}",
        f"output_dir={demo.output_dir / 'sft'}",
        f"models.actor.path={task.model}",
        f"data.path={task.demonstrations}",
        held_out,
        *(o.removeprefix(SFT) for o in demo.overrides if o.startswith(SFT)),
    ]
    grpo = [
        "experiment=grpo_arithmetic",
        f"seed={demo.seed}",
        f"output_dir={demo.output_dir / 'grpo'}",
        f"models.actor.path={demo.output_dir / 'sft' / 'final' / 'actor'}",
        f"data.path={task.prompts}",
        held_out,
        f"interfaces.reward.shuffle={str(demo.shuffle).lower()}",
        *(o for o in demo.overrides if not o.startswith(SFT)),
    ]
    runs = build_experiment(compose(sft)), build_experiment(compose(grpo))
    if any(run.evaluation is None for run in runs):
        raise ValueError("the demo compares held-out accuracy: its evaluation cannot be left out")
    return runs


def remove_earlier(folder: Path) -> None:
    """Remove what an earlier demo left in `folder`, and nothing else.

    Raises:
        ValueError: the folder holds something that no demo put there.
    """
    if not folder.is_dir():
        return
    if foreign := sorted({path.name for path in folder.iterdir()} - LEFT):
        raise ValueError(
            f"output_dir {str(folder)!r} holds {foreign[0]!r}, which is not the demo's; choose another one"
        )
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def summarize(demo: Demo, sft: RunResult, grpo: RunResult, seconds: float) -> dict[str, Any]:
    """The JSON object of the last line. "before" and "after" are GRPO's; the untrained model stands first."""
    accuracy = grpo.series("eval/reward")
    return {
        "task": "two-digit addition",
        "seed": demo.seed,
        "shuffled_rewards": demo.shuffle,
        "accuracy_untrained": round(sft.series("eval/reward")[0], 4),
        "accuracy_before": round(accuracy[0], 4),
        "accuracy_after": round(accuracy[-1], 4),
        "reward_curve": [round(r, 4) for r in grpo.series("reward")],
        "rollout_tokens_per_s": round(_median(grpo.series("rollout_tokens_per_s"))),
        "train_tokens_per_s": round(_median(grpo.series("train_tokens_per_s"))),
        "seconds": round(seconds, 1),
    }


def report(summary: dict[str, Any], sft: RunResult, grpo: RunResult) -> Table:
    """The table at the end."""
    table = Table(title=f"{summary['task']}, seed {summary['seed']}")
    for column in ("", "SFT", "GRPO"):
        table.add_column(column, justify="left" if not column else "right")
    for label, metric, place in (
        ("held-out accuracy before", "eval/reward", 0),
        ("held-out accuracy after", "eval/reward", -1),
    ):
        table.add_row(label, *(f"{result.series(metric)[place]:.1%}" for result in (sft, grpo)))
    table.add_row("steps", *(str(int(result.history[-1]["step"])) for result in (sft, grpo)))
    table.add_row("seconds in steps", *(f"{sum(result.series('step_s')):.0f}" for result in (sft, grpo)))
    for label, metric in (("rollout tokens/s", "rollout_tokens_per_s"), ("training tokens/s", "train_tokens_per_s")):
        values = [result.series(metric) for result in (sft, grpo)]
        table.add_row(label, *(f"{_median(v):,.0f}" if v else "" for v in values))
    return table


def three_samples(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Three judged responses, a failed one among them where there is one."""
    failed = [s for s in samples if not s["reward"]]
    passed = [s for s in samples if s["reward"]]
    return (passed[: 3 - len(failed[:1])] + failed)[:3]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
