"""Check that all parts of a run support the images of its rows."""

from __future__ import annotations

from collections.abc import Mapping

from realign.api import Model
from realign.api.sampler_spec import samples_externally
from realign.engines.distributed.ranks import current
from realign.errors import ConfigError
from realign.runtime.experiment import Experiment


def check_images(experiment: Experiment) -> None:
    """Check the settings of a run whose rows have images, before models are loaded.

    Raises:
        ConfigError: a part of the run does not support images. The message contains its key.
    """
    for where, evaluation in experiment.all_evaluations.items():
        if evaluation.data.has_images and not evaluation.reads_images:
            raise _unsupported(where, f"{type(evaluation).__name__} does not support images")
    if experiment.calibration is not None and experiment.calibration.data.has_images:
        raise _unsupported("calibration", "calibration does not support images")
    if not (roles := _roles(experiment)):
        return
    if experiment.runtime.starts_workers:
        raise _unsupported("runtime=ray", "workers do not support images")
    if current().size > 1:
        raise _unsupported("data.images_column", "distributed training does not support images")
    for role in roles:
        interface = experiment.interfaces.get(role)
        if experiment.data.has_images and interface is not None and not interface.reads_images:
            raise _unsupported(f"interfaces.{role}", f"{type(interface).__name__} does not support images")
        if samples_externally(experiment.models.get(role)):
            raise _unsupported(f"models.{role}.sampler", "external samplers do not support images")


def check_image_models(experiment: Experiment, models: Mapping[str, Model]) -> None:
    """Check that the loaded models of a run whose rows have images can read them.

    Raises:
        ConfigError: a model cannot. The message contains its key.
    """
    for role in _roles(experiment):
        if not models[role].machine.reads_images:
            raise _unsupported(
                f"models.{role}",
                "this model does not read images. Supported are causal language models of the families qwen2_vl and "
                "qwen2_5_vl without value_head, with trains=all",
            )


def _roles(experiment: Experiment) -> list[str]:
    """Return the roles with a model that see images."""
    found = [e.role for e in experiment.all_evaluations.values() if e.data.has_images]
    if experiment.data.has_images:
        found += [rpc.model for rpc in experiment.graph.rpcs if experiment.interfaces[rpc.model].needs_engine]
    return list(dict.fromkeys(found))


def _unsupported(where: str, why: str) -> ConfigError:
    return ConfigError(f"{where}: {why}. Remove images_column from the data, or change this setting.")


__all__ = ["check_image_models", "check_images"]
