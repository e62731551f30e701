"""`make llm`: GRPO of a real language model (SmolLM2-135M-Instruct) on sums, with a verifier of reasoning-gym.

python -m examples.demos.llm [seed=0] [shuffle=true] [model=FOLDER_OR_HUB_NAME] [output_dir=runs/llm]
                             [overrides of the run]

The model answers in sentences, and the verifier scores the last number. With shuffle=true, the rewards are randomly
permuted (negative control).
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.demos.launch import Demo, keep_record, launch, median, remove_earlier
from realign.api import Panel
from realign.config import ConfigError, build_experiment, compose
from realign.demo import reasoning
from realign.demo.smollm2 import smollm2
from realign.records.metrics.curves import draw_curves
from realign.runtime import Evaluation, Experiment, RunResult, run
from realign.text import visible

NAME = "llm"
TASK, RUN, PICTURE = "task", "grpo", "curves.png"
SHOWN = 6
"""Number of held-out questions whose answers are shown."""
PANELS = (
    Panel("reward: share of right answers", {"reward": "training batch, sampled", "eval/reward": "held out, sampled"}),
    Panel("response length (tokens)", {"response_tokens": "training batch", "eval/response_tokens": "held out"}),
    Panel("entropy (nats per token)", {"entropy": "training batch"}),
    Panel(
        "truncated responses (share)", {"truncated_fraction": "training batch", "eval/truncated_fraction": "held out"}
    ),
    Panel("gradient norm", {"grad_norm": "before clipping"}),
)


class _LlmResults(NamedTuple):
    """Result of the run, and its duration in seconds."""

    grpo: RunResult
    seconds: float


def main(arguments: list[str]) -> int:
    """Run the demo; see `launch`."""
    model = [argument.removeprefix("model=") for argument in arguments if argument.startswith("model=")]
    rest = [argument for argument in arguments if not argument.startswith("model=")]
    return launch(
        rest,
        name=NAME,
        subject="sums by a real language model",
        runs=(),
        train=partial(train, model=(model or [""])[-1]),
        show=show,
        usage=__doc__ or "",
    )


def train(demo: Demo, console: Console, *, model: str) -> _LlmResults:
    """Prepare model and task, and execute the run.

    Args:
        demo: Settings of the demo.
        console: Console of the run.
        model: Folder or hub name of the model; empty for SmolLM2-135M-Instruct, which is converted on first use.

    Raises:
        ConfigError: an override is invalid, the output folder contains other files, or a package is not installed.
    """
    if not model:
        with console.status("reading SmolLM2-135M-Instruct; the first time takes about a minute"):
            model = str(smollm2())
    planned = experiment(demo, model)
    remove_earlier(demo.output_dir, {TASK, RUN, PICTURE})
    reasoning.prepare(demo.output_dir / TASK, seed=demo.seed)
    keep_record(demo.output_dir, TASK)
    started = time.perf_counter()
    return _LlmResults(run(planned, console=console), time.perf_counter() - started)


def experiment(demo: Demo, model: str) -> Experiment:
    """Build and validate the run, without reading or writing files.

    Raises:
        ConfigError: an override is invalid, or disables the evaluation, which the demo needs.
    """
    task = reasoning.ReasoningTask.of(demo.output_dir / TASK)
    built = build_experiment(
        compose(
            [
                "experiment=grpo_reasoning",
                f"seed={demo.seed}",
                f"output_dir={demo.output_dir / RUN}",
                f"models.actor.path={model}",
                f"data.path={task.train}",
                f"evaluation.data.path={task.held_out}",
                f"interfaces.reward.shuffle={str(demo.shuffle).lower()}",
                *demo.overrides[""],
            ]
        )
    )
    if not isinstance(built.evaluation, Evaluation):
        raise ConfigError("evaluation=null: the demo compares held-out answers. Keep the evaluation.")
    return built


def show(demo: Demo, console: Console, results: _LlmResults) -> dict[str, Any]:
    """Print the table and the answers before and after, plot the curves, and return the JSON object."""
    title = "Sums by a language model: GRPO" + (" with shuffled rewards (control)" if demo.shuffle else "")
    picture = draw_curves({"GRPO": results.grpo.history}, demo.output_dir / PICTURE, title=title, panels=PANELS)
    summary = summarize(demo, results)
    console.print(report(summary))
    console.print(answers(results.grpo.output_dir / "eval_samples.jsonl"))
    console.print(f"learning curves: {picture}", highlight=False)
    return summary | {"curves": str(picture)}


def summarize(demo: Demo, results: _LlmResults) -> dict[str, Any]:
    """Return the results as a JSON object."""
    held_out, lengths = results.grpo.series("eval/reward"), results.grpo.series("response_tokens")
    return {
        "task": "sums of reasoning-gym",
        "seed": demo.seed,
        "shuffled_rewards": demo.shuffle,
        "held_out_before": round(held_out[0], 4),
        "held_out_after": round(held_out[-1], 4),
        "held_out_curve": [round(value, 4) for value in held_out],
        "reward_curve": [round(value, 4) for value in results.grpo.series("reward")],
        "response_tokens_before": round(lengths[0], 1),
        "response_tokens_after": round(lengths[-1], 1),
        "step_s": round(median(results.grpo.series("step_s")), 1),
        "seconds": round(results.seconds, 1),
    }


def report(summary: dict[str, Any]) -> Table:
    """Return the summary table."""
    table = Table(title=f"{summary['task']}, seed {summary['seed']}")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("right answers to held-out questions", *(f"{summary[f'held_out_{at}']:.0%}" for at in _TIMES))
    table.add_row("tokens per response", *(f"{summary[f'response_tokens_{at}']:.1f}" for at in _TIMES))
    return table


def answers(path: Path) -> Table:
    """Return a table of held-out questions with the answers of the first and of the last evaluation."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    first, last = (
        {record["prompt"]: record for record in records if record["step"] == step}
        for step in (records[0]["step"], records[-1]["step"])
    )
    table = Table(title="held-out answers")
    for column in ("question", "before", "after"):
        table.add_column(column, overflow="fold")
    for prompt in list(first)[:SHOWN]:
        if prompt in last:
            table.add_row(_question(prompt), _answer(first[prompt]), _answer(last[prompt]))
    return table


def _question(prompt: str) -> Text:
    return Text(visible(prompt.rpartition("problem:")[2].split("=")[0].strip()))


def _answer(record: dict[str, Any]) -> Text:
    return Text(visible(record["response"].strip()), style="green" if record["reward"] else "red")


_TIMES = ("before", "after")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
