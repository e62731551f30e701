"""Calibrate costs with the metrics of finished runs.

The runs are synchronous and use one process. Each step gives one equation for sampling and one for training. Least
squares determines the costs. Costs that the steps do not determine keep the ratio of the analytic costs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml

from realign.errors import ConfigError, DataError
from realign_planner.internals import load_yaml
from realign_planner.options import PlanOptions
from realign_planner.placements import PlannedGroup, PlannedPlacement
from realign_planner.predict import Cluster, Scale, sampling_costs, training_costs
from realign_planner.simulator import Tail
from realign_planner.workload import Workload

PRIOR = 0.01
"""Weight of the analytic ratio, relative to the equations of all steps."""


@dataclass(frozen=True)
class MeasuredStep:
    """Measurements of one step."""

    sequences: float
    response_tokens: float
    """Mean tokens of a response."""
    prompt_tokens: float
    """Mean tokens of a prompt."""
    generate_s: float
    reward_s: float
    train_s: float
    """Seconds of all other calls, and outside of calls."""


def read_runs(folders: Sequence[str], load: Workload) -> list[MeasuredStep]:
    """Read the steps of runs. The first step of a run is a warm-up and is skipped if there are others.

    Raises:
        ConfigError: a folder is not a run, or the run used asynchronous rollout or workers.
        DataError: a file cannot be read, or lacks a metric.
    """
    steps_of_runs: list[MeasuredStep] = []
    for folder in folders:
        path = Path(folder).expanduser()
        if not (path / "metrics.jsonl").is_file():
            raise ConfigError(f"plan.runs={folder}: the folder contains no metrics.jsonl. Set the folder of a run.")
        _check_synchronous(folder, path / "config.yaml")
        rows = _records(path / "metrics.jsonl")
        steps = [_step(row, load, path) for row in rows]
        steps_of_runs += steps[1:] or steps
    return steps_of_runs


def _records(path: Path) -> list[dict[str, float]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # the last line may be incomplete
        rows = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise DataError(f"plan.runs: {path} cannot be read ({error}).") from error
    training_rows = [row for row in rows if row.get("step")]
    if not training_rows:
        raise DataError(f"plan.runs: {path} contains no training step. Set the folder of a run that has trained.")
    return training_rows


def _check_synchronous(folder: str, path: Path) -> None:
    """Check that the calls of a run did not overlap."""
    if not path.is_file():
        return
    try:
        config = load_yaml(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise DataError(f"plan.runs: {path} cannot be read ({error}).") from error
    for node, wrong in (("rollout", "Async"), ("runtime", "Ray")):
        if str((config.get(node) or {}).get("_target_", "")).rpartition(".")[2] == wrong:
            raise ConfigError(
                f"plan.runs={folder}: the run used {node}={wrong.lower()}, so that its calls overlapped. Measure a run "
                "with rollout=sync and runtime=local."
            )


def _step(row: dict[str, float], load: Workload, path: Path) -> MeasuredStep:
    try:
        tokens, mean = row["rollout_tokens"], row["response_tokens"]
        sampled = sum(row[f"time/{name}_s"] for name in load.sampling_calls)
        rewards = sum(row[f"time/{name}_s"] for name in load.reward_calls)
        step_s = row["step_s"]
    except KeyError as error:
        raise DataError(
            f"plan.runs: step {row['step']:g} of {path} has no metric {error}. Set a run of this experiment."
        ) from None
    sequences = tokens / mean if mean else 0.0
    # `tokens` counts each epoch.
    packed = row.get("tokens", 0.0) / load.epochs
    prompt = packed / sequences - mean if sequences and packed else load.work.prompt_tokens
    return MeasuredStep(sequences, mean, max(0.0, prompt), sampled, rewards, max(0.0, step_s - sampled - rewards))


def with_measured_lengths(options: PlanOptions, steps: Sequence[MeasuredStep], load: Workload) -> PlanOptions:
    """Return the options with the lengths and reward seconds of the runs."""
    workers = load.work.reward_workers
    # Without a limit of workers all responses are scored at once, and a batch takes as long as one of them.
    response_s = [step.reward_s * (workers or 1) / max(1.0, step.sequences if workers else 1.0) for step in steps]
    return replace(
        options,
        prompt_tokens=max(1.0, statistics.fmean(step.prompt_tokens for step in steps)),
        response_tokens=max(1.0, statistics.fmean(step.response_tokens for step in steps)),
        reward_s=statistics.fmean(response_s),
    )


def calibrated(cluster: Cluster, load: Workload, steps: Sequence[MeasuredStep]) -> Cluster:
    """Return the cluster with the factors between measured and analytic costs."""
    single_device = PlannedPlacement((PlannedGroup(tuple(load.roles), 1),))
    sampling, training = sampling_costs(single_device, load, cluster), training_costs(single_device, load, cluster)
    work, group = load.work, load.work.group
    equations = []
    for step in steps:
        tail = Tail(step.response_tokens, work.lengths.sigma, work.lengths.most)
        # A batch takes as many decoding steps as its longest response has tokens. The metrics have the mean, so this is
        # drawn.
        longest = max(tail.draw(max(1, round(step.sequences)), "calibration"))
        tokens = step.sequences * step.response_tokens
        # On average, a token of a response sees the prompt and half of the response.
        context = tokens * (step.prompt_tokens + step.response_tokens / 2)
        # The prompt of a group is computed once.
        equations.append([longest, tokens, context, step.sequences / group * step.prompt_tokens])
    decode_step, row, context, prefill = _factors(
        equations,
        [step.generate_s for step in steps],
        [sampling.decode_step_s, sampling.decode_row_s, sampling.decode_context_s, sampling.prefill_token_s],
    )
    packed = [[1.0, step.sequences * (step.prompt_tokens + step.response_tokens)] for step in steps]
    train_step, token = _factors(
        packed, [step.train_s for step in steps], [training.train_step_s, training.train_token_s]
    )
    return replace(cluster, scale=Scale(decode_step, row, context, prefill, train_step, token))


def _factors(equations: Sequence[Sequence[float]], seconds: Sequence[float], analytic: Sequence[float]) -> list[float]:
    """Return the factors f with sum(equation * f * analytic) = seconds, by least squares with a prior of equal factors.

    Costs that would be negative are 0, and the others are determined again.
    """
    terms = np.array(equations) * np.array(analytic)
    measured = np.array(seconds)
    common = float(measured.sum() / max(terms.sum(), 1e-30))
    weight = 1 / max(float(measured.mean()), 1e-30)
    free = list(range(len(analytic)))
    factors = np.zeros(len(analytic))
    while free:
        # Times the root of the number of steps: their squared errors add up, and the prior must not fade with long
        # runs.
        prior = np.diag(PRIOR * np.sqrt(len(measured)) * terms[:, free].mean(0))
        left = np.vstack([terms[:, free], prior]) * weight
        right = np.concatenate([measured, common * prior.sum(1)]) * weight
        solved = np.linalg.lstsq(left, right, rcond=None)[0]
        factors[:] = 0.0
        factors[free] = solved
        if (solved >= 0).all():
            break
        free = [index for index, value in zip(free, solved, strict=True) if value > 0]
    return [float(factor) for factor in factors]
