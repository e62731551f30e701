"""Load the datasets of a run, and check that their rows fit the models that read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from realign.api import Model
from realign.data import Dataset
from realign.runtime.checks.after_loading import check_budget, check_dataset, check_length, check_positions
from realign.runtime.checks.features import check_encoder_decoders, check_image_models, check_predicted
from realign.runtime.experiment import Experiment
from realign.runtime.models import lead_role


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run."""

    training: Dataset
    held_out: Mapping[str, Dataset]
    """Rows of each evaluation, by config key (`Experiment.all_evaluations`)."""
    calibration: Dataset | None
    """Prompts of the calibration; None without one."""

    def by_key(self) -> dict[str, Dataset | None]:
        """Return the datasets by config key."""
        held_out = {f"{where}.data": dataset for where, dataset in self.held_out.items()}
        return {"data": self.training, **held_out, "calibration.data": self.calibration}


def load_datasets(experiment: Experiment, models: Mapping[str, Model]) -> Datasets:
    """Load and check all datasets of a run with the tokenizers of its models.

    Raises:
        RealignError: a dataset cannot be read, or does not fit the graph, the token budget or a model.
    """
    check_image_models(experiment, models)
    check_encoder_decoders(experiment, models)
    readers = [rpc.model for rpc in experiment.graph.rpcs]
    length, setting = experiment.longest_response, experiment.length_setting
    check_length(length, models, readers, setting)  # before the rows are read, which may take long
    training = experiment.data.load(models[lead_role(experiment)].tokenizer)
    check_dataset(training, experiment)
    check_predicted(training, "data", models)
    if not experiment.response_counts_prompt:
        check_positions(training, length, models, readers, "data", setting=setting)
    calibration_data = _calibration_data(experiment, models)
    return Datasets(training, load_held_out(experiment, models), calibration_data)


def load_held_out(experiment: Experiment, models: Mapping[str, Model]) -> dict[str, Dataset]:
    """Load and check the rows of each evaluation, by config key.

    Raises:
        RealignError: a dataset cannot be read, or does not fit its model.
    """
    datasets = {}
    for where, evaluation in experiment.all_evaluations.items():
        datasets[where] = evaluation.data.load(models[evaluation.role].tokenizer)
        check_predicted(datasets[where], f"{where}.data", {evaluation.role: models[evaluation.role]})
        length, setting = evaluation.longest_response, f"{where}.{evaluation.length_setting}"
        check_positions(datasets[where], length, models, [evaluation.role], f"{where}.data", setting=setting)
    return datasets


def _calibration_data(experiment: Experiment, models: Mapping[str, Model]) -> Dataset | None:
    if (calibration := experiment.calibration) is None:
        return None
    dataset = calibration.data.load(models[calibration.policy].tokenizer)
    response = calibration.generation.max_new_tokens
    check_budget(dataset, response, experiment)
    readers, setting = (calibration.policy, calibration.role), "calibration.generation.max_new_tokens"
    check_positions(dataset, response, models, readers, "calibration.data", setting=setting)
    return dataset
