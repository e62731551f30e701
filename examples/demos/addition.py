"""Demo of the README: SFT, then GRPO with a verifiable reward, with the same configs as the CLI.

python -m examples.demos.addition [seed=0] [shuffle=true] [output_dir=runs/demo]
                                  [overrides of the GRPO run] [sft.KEY=VALUE: overrides of the SFT run]
"""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.demos.launch import Demo, keep_record, launch, median, remove_earlier
from realign.api import Panel
from realign.config import ConfigError, build_experiment, compose
from realign.demo.arithmetic import prepare
from realign.demo.tiny import Task
from realign.records.metrics.curves import draw_curves
from realign.runtime import Experiment, RunResult, run

NAME = "demo"
SFT = "sft"
TASK = "task"
PANELS = (
    Panel("reward per response", {"reward": "training batch (sampled)"}),
    Panel("negative log-likelihood (nats per token)", {"nll": "training batch"}),
    Panel("entropy (nats per token)", {"entropy": "training batch"}),
    Panel("KL (nats)", {"ref_kl_per_sequence": "to reference, per sequence", "approx_kl": "to sampler, per token"}),
    Panel("response length (tokens)", {"response_tokens": "training batch"}),
    Panel("clip fraction", {"clip_fraction": "policy ratio"}),
    Panel("gradient norm", {"grad_norm": "before clipping"}),
)
LEFT = {TASK, SFT, "grpo", "curves.png"}
Results = tuple[RunResult, RunResult, float]


def main(arguments: list[str]) -> int:
    """Run the demo; see `launch`."""
    return launch(
        arguments, name=NAME, subject="two-digit addition", runs=(SFT,), train=train, show=show, usage=__doc__ or ""
    )


def show(demo: Demo, console: Console, results: Results) -> dict[str, Any]:
    """Print the table and some responses, plot the curves, and return the results as a JSON object."""
    sft, grpo, seconds = results
    title = "Two-digit addition: SFT, then GRPO" + (" with shuffled rewards (control)" if demo.shuffle else "")
    phases = {"SFT": sft.history, "GRPO": grpo.history}
    picture = draw_curves(phases, demo.output_dir / "curves.png", title=title, panels=PANELS)
    summary = summarize(demo, sft, grpo, seconds)
    console.print(report(summary, sft, grpo))
    console.print("held-out answers:")
    for sample in _three_samples(grpo.samples):
        shown, reward = sample["prompt"] + sample["response"], sample["reward"]
        reward = "none" if reward is None else f"{reward:g}"
        console.print(f"  {shown:<12} reward {reward}", markup=False, highlight=False)
    console.print(f"learning curves: {picture}", highlight=False)
    return summary | {"curves": str(picture)}


def train(demo: Demo, console: Console) -> Results:
    """Prepare the task, and execute the two runs.

    Returns:
        The results of SFT and GRPO, and the duration of the two runs in seconds.

    Raises:
        ConfigError: an override is invalid, or the output folder contains other files. No file was changed.
    """
    sft, grpo = experiments(demo)
    remove_earlier(demo.output_dir, LEFT)
    prepare(demo.output_dir / TASK, seed=demo.seed)
    keep_record(demo.output_dir, TASK)
    started = time.perf_counter()
    results = run(sft, console=console), run(grpo, console=console)
    return *results, time.perf_counter() - started


def experiments(demo: Demo) -> tuple[Experiment, Experiment]:
    """Build and validate the two runs, without reading or writing files."""
    task = Task.of(demo.output_dir / TASK)
    held_out = f"evaluation.data.path={task.held_out}"
    sft = [
        "experiment=sft_arithmetic",
        f"seed={demo.seed}",
        f"output_dir={demo.output_dir / SFT}",
        f"models.actor.path={task.model}",
        f"data.path={task.demonstrations}",
        held_out,
        *demo.overrides[SFT],
    ]
    grpo = [
        "experiment=grpo_arithmetic",
        f"seed={demo.seed}",
        f"output_dir={demo.output_dir / 'grpo'}",
        f"models.actor.path={demo.output_dir / SFT / 'final' / 'actor'}",
        f"data.path={task.prompts}",
        held_out,
        f"interfaces.reward.shuffle={str(demo.shuffle).lower()}",
        *demo.overrides[""],
    ]
    runs = build_experiment(compose(sft)), build_experiment(compose(grpo))
    if any(run.evaluation is None for run in runs):
        raise ConfigError("evaluation=null: the demo compares held-out accuracy. Keep the evaluation.")
    return runs


def summarize(demo: Demo, sft: RunResult, grpo: RunResult, seconds: float) -> dict[str, Any]:
    """Return the results as a JSON object. "before" and "after" refer to GRPO, "untrained" to the start of SFT."""
    accuracy = grpo.series("eval/reward")
    return {
        "task": "two-digit addition",
        "seed": demo.seed,
        "shuffled_rewards": demo.shuffle,
        "accuracy_untrained": round(sft.series("eval/reward")[0], 4),
        "accuracy_before": round(accuracy[0], 4),
        "accuracy_after": round(accuracy[-1], 4),
        "reward_curve": [round(r, 4) for r in grpo.series("reward")],
        "rollout_tokens_per_s": round(median(grpo.series("rollout_tokens_per_s"))),
        "train_tokens_per_s": round(median(grpo.series("train_tokens_per_s"))),
        "seconds": round(seconds, 1),
    }


def report(summary: dict[str, Any], sft: RunResult, grpo: RunResult) -> Table:
    """Return the summary table."""
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
        table.add_row(label, *(f"{median(v):,.0f}" if v else "" for v in values))
    return table


def _three_samples(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return three scored responses, including a failed one if there is one."""
    failed = [s for s in samples if not s["reward"]]
    passed = [s for s in samples if s["reward"]]
    return (passed[: 3 - len(failed[:1])] + failed)[:3]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
