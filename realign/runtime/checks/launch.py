"""Checks before loading, at launch and in `realign check`: roles, files and the output folder.

`Experiment` compares settings with each other. This module compares them with the files on disk, and roles with their
models, as far as the config describes them. Checks that need the tokenizer (row lengths) or the weights (support for
packed sequences) follow during loading, before the first rollout.
"""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Mapping
from pathlib import Path

from realign.api import ModelInterface
from realign.engines.distributed.ranks import current
from realign.errors import ConfigError
from realign.runtime.checks.images import check_images
from realign.runtime.checks.located import located
from realign.runtime.checks.roles import check_responses, check_roles
from realign.runtime.checks.rollout import check_rollout, check_whole_batches
from realign.runtime.checks.router_replay import check_replay
from realign.runtime.evaluation.base import Evaluator, in_set
from realign.runtime.evaluation.calibration import RewardCalibration
from realign.runtime.experiment import Experiment
from realign.runtime.models import check_optimizers
from realign.runtime.processes.placement import check_runtime

OF_REWARDS = ("reward", "reward_ema", "missing_rewards")


def check_ready(experiment: Experiment) -> None:
    """Find configuration errors that would otherwise stop the run later.

    Raises:
        RealignError: the message contains the key, its value and the valid values.
        OSError: `output_dir` is not writable.
    """
    check_runtime(experiment)
    check_optimizers(experiment)
    check_roles(experiment)
    check_responses(experiment)
    check_rollout(experiment)
    check_replay(experiment)
    check_images(experiment)
    _check_budget(experiment)
    _check_metrics(experiment)
    experiment.resume_folder()
    writable(experiment.output_dir)
    for role in experiment.roles:
        if role in experiment.models:
            experiment.models[role].check(role)
    experiment.data.check("data")
    calibration = {} if experiment.calibration is None else {"calibration": experiment.calibration}
    check_held_out({**experiment.all_evaluations, **calibration})


def check_held_out(owners: Mapping[str, Evaluator | RewardCalibration]) -> None:
    """Check the data nodes of evaluations and of the calibration, by config key, before anything is loaded.

    Raises:
        RealignError: the rows are streamed, or a file is missing or unusable.
    """
    for where, owner in owners.items():
        if owner.data.streams:
            raise ConfigError(f"{where}.data.streaming=true: all rows are read, in order. Set streaming=false.")
        owner.data.check(f"{where}.data")


def used_interfaces(experiment: Experiment) -> dict[str, ModelInterface]:
    """Return the interfaces that the run uses, by config key: those of the graph, and those of the evaluations."""
    used = {f"interfaces.{rpc.model}": experiment.interfaces[rpc.model] for rpc in experiment.graph.rpcs}
    for where, evaluation in experiment.all_evaluations.items():
        used |= {f"{where}.{key}": judge for key, judge in evaluation.judges.items()}
    return used


def open_interfaces(experiment: Experiment) -> None:
    """Open the interfaces, which acquire resources such as a reward function.

    With several ranks, only rank 0 opens interfaces without a model, because only rank 0 calls them.

    Raises:
        RealignError: an interface cannot be opened. The message contains the config key.
    """
    ranks = current()
    for where, interface in used_interfaces(experiment).items():
        with located(where):
            if interface.needs_engine:
                interface.open()
            else:
                ranks.lead(interface.open)
    check_whole_batches(experiment)


def writable(output_dir: Path) -> Path:
    """Return the nearest existing folder of `output_dir`.

    Raises:
        OSError: files cannot be created there; the message contains `output_dir`.
    """
    folder = next(path for path in (output_dir.absolute(), *output_dir.absolute().parents) if path.exists())
    choose = "Choose another output_dir."
    if not folder.is_dir():
        raise NotADirectoryError(f"output_dir={str(output_dir)!r}: {str(folder)!r} is not a folder. {choose}")
    try:
        with tempfile.TemporaryFile(dir=folder):  # a unique name, since several runs may check at once
            pass
    except OSError as error:
        why = f"output_dir={str(output_dir)!r}: cannot write to {str(folder)!r} ({error.strerror}). {choose}"
        raise type(error)(why) from error
    return folder


def _check_budget(experiment: Experiment) -> None:
    limit, response = experiment.microbatch.max_tokens_per_microbatch, experiment.longest_response
    setting = experiment.length_setting
    if limit is not None and (limit < response if experiment.response_counts_prompt else limit <= response):
        raise ConfigError(
            f"microbatch.max_tokens_per_microbatch={limit}: this budget is too small for a prompt and its response of "
            f"up to {response} tokens ({setting}). Set it above {response}, or lower {setting}."
        )


def _check_metrics(experiment: Experiment) -> None:
    """Check `save_best` and the metrics that callbacks read."""
    if experiment.save_best is not None:
        _check_metric(
            experiment, f"save_best={experiment.save_best}", experiment.save_best.removeprefix("-"), "-loss (lowest)"
        )
    for name, callback in experiment.callbacks.items():
        for metric in callback.reads():
            if metric.startswith("eval/") and not experiment.all_evaluations:
                raise ConfigError(
                    f"callbacks.{name}: the run has no evaluation that measures {metric}. Configure an evaluation, or "
                    "choose another metric."
                )
            _check_metric(experiment, f"callbacks.{name}", metric, "loss")


def _check_metric(experiment: Experiment, where: str, metric: str, instead: str) -> None:
    """Reject a metric that the run cannot report, as far as this is known before the first step."""
    if metric in OF_REWARDS and "rewards" not in experiment.graph.producers:
        raise ConfigError(
            f"{where}: no RPC of the graph writes rewards, so the run has no such metric. Choose another metric, such "
            f"as {instead}."
        )
    known: set[str] = set()
    for key, evaluation in experiment.all_evaluations.items():
        names = evaluation.metric_names(experiment.graph)
        if names is None:
            return
        known |= {*in_set(key.partition(".")[2], names).values()}
    if known and metric.startswith("eval/") and metric not in known:
        near = difflib.get_close_matches(metric, sorted(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{where}: the evaluation does not measure {metric!r}{hint} (valid: {', '.join(sorted(known))})"
        )
