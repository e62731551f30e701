"""`make rlhf`: SFT, a reward model from preference pairs, and PPO, evaluated by the labeler of the pairs.

python -m examples.demos.rlhf [seed=0] [shuffle=true] [output_dir=runs/rlhf]
                              [overrides of the PPO run] [sft.KEY=VALUE] [reward.KEY=VALUE: overrides of these runs]

`realign.demo.sentiment` generates the text. PPO trains on the learned reward only. A lexicon labels the pairs, and
scores the responses of PPO (gold reward). With shuffle=true, the labels of the pairs are random (negative control).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from examples.demos.launch import Demo, keep_record, launch, remove_earlier
from realign.api import Panel
from realign.config import ConfigError, build_experiment, compose
from realign.demo.sentiment import GOLD, SentimentTask, prepare
from realign.errors import DataError
from realign.records.metrics.curves import draw_curves
from realign.rewards import RewardFunction, load_function
from realign.runtime import Evaluation, Experiment, LossEvaluation, RunResult, run

Sample = dict[str, Any]


# Reward over-optimization is learned reward versus gold reward (arXiv:2210.10760). A run saves its responses as text
# (`sample_prompts`), with the learned reward of each, and the same responses are scored with the gold function. Both
# rewards are standardized by mean and standard deviation at the first step, whose responses the reference policy
# sampled. So they are comparable, and both start at 0.


def _read_responses(samples: Path, gold: RewardFunction) -> list[list[Sample]]:
    """Return the responses of a `samples.jsonl` that have both rewards, grouped by step.

    Adds the key `gold` to each response.

    Raises:
        DataError: no response has both rewards.
    """
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["gold"] = gold(row["prompt"], row["response"], row)
    both = [row for row in rows if None not in (row["reward"], row["gold"])]
    if not both:
        raise DataError(f"{samples} contains no response with both a learned and a gold reward.")
    return [list(step) for _, step in groupby(both, key=lambda row: row["step"])]


def compare(steps: Sequence[Sequence[Sample]]) -> list[dict[str, float]]:
    """Return the standardized learned and gold rewards of each step.

    Args:
        steps: Responses by step, as returned by `_read_responses`.

    Returns:
        For each step: `step`; `learned` and `gold`, the mean rewards in standard deviations from the first step;
        `gap`, learned minus gold; and `own_accuracy` (see `agreement`) if it is defined.
    """
    first = steps[0]
    compared = []
    for samples in steps:
        learned, gold = (_standard(samples, first, key) for key in ("reward", "gold"))
        record = {"step": samples[0]["step"], "learned": learned, "gold": gold, "gap": learned - gold}
        accuracy = agreement(samples)
        compared.append(record if accuracy is None else record | {"own_accuracy": accuracy})
    return compared


def agreement(samples: Sequence[Sample]) -> float | None:
    """Return the accuracy of the reward model: the fraction of response pairs that both rewards rank equally.

    Each pair consists of two responses to one prompt. Pairs with equal gold rewards are skipped. Pairs with equal
    learned rewards count as errors.

    Returns:
        The fraction; None if no pair is left.
    """
    prompts: dict[Any, list[Sample]] = {}
    for sample in samples:
        prompts.setdefault(sample["id"], []).append(sample)
    alike: list[bool] = []
    for group in prompts.values():
        learned, gold = _values(group, "reward"), _values(group, "gold")
        a, b = np.triu_indices(len(group), k=1)
        differs = gold[a] != gold[b]
        alike += (((learned[a] - learned[b]) * (gold[a] - gold[b])) > 0)[differs].tolist()
    return sum(alike) / len(alike) if alike else None


def _standard(samples: Sequence[Sample], first: Sequence[Sample], key: str) -> float:
    start = _values(first, key)
    # If all rewards of the first step are equal, only differences to them can be shown.
    deviation = float(start.std()) or 1.0
    return (float(_values(samples, key).mean()) - float(start.mean())) / deviation


def _values(samples: Sequence[Mapping[str, Any]], key: str) -> npt.NDArray[np.float64]:
    return np.array([sample[key] for sample in samples], dtype=np.float64)


NAME = "rlhf"
RUNS = ("sft", "reward")
TASK, PPO, PICTURE = "task", "ppo", "rlhf.png"
_LAST_STEPS = 10
"""Number of final PPO steps over which training metrics are averaged."""
PANELS = (
    Panel("gold score: VADER, held-out openings", {"eval/reward": "mean of sampled responses"}),
    Panel(
        "rewards of PPO's batches (deviations at step 1)",
        {"learned": "learned, which PPO maximizes", "gold": "gold"},
    ),
    Panel(
        "accuracy of the reward model",
        {
            "accuracy": "its training pairs",
            "eval/accuracy": "held-out pairs",
            "own_accuracy": "pairs of PPO's responses",
        },
    ),
    Panel("KL to the SFT model (nats per response)", {"ref_kl_per_sequence": "PPO's batches"}),
    Panel("response length (tokens)", {"response_tokens": "training batch"}),
    Panel("critic", {"critic/explained_variance": "variance of returns explained"}),
)


class _RlhfResults(NamedTuple):
    """Results of the three runs, and their total duration in seconds."""

    sft: RunResult
    reward: RunResult
    ppo: RunResult
    seconds: float


def main(arguments: list[str]) -> int:
    """Run the demo; see `launch`."""
    return launch(
        arguments, name=NAME, subject="friendlier reviews", runs=RUNS, train=train, show=show, usage=__doc__ or ""
    )


def train(demo: Demo, console: Console) -> _RlhfResults:
    """Prepare the task, and execute the three runs.

    Raises:
        ConfigError: an override is invalid, the output folder contains other files, or vaderSentiment is not installed.
            No file was changed.
    """
    planned = experiments(demo)
    # Fails before a file is removed if vaderSentiment is not installed.
    load_function(GOLD)("", "", {})
    remove_earlier(demo.output_dir, {TASK, *RUNS, PPO, PICTURE})
    prepare(demo.output_dir / TASK, seed=demo.seed, shuffle=demo.shuffle)
    keep_record(demo.output_dir, TASK)
    started = time.perf_counter()
    sft, reward, ppo = (run(experiment, console=console) for experiment in planned)
    return _RlhfResults(sft, reward, ppo, time.perf_counter() - started)


def experiments(demo: Demo) -> tuple[Experiment, ...]:
    """Build and validate the three runs, without reading or writing files.

    Raises:
        ConfigError: an override is invalid, or disables an evaluation that the demo needs.
    """
    task = SentimentTask.of(demo.output_dir / TASK)
    folders = {name: demo.output_dir / name for name in (*RUNS, PPO)}
    policy = folders["sft"] / "final" / "actor"
    parts = {
        "sft": [
            f"models.actor.path={task.model}",
            f"data.path={task.demonstrations}",
            f"evaluation.data.path={task.held_out}",
        ],
        "reward": [
            f"models.reward.path={policy}",
            f"data.path={task.pairs}",
            f"evaluation.data.path={task.held_out_pairs}",
            f"calibration.data.path={task.prompts}",
        ],
        PPO: [
            f"models.actor.path={policy}",
            f"models.reward.path={folders['reward'] / 'final' / 'reward'}",
            f"data.path={task.prompts}",
            f"evaluation.data.path={task.held_out}",
        ],
    }
    sft, reward, ppo = (
        build_experiment(
            compose(
                [
                    f"experiment={name}_sentiment",
                    f"seed={demo.seed}",
                    f"output_dir={folders[name]}",
                    *own,
                    *demo.overrides["" if name == PPO else name],
                ]
            )
        )
        for name, own in parts.items()
    )
    if not isinstance(reward.evaluation, LossEvaluation) or not isinstance(ppo.evaluation, Evaluation):
        raise ConfigError("evaluation=null: the demo needs the evaluations of the reward model and of PPO. Keep both.")
    if not ppo.sample_prompts:
        raise ConfigError("sample_prompts=0: the demo scores saved responses of PPO. Set sample_prompts to at least 1.")
    return sft, reward, ppo


def show(demo: Demo, console: Console, results: _RlhfResults) -> dict[str, Any]:
    """Print the table and some responses, plot the curves, and return the results as a JSON object."""
    steps = _read_responses(results.ppo.output_dir / "samples.jsonl", load_function(GOLD))
    compared = compare(steps)
    picture = draw(demo, results, compared)
    summary = summarize(demo, results, compared)
    console.print(report(summary))
    for title, samples in (("before PPO", steps[0]), ("after PPO", steps[-1])):
        console.print(f"{title}:")
        for line in lines(samples):
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"learning curves: {picture}", highlight=False)
    return summary | {"curves": str(picture)}


def draw(demo: Demo, results: _RlhfResults, compared: Sequence[dict[str, float]]) -> Path:
    """Plot gold score, learned and gold reward, accuracy, KL, response length and critic. Return the path."""
    by_step = {record["step"]: record for record in compared}
    ppo = [record | by_step.get(record["step"], {}) for record in results.ppo.history]
    title = "Friendlier reviews: SFT, reward model, PPO" + (" with randomly permuted labels (control)" * demo.shuffle)
    phases = {"SFT": results.sft.history, "reward model": results.reward.history, "PPO": ppo}
    return draw_curves(phases, demo.output_dir / PICTURE, title=title, panels=PANELS)


def summarize(demo: Demo, results: _RlhfResults, compared: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the results as a JSON object.

    "before" and "after" refer to PPO. Rewards are in standard deviations (`compare`).
    """
    gold = results.ppo.series("eval/reward")
    numbers = {
        "reward_model_accuracy": results.reward.series("eval/accuracy")[-1],
        "gold_before": gold[0],
        "gold_after": gold[-1],
        **{f"{key}_reward": _last([record[key] for record in compared]) for key in ("learned", "gold")},
        "reward_gap": _last([record["gap"] for record in compared]),
        "kl": _last(results.ppo.series("ref_kl_per_sequence")),
    }
    for metric in ("entropy", "response_tokens"):
        values = results.ppo.series(metric)
        numbers |= {f"{metric}_before": values[0], f"{metric}_after": _last(values)}
    own = [record["own_accuracy"] for record in compared if "own_accuracy" in record]
    if own:
        numbers |= {"own_accuracy_before": own[0], "own_accuracy_after": _last(own)}
    return {
        "task": "friendlier reviews",
        "seed": demo.seed,
        "shuffled_labels": demo.shuffle,
        **{name: round(value, 4) for name, value in numbers.items()},
        "seconds": round(results.seconds, 1),
    }


def report(summary: dict[str, Any]) -> Table:
    """Return the summary table."""
    table = Table(title=f"{summary['task']}, seed {summary['seed']}")
    for column in ("", "before PPO", "after PPO"):
        table.add_column(column, justify="left" if not column else "right")
    learned, gold, gap = (f"{summary[key]:+.2f}" for key in ("learned_reward", "gold_reward", "reward_gap"))
    rows = [
        ("gold score (VADER, -1 to 1), held-out openings", *(f"{summary[f'gold_{at}']:+.3f}" for at in _TIMES)),
        ("learned reward, in deviations", "0", learned),
        ("gold reward of the same responses, in deviations", "0", gold),
        ("gap: learned - gold", "0", gap),
        ("accuracy of the reward model, held-out pairs", f"{summary['reward_model_accuracy']:.1%}", ""),
    ]
    if "own_accuracy_after" in summary:
        rows.append(
            ("... on pairs of the policy's responses", *(f"{summary[f'own_accuracy_{at}']:.1%}" for at in _TIMES))
        )
    rows += [
        ("KL to the SFT model (nats per response)", "0", f"{summary['kl']:.1f}"),
        ("response length (tokens)", *(f"{summary[f'response_tokens_{at}']:.1f}" for at in _TIMES)),
        ("entropy (nats per token)", *(f"{summary[f'entropy_{at}']:.2f}" for at in _TIMES)),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def lines(samples: Sequence[Sample], count: int = 3) -> list[str]:
    """Return the first response to each of `count` prompts, with its rewards."""
    firsts = {sample["id"]: sample for sample in reversed(samples)}
    return [
        f"{s['prompt']} {s['response']}  (learned {s['reward']:+.2f}, gold {s['gold']:+.2f})"
        for s in list(reversed(firsts.values()))[:count]
    ]


_TIMES = ("before", "after")


def _last(values: Sequence[float]) -> float:
    last = values[-_LAST_STEPS:]
    return sum(last) / len(last)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
