"""Check that rows fit the experiment and its models: keys, number of rows, token budget and context windows."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

from realign.api import Model
from realign.data import Dataset
from realign.errors import ConfigError, DataError
from realign.runtime.experiment import Experiment


def check_dataset(dataset: Dataset, experiment: Experiment) -> None:
    """Check the dataset against the keys that the graph reads, the batch size and the token budget.

    Raises:
        DataError: the dataset is empty, or lacks a key.
        ConfigError: the batch size or the token budget does not fit the dataset.
    """
    rows = dataset.size
    if rows == 0:
        raise DataError("data: the dataset has no rows. Choose another file, or relax its filters.")
    if missing := sorted(set(experiment.graph.dataset_keys) - set(dataset.keys)):
        raise DataError(
            f"data: the graph reads the key {missing[0]!r}, but the dataset has {', '.join(sorted(dataset.keys))}. "
            "Choose a data class that has this key."
        )
    if experiment.dynamic_sampling is not None and rows is not None and experiment.batch_prompts > rows:
        raise ConfigError(
            f"batch_prompts={experiment.batch_prompts}: the dataset has {rows} rows, and dynamic_sampling uses "
            f"each row at most once per step. Set batch_prompts={rows} or less."
        )
    if rows is not None and experiment.prompts_at_once > rows:
        warnings.warn(
            f"batch_prompts={experiment.prompts_at_once}: the dataset has {rows} rows. Training continues, and "
            f"each row is in a batch {experiment.prompts_at_once / rows:.1f} times on average.",
            stacklevel=2,
        )
    limit = experiment.microbatch.max_tokens_per_microbatch
    if limit is None:
        return
    if (text := dataset.longest_text) > limit:
        raise ConfigError(
            f"microbatch.max_tokens_per_microbatch={limit}: the longest text of data.pretraining has {text} tokens. "
            f"Set it to at least {text}, or limit the length of the texts."
        )
    if not experiment.response_counts_prompt:
        check_budget(dataset, experiment.longest_response, experiment)


def check_budget(dataset: Dataset, response: int, experiment: Experiment) -> None:
    """Check that the longest row plus a response of `response` tokens fits the token budget.

    Raises:
        ConfigError: it does not fit.
    """
    limit = experiment.microbatch.max_tokens_per_microbatch
    what = f" and its response up to {response}" if response else ""
    longest = dataset.longest_row
    if limit is not None and longest and longest + response > limit:
        raise ConfigError(
            f"microbatch.max_tokens_per_microbatch={limit}: the longest row has {longest} tokens{what}. Set it to at "
            f"least {longest + response}, or limit the lengths."
        )


def check_positions(
    dataset: Dataset,
    response: int,
    models: Mapping[str, Model],
    roles: Iterable[str],
    what: str,
    *,
    setting: str,
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

    Raises:
        ConfigError: a row does not fit; the message contains the role, the lengths and the setting to change.
    """
    rows, texts = dataset.longest_sequence, dataset.longest_text
    for role in dict.fromkeys(roles):
        limit = models[role].engine.capabilities().positions if models[role].has_engine else None
        if limit is None:
            continue
        if rows + response > limit:
            long = f"a row of {what} has {rows} tokens" + (f" and its response up to {response}" if response else "")
            raise ConfigError(
                f"models.{role}: its context window has {limit} positions, but {long}. "
                f"{_cure(rows, response, limit, setting)}"
            )
        if texts > limit:
            raise ConfigError(
                f"models.{role}: its context window has {limit} positions, but a text of {what}.pretraining has "
                f"{texts} tokens. Limit the texts to {limit} tokens."
            )


def check_length(response: int, models: Mapping[str, Model], roles: Iterable[str], setting: str) -> None:
    """Check that responses fit the positions of every model that reads them, before the rows are known.

    Args:
        response: maximum number of tokens of a response, or of a whole sequence.
        models: models by role.
        roles: roles that read the responses.
        setting: config key that limits this number, for messages.

    Raises:
        ConfigError: they do not fit; the message contains the role and the key to change.
    """
    for role in dict.fromkeys(roles):
        limit = models[role].engine.capabilities().positions if models[role].has_engine else None
        if limit is not None and response > limit:
            raise ConfigError(
                f"models.{role}: its context window has {limit} positions, but {setting}={response}. Lower it, so that "
                "prompt and response fit."
            )


def _cure(rows: int, response: int, limit: int, setting: str) -> str:
    if not response:
        return f"Limit the rows to {limit} tokens."
    if response >= limit:
        fits = f"to at most {limit - rows}" if rows < limit else f"below {limit} and limit the rows"
        return f"Set {setting} {fits}."
    lower = f", or set {setting} to at most {limit - rows}" if rows < limit else ""
    return f"Limit the rows to {limit - response} tokens{lower}."
