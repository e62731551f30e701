"""Check the roles of a graph against their models and against each other, as far as the config describes them."""

from __future__ import annotations

import warnings
from collections.abc import Collection

from realign.api import RPC, ModelSpec, Plan, Weights
from realign.api.sample import TOKENS
from realign.engines.shared_model import Share, SharedModel
from realign.engines.training.optimizer import ScheduleUnit
from realign.errors import ConfigError
from realign.runtime.experiment import Experiment
from realign.runtime.models import check_outputs


def check_roles(experiment: Experiment) -> None:
    """Check the head, the weights and the learning rate of each role's model.

    Raises:
        ConfigError: the message contains the role and the setting.
    """
    for rpc in experiment.graph.rpcs:
        _check_model(rpc, experiment)
        _check_sharing(rpc, experiment)
        _check_schedule(rpc, experiment)


def _check_model(rpc: RPC, experiment: Experiment) -> None:
    """Check that the head in the config produces the outputs that the interface needs."""
    spec = experiment.models.get(rpc.model)
    if spec is None:
        return
    owner, key = spec, rpc.model
    if isinstance(spec, SharedModel):
        if spec.of not in experiment.roles:
            raise ConfigError(
                f"models.{rpc.model}.of={spec.of}: the graph does not use this role. Choose one of: "
                f"{', '.join(experiment.roles)}."
            )
        owner, key = experiment.models[spec.of], spec.of
        if spec.branch is Share.reference:
            _check_branch(rpc.model, spec.of, owner)
    outputs = spec.facts().outputs or owner.facts().outputs
    if outputs is not None:
        check_outputs(rpc.model, outputs, experiment.interfaces[rpc.model], key)


def _check_branch(role: str, of: str, owner: ModelSpec) -> None:
    """Check that a reference branch inside a model has weights that are not trained."""
    facts = owner.facts()
    if facts.trainable and facts.branches is False:
        raise ConfigError(
            f"models.{role}.branch=reference: models.{of} trains all of its weights, so it keeps no frozen branch. Set "
            f"models.{of}.trains=top_layers or lora, or models.{role}.path. An adapter that models.{of}.path contains "
            "must be merged (adapter=merge)."
        )


def _check_sharing(rpc: RPC, experiment: Experiment) -> None:
    """Check a role's weights against the requirements of its interface and of the roles that train on its outputs."""
    trained = {other.model for other in experiment.graph.rpcs if other.method == "train_step"}
    spec, plan = experiment.models.get(rpc.model), experiment.interfaces[rpc.model].plan()
    if isinstance(spec, SharedModel):
        if plan.weights is Weights.frozen and spec.branch is Share.whole and spec.of in trained:
            raise ConfigError(
                f"models.{rpc.model}.branch=whole: {rpc.model} needs frozen weights, but would change with "
                f"models.{spec.of}, which is trained. Set models.{rpc.model}.branch=reference, or "
                f"models.{rpc.model}.path."
            )
        return
    path = None if spec is None else spec.facts().path
    if path is None or rpc.model in trained or rpc.model in experiment.graph.sync:
        return
    where = f"models.{rpc.model}.path={path!r}"
    share = f"Share its weights: ~models.{rpc.model} '+models.{rpc.model}={{_target_: realign.engines.SharedModel, of: "
    sampler = next((r.model for r in experiment.graph.rpcs if r.method == "generate" and r.model in trained), None)
    reader = _trained_reader(rpc, "logprobs", trained, experiment) if rpc.method == "generate" else None
    learner = reader or (sampler if plan.weights is Weights.live else None)
    if learner is not None:
        raise ConfigError(
            f"{where}: {rpc.model} must sample with the weights of models.{learner}, which is trained, but this copy "
            f"is never updated. {share}{learner}}}'. Or copy them after each step: sync.{rpc.model}.of={learner}."
        )
    learner = _trained_reader(rpc, "values", trained, experiment)
    if learner is not None and "values" in experiment.interfaces[learner].outputs():
        raise ConfigError(
            f"{where}: this model is not trained, but the loss of models.{learner} trains the values of the "
            f"value_head of models.{learner}. {share}{learner}}}'."
        )


def _trained_reader(rpc: RPC, key: str, trained: Collection[str], experiment: Experiment) -> str | None:
    """Return the trained role that reads a key which `rpc` writes; None if there is none."""
    if key not in rpc.outputs:
        return None
    return next((r.model for r in experiment.graph.rpcs if r.model in trained and key in r.inputs), None)


def check_responses(experiment: Experiment) -> None:
    """Check that a role generates the responses that the roles trained on them expect."""
    for rpc in experiment.graph.rpcs:
        if rpc.method != "generate":
            continue
        made = experiment.interfaces[rpc.model].plan()
        tokens = {key for key in rpc.outputs if key == rpc.rename.get(TOKENS, TOKENS)}
        for learner in experiment.graph.rpcs:
            if learner.method != "train_step" or learner.model == rpc.model or not tokens & set(learner.inputs):
                continue
            _check_plans(rpc.model, made, learner.model, experiment.interfaces[learner.model].plan())


def _check_plans(sampler: str, made: Plan, learner: str, expected: Plan) -> None:
    n, want = made.responses_per_prompt, expected.responses_per_prompt
    if n is not None and want is not None and n != want:
        raise ConfigError(
            f"interfaces.{sampler}.generation.n={n}: it differs from interfaces.{learner}.generation.n={want}. Set "
            f"both to one number, such as by interfaces.{sampler}.generation=${{interfaces.{learner}.generation}}."
        )
    limit = expected.expected_response
    if limit is not None and limit < made.longest_response:
        raise ConfigError(
            f"interfaces.{learner}: its settings are relative to responses of {limit} tokens "
            f"(interfaces.{learner}.{expected.length_setting}), but {sampler} generates up to {made.longest_response} "
            f"(interfaces.{sampler}.{made.length_setting}). Set interfaces.{learner}.{expected.length_setting}="
            f"{made.longest_response}."
        )


def _check_schedule(rpc: RPC, experiment: Experiment) -> None:
    """Warn about a learning rate that reaches 0 before the run ends; later steps would not change the weights."""
    spec = experiment.models.get(rpc.model)
    facts = None if spec is None else spec.facts()
    if rpc.method != "train_step" or facts is None or facts.rate_ends is None:
        return
    plan = experiment.interfaces[rpc.model].plan()
    steps = experiment.steps - (plan.first_training_step - 1)
    if facts.rate_unit == ScheduleUnit.optimizer_step:
        steps *= plan.optimizer_steps
    if facts.rate_ends < steps:
        warnings.warn(
            f"models.{rpc.model}.optimizer.schedule.total={facts.rate_ends}: the run has up to {steps} "
            f"{facts.rate_unit}s, and the learning rate is 0 after the first {facts.rate_ends}. Training continues "
            f"without changing the weights. Set total={steps}, or min_ratio above 0.",
            stacklevel=2,
        )


__all__ = ["check_responses", "check_roles"]
