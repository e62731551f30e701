"""Check that a dataset fits the experiment: its keys, its number of rows, and the token budget of a forward pass."""

from __future__ import annotations

import warnings

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
