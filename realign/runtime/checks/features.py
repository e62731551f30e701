"""Check that all parts of a run support images, encoder-decoder models and router replay."""

from __future__ import annotations

from collections.abc import Mapping

from realign.api import Model
from realign.api.interface import implements
from realign.api.router_experts import ROUTER_EXPERTS
from realign.api.sampler import ConfiguresSampler, samples_externally
from realign.data import Dataset, SequenceDataset
from realign.engines.distributed.ranks import current
from realign.errors import ConfigError
from realign.runtime.experiment import Experiment
from realign.runtime.models import owner_of


def check_images(experiment: Experiment) -> None:
    """Check the settings of a run whose rows have images, before models are loaded.

    Raises:
        ConfigError: a part of the run does not support images. The message contains its key.
    """
    for where, evaluation in experiment.all_evaluations.items():
        if evaluation.data.has_images and not evaluation.reads_images:
            raise _no_images(where, f"{type(evaluation).__name__} does not support images")
    if experiment.calibration is not None and experiment.calibration.data.has_images:
        raise _no_images("calibration", "calibration does not support images")
    if not (roles := _roles_with_images(experiment)):
        return
    if experiment.runtime.starts_workers:
        raise _no_images("runtime=ray", "workers do not support images")
    if current().size > 1:
        raise _no_images("data.images_column", "distributed training does not support images")
    for role in roles:
        interface = experiment.interfaces.get(role)
        if experiment.data.has_images and interface is not None and not interface.reads_images:
            raise _no_images(f"interfaces.{role}", f"{type(interface).__name__} does not support images")
        if samples_externally(experiment.models.get(role)):
            raise _no_images(f"models.{role}.sampler", "external samplers do not support images")


def check_image_models(experiment: Experiment, models: Mapping[str, Model]) -> None:
    """Check that the loaded models of a run whose rows have images can read them.

    Raises:
        ConfigError: a model cannot. The message contains its key.
    """
    for role in _roles_with_images(experiment):
        if not models[role].engine.capabilities().images:
            raise _no_images(
                f"models.{role}",
                "this model does not read images. Supported are causal language models of the families qwen2_vl and "
                "qwen2_5_vl without value_head, with trains=all",
            )


def _roles_with_images(experiment: Experiment) -> list[str]:
    """Return the roles with a model that see images."""
    roles = [e.role for e in experiment.all_evaluations.values() if e.data.has_images]
    if experiment.data.has_images:
        roles += [rpc.model for rpc in experiment.graph.rpcs if experiment.interfaces[rpc.model].needs_engine]
    return list(dict.fromkeys(roles))


def _no_images(where: str, why: str) -> ConfigError:
    return ConfigError(f"{where}: {why}. Remove images_column from the data, or change this setting.")


def check_encoder_decoders(experiment: Experiment, models: Mapping[str, Model]) -> None:
    """Check the runtime of a run with encoder-decoder models.

    Raises:
        ConfigError: the runtime starts workers.
    """
    if (role := _first(models)) is not None and experiment.runtime.starts_workers:
        raise ConfigError(f"runtime=ray: not supported by encoder-decoder models (models.{role}). Set runtime=local.")


def check_predicted(dataset: Dataset, what: str, models: Mapping[str, Model]) -> None:
    """Check that the losses over the rows of a dataset include only responses.

    Args:
        dataset: the rows.
        what: config key of the rows, for messages.
        models: models by role that read the rows.

    Raises:
        ConfigError: a model is an encoder-decoder model, and a loss includes prompts or pretraining texts.
    """
    if (role := _first(models)) is None:
        return
    why = f"not supported, because models.{role} is an encoder-decoder model, which predicts only responses"
    if isinstance(dataset, SequenceDataset) and dataset.train_on_prompt:
        raise ConfigError(f"{what}.train_on_prompt=true: {why}. Set {what}.train_on_prompt=false.")
    if "ptx_input_ids" in dataset.keys:
        raise ConfigError(f"{what}.pretraining: {why}. Remove the pretraining texts, and set ptx_coef=0.")


def _first(models: Mapping[str, Model]) -> str | None:
    """Return the first role with an encoder-decoder model."""
    roles = (role for role, model in models.items() if model.has_engine and model.engine.capabilities().encoder_decoder)
    return next(roles, None)


def check_replay(experiment: Experiment) -> None:
    """Check interfaces and samplers, before models are loaded.

    Raises:
        ConfigError: an interface does not record the choices, or an external sampler does not return them.
    """
    for role in dict.fromkeys(rpc.model for rpc in experiment.graph.rpcs):
        interface = experiment.interfaces[role]
        generation = interface.plan().generation
        if generation is None or not generation.router_replay:
            continue
        key = f"interfaces.{role}.generation.router_replay"
        writes = interface.keys("generate").writes if implements(type(interface), "generate") else None
        if ROUTER_EXPERTS not in (writes or ()):
            kind = type(interface).__name__
            raise ConfigError(f"{key}=true: {kind} does not record choices of experts. Set {key}=false.")
        owner = owner_of(experiment, role)
        spec = experiment.models.get(owner)
        if isinstance(spec, ConfiguresSampler) and not spec.sampler.capabilities().router_experts:
            raise ConfigError(
                f"{key}=true: models.{owner}.sampler={type(spec.sampler).__name__} does not return the choices of "
                f"experts. Remove models.{owner}.sampler, or set {key}=false."
            )
