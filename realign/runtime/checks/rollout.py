"""Check that the graph supports asynchronous rollout, whose responses are sampled by an earlier policy."""

from __future__ import annotations

import warnings

from realign.api import RPC
from realign.engines.distributed.ranks import current
from realign.engines.shared_model import Share, SharedModel
from realign.errors import ConfigError
from realign.runtime.experiment import Experiment
from realign.runtime.rollout.background import owner_of, sampled_roles
from realign.runtime.rollout.spec import Async


def check_whole_batches(experiment: Experiment) -> None:
    """Check that roles that need whole batches get them. Call it after the interfaces are open.

    Raises:
        ConfigError: asynchronous rollout scores prompts one by one.
    """
    rollout = experiment.rollout
    if not isinstance(rollout, Async) or rollout.max_staleness == 0:
        return
    for rpc in experiment.graph.leading_to("rewards"):
        if experiment.interfaces[rpc.model].plan().whole_batch:
            raise ConfigError(
                f"interfaces.{rpc.model}: a reward function takes the whole batch, but rollout=async scores each "
                "prompt as soon as its responses are finished. Set rollout=sync, or let the function take one group "
                "(prompt, responses, row)."
            )


def check_rollout(experiment: Experiment) -> None:
    """Check that the RPCs of an asynchronous rollout can run ahead of training.

    Warns about objectives that do not correct for staleness.

    Raises:
        ConfigError: the message contains the RPC.
    """
    rollout = experiment.rollout
    if not isinstance(rollout, Async):
        return
    if current().size > 1:
        raise ConfigError("rollout=async: it does not work under torchrun. Set rollout=sync, or runtime=ray.")
    leading = experiment.graph.leading_to("rewards")
    samplers = {owner_of(experiment, rpc.model) for rpc in leading if rpc.method == "generate"}
    if not samplers:
        raise ConfigError(
            "rollout=async: none of the RPCs that lead to the key 'rewards' generates responses. Set rollout=sync."
        )
    trained = sampled_roles(experiment)
    for rpc in leading:
        spec = experiment.models.get(rpc.model)
        frozen_start = isinstance(spec, SharedModel) and spec.branch is Share.reference
        owner = owner_of(experiment, rpc.model)
        if rpc.method == "train_step" or frozen_start or (owner in trained and owner not in samplers):
            what = (
                "trains a model" if rpc.method == "train_step" else f"uses models.{rpc.model}, which changes meanwhile"
            )
            raise ConfigError(
                f"rollout=async: it runs the RPCs that lead to 'rewards' ahead of training, but RPC {rpc.name!r} "
                f"{what}. Set rollout=sync."
            )
    if rollout.max_staleness:
        for rpc in experiment.graph.rpcs:
            if rpc.method == "train_step" and rpc.model in trained:
                _warn_of_stale_ratios(rpc, experiment, rollout)


def _warn_of_stale_ratios(rpc: RPC, experiment: Experiment, rollout: Async) -> None:
    interface = experiment.interfaces[rpc.model]
    if "logprobs" not in rpc.inputs or interface.plan().corrects_staleness:
        return
    how = "clips the ratio to the policy that sampled them instead of the policy before the update"
    if "prox_logprobs" in rpc.inputs:
        how = "does not weight them by the importance ratio of the policy before the update"
    warnings.warn(
        f"rollout.max_staleness={rollout.max_staleness}: responses can be {rollout.max_staleness} versions old, but "
        f"interfaces.{rpc.model} ({type(interface).__name__}) {how}. Training continues without this correction. Set "
        f"interfaces.{rpc.model}.correction=importance_correction (docs/guides/async.md).",
        stacklevel=2,
    )


__all__ = ["check_rollout"]
