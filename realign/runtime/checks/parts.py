"""Check the settings of an experiment against each other and its graph, without files or models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from realign.api import RPC, Calibratable, DataflowGraph, Keys, ModelInterface, ModelSpec, is_component_key
from realign.engines.shared_model import Share, SharedModel, check_shared
from realign.errors import ConfigError, GraphError, RealignError, SettingsError
from realign.runtime.evaluation.calibration import RewardCalibration
from realign.runtime.experiment import Experiment
from realign.runtime.rollout.dynamic_sampling import DynamicSampling


def check_parts(experiment: Experiment) -> None:
    """Find settings that contradict each other or the graph.

    Raises:
        ConfigError: the message contains the key.
        SettingsError: the same, of a setting of the run itself.
        GraphError: a method needs a key that nobody provides, or an RPC writes one that nobody reads.
    """
    graph, interfaces, models = experiment.graph, experiment.interfaces, experiment.models
    _check_saves(experiment)
    graph.check_roles({role: type(i) for role, i in interfaces.items()}, models)
    for where, evaluation in experiment.all_evaluations.items():
        try:
            evaluation.check(graph, models)
        except ConfigError as error:
            # changed in place, because a new error would lose the class that decides the exit code, and the traceback
            error.args = (f"{where}.{error}",)
            raise
    check_shared(models)
    _check_syncs(graph, models, ahead=experiment.rollout.ahead)
    check_temperatures(experiment.temperatures)
    _check_calibration(experiment.calibration, graph, interfaces, models)
    _check_dynamic_sampling(experiment.dynamic_sampling, graph, interfaces)
    _check_curriculum(experiment)
    check_keys(graph, interfaces)
    _check_minibatches(graph, interfaces, experiment.batch_prompts)
    check_exact_sampling(graph, interfaces)
    _check_cache(experiment)


@contextmanager
def locating(where: str) -> Iterator[None]:
    """Prefix the message of a `RealignError` with a config key, and add the key as a note to any other exception.

    Args:
        where: config key of the component that is called inside the context.
    """
    try:
        yield
    except RealignError as error:
        error.args = (f"{where}: {error}",)
        raise
    except Exception as error:
        error.add_note(f"while calling {where}")
        raise


def check_keys(graph: DataflowGraph, interfaces: Mapping[str, ModelInterface]) -> None:
    """Check that every key that a method needs is provided, and that every key written for one component is read.

    A method for which the interface declares no keys is not checked.

    Raises:
        GraphError: the message contains the RPC, the key and the setting.
    """
    declared = {rpc.name: _keys(rpc, interfaces[rpc.model]) for rpc in graph.rpcs}
    for rpc in graph.rpcs:
        _check_needs(rpc, declared[rpc.name], graph)
        _check_writes(rpc, declared[rpc.name])
    read = {key for rpc in graph.rpcs for key in _read(rpc, declared[rpc.name])}
    for rpc in graph.rpcs:
        for key in rpc.inputs:
            if is_component_key(key) and key not in read:
                raise GraphError(
                    f"interfaces.{rpc.model}: RPC {rpc.name!r} has input {key!r}, but no component of "
                    f"{type(interfaces[rpc.model]).__name__} reads it under its settings. Remove the input from the "
                    "graph, or set a component that reads it."
                )


def unread_inputs(graph: DataflowGraph, interfaces: Mapping[str, ModelInterface]) -> dict[str, list[str]]:
    """Return the inputs of each RPC that its interface does not read, without RPCs that have none."""
    unread_by_rpc = {}
    for rpc in graph.rpcs:
        read = _read(rpc, _keys(rpc, interfaces[rpc.model]))
        if unread := [key for key in rpc.inputs if key not in read]:
            unread_by_rpc[rpc.name] = unread
    return unread_by_rpc


def _keys(rpc: RPC, interface: ModelInterface) -> Keys:
    with locating(f"interfaces.{rpc.model}"):
        return interface.keys(rpc.method)


def _names_in_interface(rpc: RPC) -> dict[str, str]:
    """Map the graph's name of each renamed key of the RPC to the interface's name."""
    return {theirs: ours for ours, theirs in rpc.rename.items()}


def _read(rpc: RPC, keys: Keys) -> set[str]:
    """Return the inputs that the method reads, by their names in the graph; all inputs if it declares none."""
    # an interface of a user need not declare its keys, and must not be told that it reads nothing
    if not keys.needs and not keys.uses:
        return set(rpc.inputs)
    own = _names_in_interface(rpc)
    return {key for key in rpc.inputs if own.get(key, key) in {*keys.needs, *keys.uses}}


def _check_needs(rpc: RPC, keys: Keys, graph: DataflowGraph) -> None:
    own = _names_in_interface(rpc)
    given = {own.get(key, key) for key in rpc.inputs}
    for key, setting in keys.needs.items():
        if key in given:
            continue
        reader = f"interfaces.{rpc.model}.{setting}" if setting else f"interfaces.{rpc.model}"
        if key in graph.producers:
            cure = f"RPC {graph.producers[key]!r} writes it. Add it to the inputs of {rpc.name!r}."
        elif key in graph.dataset_keys:
            cure = f"The dataset has it. Add it to the inputs of {rpc.name!r}."
        else:
            cure = "No RPC of the graph writes it. Add such an RPC to the graph"
            cure += f", or change {setting.partition('=')[0]}." if setting else "."
        raise GraphError(f"{reader} needs key {key!r} in {rpc.method}, but RPC {rpc.name!r} does not read it. {cure}")


def _check_writes(rpc: RPC, keys: Keys) -> None:
    own = _names_in_interface(rpc)
    outputs = {own.get(key, key) for key in rpc.outputs}
    if keys.writes is None or keys.writes == outputs - keys.reports:
        return
    raise GraphError(
        f"interfaces.{rpc.model} writes {', '.join(sorted(keys.writes))} in {rpc.method} under its settings, but RPC "
        f"{rpc.name!r} declares {', '.join(sorted(outputs)) or 'no output'}. Declare the keys that the interface "
        "writes, or use the `dataflow` function of its algorithm."
    )


def _check_minibatches(graph: DataflowGraph, interfaces: Mapping[str, ModelInterface], batch_prompts: int) -> None:
    """Check that the mini-batches of each role have equal sizes, so that every optimizer step has the same weight.

    Raises:
        ConfigError: `batch_prompts` is not a multiple of a role's number of mini-batches.
    """
    for rpc in graph.rpcs:
        parts = interfaces[rpc.model].plan().n_minibatches
        if rpc.method != "train_step" or parts < 2:
            continue
        what = f"interfaces.{rpc.model}.n_minibatches={parts}: batch_prompts={batch_prompts}"
        # a case of its own, because the next lower multiple below would be 0 prompts
        if parts > batch_prompts:
            raise ConfigError(
                f"{what} is less than the number of mini-batches. Set batch_prompts={parts} or more, or at most "
                f"n_minibatches={batch_prompts}."
            )
        if rest := batch_prompts % parts:
            near = max(divisor for divisor in range(1, parts) if batch_prompts % divisor == 0)
            raise ConfigError(
                f"{what} is not a multiple of it. Set batch_prompts={batch_prompts - rest} or "
                f"{batch_prompts - rest + parts}, or n_minibatches={near}."
            )


def check_exact_sampling(graph: DataflowGraph, interfaces: Mapping[str, ModelInterface]) -> None:
    """Check that no sampling setting changes the token distribution of log-probs that a role is trained on.

    Raises:
        ConfigError: the probability ratios of a training RPC would be wrong.
    """
    for rpc in graph.rpcs:
        plan = interfaces[rpc.model].plan()
        if rpc.method != "generate" or plan.exact_sampling:
            continue
        if (reader := _reader_of_logprobs(rpc, graph)) is not None:
            raise ConfigError(
                f"interfaces.{rpc.model} samples with {plan.sampler}, which changes the token distribution. The "
                f"probability ratios of RPC {reader.name!r} would be wrong. Use neutral sampling settings for "
                "training. Evaluation may use any. With top_k, top_p or min_p, set sampling_replay=true beside them "
                f"instead, in interfaces.{rpc.model}.generation or the settings that it refers to."
            )


def _reader_of_logprobs(rpc: RPC, graph: DataflowGraph) -> RPC | None:
    """Return the first training RPC that reads the log-probs that `rpc` samples; None if there is none."""
    own = {theirs: ours for ours, theirs in rpc.rename.items()}
    keys = {key for key in rpc.outputs if own.get(key, key) == "logprobs"}
    return next((r for r in graph.rpcs if r.method in ("credit", "train_step") and keys & set(r.inputs)), None)


def check_temperatures(temperatures: Mapping[str, float]) -> None:
    """Check that all roles use one temperature, given by config key.

    Raises:
        ConfigError: two roles use different temperatures.
    """
    for key, value in temperatures.items():
        first, expected = next(iter(temperatures.items()))
        if value != expected:
            raise ConfigError(
                f"{key}={value:g}: it differs from {first}={expected:g}, so the log-probs of these roles cannot be "
                "compared. Set one temperature for all roles of the graph."
            )


def _check_syncs(graph: DataflowGraph, models: Mapping[str, ModelSpec], *, ahead: bool) -> None:
    """Check that each synced role has separate weights, and that no call uses them while they change.

    Args:
        graph: the graph with its weight syncs.
        models: model spec of each role.
        ahead: whether responses are sampled asynchronously.

    Raises:
        ConfigError: the message contains the sync.
    """
    for role, sync in graph.sync.items():
        if isinstance(spec := models[role], SharedModel):
            raise ConfigError(
                f"sync.{role}: models.{role} shares the model of role {spec.of!r} and has no separate weights. Set "
                f"models.{role}.path, or remove sync.{role}."
            )
        # a reference branch keeps the start of `role` inside its network, which a sync would overwrite
        for other, view in models.items():
            if isinstance(view, SharedModel) and view.of == role and view.branch is Share.reference:
                raise ConfigError(
                    f"sync.{role}: models.{other} is the frozen start of models.{role}, and the sync would change it. "
                    f"Set models.{other}.path, or remove sync.{role}."
                )
        if ahead and role in {rpc.model for rpc in graph.leading_to("rewards")}:
            raise ConfigError(
                f"sync.{role}: with rollout=async, calls of {role!r} run while the weights of {sync.of!r} change. "
                f"Remove sync.{role}, since rollout workers have their own weights, or set rollout=sync."
            )


def _check_calibration(
    calibration: RewardCalibration | None,
    graph: DataflowGraph,
    interfaces: Mapping[str, ModelInterface],
    models: Mapping[str, ModelSpec],
) -> None:
    """Check the roles of a calibration, if there is one.

    Raises:
        ConfigError: a role has no model, cannot be calibrated, or is not trained.
    """
    if calibration is None:
        return
    role, policy = calibration.role, calibration.policy
    if policy not in models:
        raise ConfigError(f"calibration.policy={policy}: this role has no model. Roles with one: {', '.join(models)}.")
    calls = [rpc.method for rpc in graph.rpcs if rpc.model == role]
    if not calls or not isinstance(interfaces[role], Calibratable):
        raise ConfigError(
            f"calibration.role={role}: it must be a role of the graph whose interface can be calibrated. Choose a role "
            "with an interface such as RewardModelInterface."
        )
    if calibration.after and "train_step" not in calls:
        raise ConfigError(
            f"calibration.after=true: no RPC trains role {role!r}, so its new gain and bias would not be saved. Set "
            "calibration.before=true instead."
        )


def _check_dynamic_sampling(
    sampling: DynamicSampling | None, graph: DataflowGraph, interfaces: Mapping[str, ModelInterface]
) -> None:
    """Check that dynamic sampling, if configured, can repeat the RPCs that lead to rewards, and that groups can pass.

    Raises:
        ConfigError: the message contains the RPC or the setting.
    """
    if sampling is None:
        return
    leading = graph.leading_to("rewards")
    if not leading:
        raise ConfigError(
            "dynamic_sampling: no RPC of the graph writes the key 'rewards', by which it filters. Add such an RPC, or "
            "set dynamic_sampling=null."
        )
    for rpc in leading:
        if rpc.method == "train_step":
            raise ConfigError(
                f"dynamic_sampling: it repeats the RPCs that lead to 'rewards', and RPC {rpc.name!r} among them trains "
                "a model. Train after the rewards, or set dynamic_sampling=null."
            )
        n = interfaces[rpc.model].plan().responses_per_prompt if rpc.method == "generate" else None
        if n is not None and n < sampling.min_group_size:
            raise ConfigError(
                f"interfaces.{rpc.model}.generation.n={n}: groups of this size cannot reach "
                f"dynamic_sampling.min_group_size={sampling.min_group_size}. Set generation.n to at least "
                f"{sampling.min_group_size}, or lower min_group_size."
            )


def _check_saves(experiment: Experiment) -> None:
    best = experiment.save_best
    if best is not None and best.startswith(("eval/", "-eval/")) and not experiment.all_evaluations:
        raise SettingsError(
            f"save_best={best}: the run has no evaluation that measures this metric. Configure an evaluation, or "
            "choose another metric."
        )


def _check_cache(experiment: Experiment) -> None:
    if experiment.cache_reference and not experiment.cached_roles:
        raise SettingsError(
            "cache_reference=true: no role is a frozen model of its own that only computes log-probs of the rows, as "
            "in DPO and KTO. It does not work with sync, trains=lora or top_layers, images, data.streaming, "
            "curriculum and runtime=ray. Set cache_reference=false."
        )


def _check_curriculum(experiment: Experiment) -> None:
    if experiment.curriculum is None:
        return
    if experiment.data.streams:
        raise ConfigError(
            "curriculum: it chooses among all rows, which data.streaming=true does not keep in memory. Set "
            "data.streaming=false, or curriculum=null."
        )
    if experiment.curriculum.needs_rewards and "rewards" not in experiment.graph.producers:
        raise ConfigError(
            "curriculum: no RPC of the graph writes the key 'rewards', from which it learns. Add such an RPC, or set "
            "curriculum=null."
        )
