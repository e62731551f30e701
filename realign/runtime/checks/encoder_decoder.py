"""Check that a run supports its encoder-decoder models, which predict only the tokens of one response per prompt."""

from __future__ import annotations

from collections.abc import Mapping

from realign.api import Model
from realign.data import Dataset, SequenceDataset
from realign.errors import ConfigError
from realign.runtime.experiment import Experiment


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
    found = (role for role, model in models.items() if model.engine is not None and model.engine.encoder_decoder)
    return next(found, None)


__all__ = ["check_encoder_decoders", "check_predicted"]
