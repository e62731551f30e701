"""The models of a run, which may share weights: load them, and save them with the state of their interfaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from realign.api import RPC, DataflowGraph, Model, ModelInterface, ModelSpec
from realign.api.engine import role_of_hidden
from realign.api.router_experts import ROUTER_EXPERTS
from realign.api.sampler import ConfiguresSampler, Sampler
from realign.api.sampling_mask import SAMPLING_MASK
from realign.engines import SharedModel
from realign.errors import ConfigError, DataError, RealignError
from realign.models.files.folders import AVERAGED, write_state
from realign.models.files.tokenizers import HasVocabulary, check_vocabulary
from realign.own_files import refuse_link
from realign.ranks import current
from realign.runtime.experiment import Experiment

_LoadOwn: TypeAlias = Callable[[Mapping[str, ModelSpec], int], dict[str, Model]]


def load_own(specs: Mapping[str, ModelSpec], seed: int) -> dict[str, Model]:
    """Load the models of these roles into this process; none of them shares a model."""
    return {role: spec.load(role, seed=seed) for role, spec in specs.items()}


def load_models(experiment: Experiment, load: _LoadOwn = load_own) -> dict[str, Model]:
    """Load the model of every role that is used; a role without one gets the tokenizer of the leading role.

    Roles that share a model are loaded after its owner. Each interface restores the state saved with its model.

    Args:
        experiment: provides the roles and model specs.
        load: loads the models of roles that do not share one, from their specs and the seed of the run.

    Raises:
        RealignError: a model cannot be loaded or shared, a trained model has no optimizer, an untrained one has an
            optimizer, or two models have different vocabularies.
    """
    seed = experiment.seed
    used = {role: spec for role, spec in experiment.models.items() if role in experiment.roles}
    check_optimizers(experiment)
    models = load({role: spec for role, spec in used.items() if not isinstance(spec, SharedModel)}, seed)
    with ExitStack() as opened:  # closes the opened samplers if anything below raises
        for role, model in models.items():
            open_sampler(used[role], model)
            if model.external_sampler is not None:
                opened.callback(model.external_sampler.close)
        models = _complete(experiment, used, models)
        opened.pop_all()
    return {role: models[role] for role in experiment.roles}


def _complete(experiment: Experiment, used: Mapping[str, ModelSpec], models: dict[str, Model]) -> dict[str, Model]:
    """Add the models that are shared and the roles without a model to the loaded models, and check all of them."""
    seed = experiment.seed
    for role, spec in used.items():
        if isinstance(spec, SharedModel):
            models[role] = spec.load(role, seed=seed, loaded=models)
    check_vocabularies(models, experiment.lead_role)
    tokenizer = models[experiment.lead_role].tokenizer
    for rpc in experiment.graph.rpcs:
        if rpc.method == "train_step" and rpc.model in models and not models[rpc.model].engine.capabilities().trainable:
            raise _untrainable(rpc, used[rpc.model])
    for role in dict.fromkeys(rpc.model for rpc in experiment.graph.rpcs if rpc.model in models):
        check_outputs(role, models[role].engine.capabilities().outputs, experiment.interfaces[role])
    _connect_heads(experiment, models)
    _check_models_replay(experiment.graph, models)
    models |= {role: Model(role, None, tokenizer, seed) for role in experiment.roles if role not in models}
    for role, model in models.items():
        model.lead = current().lead
        if role in experiment.interfaces:  # an evaluated role may have no interface
            load_saved_state(role, experiment.interfaces[role], model.saved)
    return models


def load_saved_state(role: str, interface: ModelInterface, saved: Mapping[str, Any]) -> None:
    """Restore the interface state that was saved with the weights of a role.

    Raises:
        DataError: one of the package's own interfaces cannot restore the state. A user's class keeps its exception.
    """
    try:
        interface.load_saved_state(saved)
    except RealignError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        # where the method is defined, not the class: a user's subclass that inherits it gets our message
        if not type(interface).load_saved_state.__module__.startswith("realign."):
            raise
        raise DataError(
            f"models.{role}: the interface state saved with the weights does not fit ({type(error).__name__}: "
            f"{error}). Download the model again."
        ) from error


def open_sampler(spec: ModelSpec, model: Model) -> None:
    """Open the external sampler that a model's spec configures, if any.

    Raises:
        ConfigError: the run has several processes under torchrun, which the sampler does not support.
    """
    if not isinstance(spec, ConfiguresSampler) or not spec.sampler.external:
        return
    if current().size > 1 and not spec.sampler.torchrun:
        raise ConfigError(
            f"models.{model.name}.sampler={type(spec.sampler).__name__}: this sampler does not work under torchrun. "
            "Start one process, or set runtime=ray."
        )
    model.external_sampler = spec.sampler.open(model.name, model.engine, model.tokenizer)


def check_optimizers(experiment: Experiment) -> None:
    """Reject a trained model without an optimizer, and an optimizer of a model that no RPC trains.

    Only the config is checked. With interfaces.actor.critic=shared, for example, no RPC uses the optimizer of a
    separate critic.

    Raises:
        ConfigError: the message contains the role and the fix.
    """
    trained = experiment.trained_roles
    for rpc in experiment.graph.rpcs:
        spec = experiment.models.get(rpc.model)
        trainable = None if spec is None else spec.facts().trainable
        # `is False`, because None means that the spec of a user's engine does not say; `_complete` asks the loaded
        # engine
        if rpc.method == "train_step" and spec is not None and trainable is False:
            raise _untrainable(rpc, spec)
        if rpc.model not in trained and trainable:
            role = rpc.model
            shares = (
                f" Or share the model whose loss trains the values: ~models.{role} "
                f"'+models.{role}={{_target_: realign.engines.SharedModel, of: actor}}'."
            )
            raise ConfigError(
                f"models.{role}.optimizer: it has no effect, since no RPC of the graph trains models.{role}. Remove "
                f"it: ~models.{role}.optimizer." + (shares if "values" in rpc.outputs else "")
            )


def _untrainable(rpc: RPC, spec: ModelSpec) -> ConfigError:
    """Return the error for an RPC that trains a model which cannot be trained."""
    cure = (
        f"shares the model of role {spec.of!r}. Train that role instead."
        if isinstance(spec, SharedModel)
        else f"has no optimizer. Set models.{rpc.model}.optimizer.lr."
    )
    return ConfigError(f"models.{rpc.model}: RPC {rpc.name!r} trains this model, which {cure}")


def check_outputs(role: str, outputs: frozenset[str], interface: ModelInterface, owner: str | None = None) -> None:
    """Check that the model's head produces the outputs that an interface needs.

    Args:
        role: role of the interface.
        outputs: outputs of the head, see `EngineCapabilities.outputs`.
        interface: the interface to check.
        owner: role that owns the model, if it is not `role`.

    Raises:
        ConfigError: the message contains the role, the missing output and the head that provides it.
    """
    needed = interface.outputs()
    lacking = sorted(needed - outputs)
    if lacking:
        if "logprobs" in lacking:
            cure = "head=causal"
        elif "logprobs" in needed:
            cure = "head.value_head, with head=causal"
        else:
            cure = "head=score or value, or head=causal with a head.value_head"
        raise ConfigError(
            f"interfaces.{role} ({type(interface).__name__}) needs {' and '.join(lacking)} of models.{role}, whose "
            f"head has {' and '.join(sorted(outputs))}. Set models.{owner or role}.{cure}."
        )


def check_vocabularies(models: Mapping[str, Model], lead: str) -> None:
    """Check that a token of two roles has the same id in both, because roles exchange token ids and not text.

    Raises:
        ConfigError: see `check_vocabulary`.
    """
    known = models[lead].tokenizer
    for role, model in models.items():
        own = model.tokenizer
        # most roles share one tokenizer object, whose vocabulary need not be compared with itself
        if own is not known and isinstance(own, HasVocabulary) and isinstance(known, HasVocabulary):
            check_vocabulary(role, own, lead, known)


def _check_models_replay(graph: DataflowGraph, models: Mapping[str, Model]) -> None:
    """Check that the loaded models can record or replay the choices and sampling masks that the graph passes on.

    Raises:
        ConfigError: a model is dense, its family is not supported, or an engine has no sampling masks.
    """
    for rpc in graph.rpcs:
        keys = rpc.own_keys
        if rpc.model not in models or not keys & {ROUTER_EXPERTS, SAMPLING_MASK}:
            continue
        capabilities = models[rpc.model].engine.capabilities()
        if SAMPLING_MASK in keys and not capabilities.sampling_replay:
            raise ConfigError(
                f"models.{rpc.model}: its engine cannot normalize over the tokens that top_k, top_p or min_p keep. "
                "Remove these settings from generation."
            )
        if ROUTER_EXPERTS in keys and not capabilities.router_replay:
            raise ConfigError(
                f"models.{rpc.model}: choices of experts cannot be replayed: {capabilities.router_replay_obstacle} Set "
                "generation.router_replay=false."
            )


def _connect_heads(experiment: Experiment, models: Mapping[str, Model]) -> None:
    """Pass heads to the roles that read hidden states of other roles, for losses over the whole vocabulary.

    The hidden states that a role reads as `teacher_hidden` need the head of the role that writes them, with the same
    weights. So a head whose weights change is passed again after each call that writes hidden states.

    Raises:
        ConfigError: the vocabularies of two roles differ.
    """
    graph = experiment.graph
    calls = {rpc.name: rpc for rpc in graph.rpcs}
    for rpc in graph.rpcs:
        ours = {theirs: own for own, theirs in rpc.rename.items()}
        for key in rpc.inputs:
            name = role_of_hidden(ours.get(key, key))
            if name is None or key not in graph.producers:
                continue
            writer = calls[graph.producers[key]]
            pass_head = partial(
                _pass_head,
                models[writer.model],
                models[rpc.model],
                name,
                # such weights also change between the mini-batches of a call
                copy=experiment.owner_of(writer.model) in experiment.trained_roles,
            )
            pass_head()
            if writer.model in experiment.changing_roles:
                models[writer.model].pass_heads.setdefault(writer.name, []).append(pass_head)


def _pass_head(owner: Model, reader: Model, name: str, *, copy: bool) -> None:
    head = owner.engine.lm_head()
    if copy and owner.engine.capabilities().live_head:
        bias_V = None if head.bias_V is None else head.bias_V.clone()
        head = replace(head, weight_VH=head.weight_VH.clone(), bias_V=bias_V)
    reader.engine.use_heads({name: head})


def save_models(folder: Path, models: Mapping[str, Model], interfaces: Mapping[str, ModelInterface]) -> None:
    """Save each trained model as a Hugging Face folder `folder/role`, together with the state of its interface.

    A role that shares the model stores its state in a separate file of the same folder. An engine with averaged
    weights also writes `folder/role_ema`, which contains the same states.

    Raises:
        RealignError: `folder`, or a folder in it, is a link.
    """
    refuse_link(folder)
    ranks = current()
    for role, model in models.items():
        if not model.has_engine or not model.engine.capabilities().trainable:
            continue
        # gathering the shards is a collective of all ranks, but `folder` of another rank is a scratch folder
        ranks.together(partial(model.engine.save, folder / role))
        ranks.lead(partial(_write_states, folder, role, model, interfaces))


def save_on_all_ranks(folder: Path, models: Mapping[str, Model], interfaces: Mapping[str, ModelInterface]) -> None:
    """Call `save_models` on every rank; only rank 0 writes into `folder`.

    All ranks must call this, because each may have only a shard. Files of other ranks are discarded.
    """
    if current().leader:
        save_models(folder, models, interfaces)
        return
    with TemporaryDirectory() as scratch:
        save_models(Path(scratch), models, interfaces)


def _write_states(folder: Path, role: str, model: Model, interfaces: Mapping[str, ModelInterface]) -> None:
    own = [folder / role, folder / f"{role}{AVERAGED}"]
    for path in filter(Path.is_dir, own):
        if role in interfaces:
            write_state(path, interfaces[role].state_dict())
        for view in model.views:
            if view.name in interfaces:
                write_state(path, interfaces[view.name].state_dict(), view.name)


def external_samplers(models: Mapping[str, Model]) -> list[Sampler]:
    """Return each external sampler once, even if roles share it."""
    samplers = [model.external_sampler for model in models.values() if model.external_sampler is not None]
    return list({id(sampler): sampler for sampler in samplers}.values())
