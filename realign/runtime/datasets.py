"""Load the datasets of a run, and check that their rows fit the graph, the token budget and the models."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from realign.api import Model
from realign.data import Dataset, DataSpec, SequenceDataset
from realign.data.encoding import room_for
from realign.errors import ConfigError, DataError
from realign.runtime.checks.before_loading import no_images, roles_with_images
from realign.runtime.experiment import Experiment


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
    for role, positions in _windows(models, readers):  # before the rows are read, which may take long
        if length > positions:
            raise ConfigError(
                f"models.{role}: its context window has {positions} positions, but {setting}={length}. Lower it, so "
                "that prompt and response fit."
            )
    training = _load(experiment.data, models[experiment.lead_role], experiment.microbatch.max_tokens_per_microbatch)
    _check_training(training, experiment)
    check_predicted(training, "data", models)
    # a `longest_response` that includes the prompt has been compared with the windows above
    if not experiment.response_counts_prompt:
        _check_positions(training, length, models, readers, "data", setting=setting)
    calibration, prompts = experiment.calibration, None
    if calibration is not None:
        prompts = _load(calibration.data, models[calibration.policy], experiment.microbatch.max_tokens_per_microbatch)
        length, setting = calibration.generation.max_new_tokens, "calibration.generation.max_new_tokens"
        _check_budget(prompts, length, experiment)
        readers = [calibration.policy, calibration.role]
        _check_positions(prompts, length, models, readers, "calibration.data", setting=setting)
    return Datasets(training, load_held_out(experiment, models), prompts)


def load_held_out(experiment: Experiment, models: Mapping[str, Model]) -> dict[str, Dataset]:
    """Load and check the rows of each evaluation, by config key.

    Raises:
        RealignError: a dataset cannot be read, or does not fit its model.
    """
    datasets = {}
    for where, evaluation in experiment.all_evaluations.items():
        window = dict(_windows(models, [evaluation.role])).get(evaluation.role)
        datasets[where] = _load(evaluation.data, models[evaluation.role], window)
        check_predicted(datasets[where], f"{where}.data", {evaluation.role: models[evaluation.role]})
        length, setting = evaluation.longest_response, f"{where}.{evaluation.length_setting}"
        _check_positions(datasets[where], length, models, [evaluation.role], f"{where}.data", setting=setting)
    return datasets


def _load(spec: DataSpec, model: Model, room: int | None) -> Dataset:
    with room_for(room):
        return spec.load(model.tokenizer)


def _check_training(dataset: Dataset, experiment: Experiment) -> None:
    """Check the training data against the keys that the graph reads, the batch size and the token budget."""
    rows, at_once = dataset.size, experiment.prompts_at_once
    if rows == 0:
        raise DataError("data: the dataset has no rows. Choose another file, or relax its filters.")
    if missing := sorted(set(experiment.graph.dataset_keys) - set(dataset.keys)):
        raise DataError(
            f"data: the graph reads the key {missing[0]!r}, but the dataset has {', '.join(sorted(dataset.keys))}. "
            "Choose a data class that has this key."
        )
    # without dynamic sampling a batch may span epochs; with it, `draw_new` uses no row twice in a step, so the step
    # could never be full
    if experiment.dynamic_sampling is not None and rows is not None and experiment.batch_prompts > rows:
        raise ConfigError(
            f"batch_prompts={experiment.batch_prompts}: the dataset has {rows} rows, and dynamic_sampling uses "
            f"each row at most once per step. Set batch_prompts={rows} or less."
        )
    if rows is not None and at_once > rows:
        warnings.warn(
            f"batch_prompts={at_once}: the dataset has {rows} rows. Training continues, and each row is in a batch "
            f"{at_once / rows:.1f} times on average.",
            stacklevel=2,
        )
    limit, text = experiment.microbatch.max_tokens_per_microbatch, dataset.longest_text
    if limit is not None and text > limit:
        raise ConfigError(
            f"microbatch.max_tokens_per_microbatch={limit}: the longest text of data.pretraining has {text} tokens. "
            f"Set it to at least {text}, or limit the length of the texts."
        )
    # here too the prompt is included, and `check_ready` has compared `longest_response` with the budget
    if not experiment.response_counts_prompt:
        _check_budget(dataset, experiment.longest_response, experiment)


def _check_budget(dataset: Dataset, response: int, experiment: Experiment) -> None:
    """Check that the longest row plus a response of `response` tokens fits the token budget."""
    limit, longest = experiment.microbatch.max_tokens_per_microbatch, dataset.longest_row
    if limit is not None and longest and longest + response > limit:
        what = f" and its response up to {response}" if response else ""
        raise ConfigError(
            f"microbatch.max_tokens_per_microbatch={limit}: the longest row has {longest} tokens{what}. Set it to at "
            f"least {longest + response}, or limit the lengths."
        )


def _windows(models: Mapping[str, Model], roles: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield each of these roles whose model has a limited number of positions, with the limit."""
    for role in dict.fromkeys(roles):
        positions = models[role].engine.capabilities().positions if models[role].has_engine else None
        if positions is not None:
            yield role, positions


def _check_positions(
    dataset: Dataset, response: int, models: Mapping[str, Model], roles: Iterable[str], what: str, *, setting: str
) -> None:
    """Check that the longest row plus a response fits the positions of every model that reads it.

    Without this check, a prompt that is too long would stop the run when it is drawn, possibly hours later.

    Args:
        dataset: the rows; not checked if the dataset does not report its longest sequence.
        response: maximum number of tokens of a response to a row; 0 without responses.
        models: models by role.
        roles: roles that read the rows.
        what: config key of the rows, for messages.
        setting: config key that limits the response length, for messages.
    """
    rows, texts = dataset.longest_sequence, dataset.longest_text
    for role, limit in _windows(models, roles):
        if rows + response > limit:
            if not response:
                cure = f"Limit the rows to {limit} tokens."
            elif response >= limit:
                fits = f"to at most {limit - rows}" if rows < limit else f"below {limit} and limit the rows"
                cure = f"Set {setting} {fits}."
            else:
                lower = f", or set {setting} to at most {limit - rows}" if rows < limit else ""
                cure = f"Limit the rows to {limit - response} tokens{lower}."
            long = f"a row of {what} has {rows} tokens" + (f" and its response up to {response}" if response else "")
            raise ConfigError(f"models.{role}: its context window has {limit} positions, but {long}. {cure}")
        if texts > limit:
            raise ConfigError(
                f"models.{role}: its context window has {limit} positions, but a text of {what}.pretraining has "
                f"{texts} tokens. Limit the texts to {limit} tokens."
            )


def check_image_models(experiment: Experiment, models: Mapping[str, Model]) -> None:
    """Check that the loaded models of a run whose rows have images can read them.

    Raises:
        ConfigError: a model cannot. The message contains its key.
    """
    for role in roles_with_images(experiment):
        if not models[role].engine.capabilities().images:
            raise no_images(
                f"models.{role}",
                "this model does not read images. Supported are causal language models of the families qwen2_vl and "
                "qwen2_5_vl without value_head, with trains=all",
            )


def check_encoder_decoders(experiment: Experiment, models: Mapping[str, Model]) -> None:
    """Check the runtime of a run with encoder-decoder models.

    Raises:
        ConfigError: the runtime starts workers.
    """
    if (role := _encoder_decoder(models)) is not None and experiment.runtime.starts_workers:
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
    if (role := _encoder_decoder(models)) is None:
        return
    why = f"not supported, because models.{role} is an encoder-decoder model, which predicts only responses"
    if isinstance(dataset, SequenceDataset) and dataset.train_on_prompt:
        raise ConfigError(f"{what}.train_on_prompt=true: {why}. Set {what}.train_on_prompt=false.")
    if "ptx_input_ids" in dataset.keys:
        raise ConfigError(f"{what}.pretraining: {why}. Remove the pretraining texts, and set ptx_coef=0.")


def _encoder_decoder(models: Mapping[str, Model]) -> str | None:
    """Return the first role with an encoder-decoder model."""
    roles = (role for role, model in models.items() if model.has_engine and model.engine.capabilities().encoder_decoder)
    return next(roles, None)
