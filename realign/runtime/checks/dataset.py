"""Check that a dataset fits the experiment: its keys, its number of rows, and the token budget of a forward pass."""

from __future__ import annotations

import warnings

from realign.data import Dataset
from realign.runtime.experiment import Experiment


def check_dataset(dataset: Dataset, experiment: Experiment) -> None:
    """Check the dataset against the keys that the graph reads, the batch size and the token budget."""
    if not len(dataset):
        raise ValueError("the dataset holds no row")
    if missing := sorted(set(experiment.graph.dataset_keys) - set(dataset.keys)):
        raise ValueError(f"the graph reads key {missing[0]!r} of the dataset, which gives {sorted(dataset.keys)}")
    if experiment.dynamic_sampling is not None and experiment.batch_prompts > len(dataset):
        raise ValueError(
            f"batch_prompts={experiment.batch_prompts}, but the dataset has {len(dataset)} rows, and under "
            "dynamic_sampling no row is used twice in a step"
        )
    if experiment.prompts_at_once > len(dataset):
        warnings.warn(
            f"batch_prompts={experiment.prompts_at_once}, but the dataset has {len(dataset)} rows: each stands in a "
            f"batch {experiment.prompts_at_once / len(dataset):.1f} times",
            stacklevel=2,
        )
    limit = experiment.microbatch.max_tokens_per_microbatch
    if limit is None:
        return
    if (text := dataset.longest_text) > limit:
        raise ValueError(
            f"microbatch.max_tokens_per_microbatch={limit} cannot hold a text of data.pretraining: the longest has "
            f"{text} tokens; raise the budget, or limit the lengths"
        )
    check_budget(dataset, experiment.longest_response, experiment)


def check_budget(dataset: Dataset, response: int, experiment: Experiment) -> None:
    """Check that the longest row plus a response of `response` tokens fits the token budget."""
    limit = experiment.microbatch.max_tokens_per_microbatch
    what = f" and a response up to {response}" if response else ""
    longest = dataset.longest_row
    if limit is not None and longest and longest + response > limit:
        raise ValueError(
            f"microbatch.max_tokens_per_microbatch={limit} cannot hold one sequence: the longest row has "
            f"{longest} tokens{what}; raise the budget, or limit the lengths"
        )
