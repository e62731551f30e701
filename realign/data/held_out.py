"""Data nodes of evaluations, derived from the training data."""

from __future__ import annotations

import dataclasses

from realign.data.dataset import DataSpec
from realign.data.image_source import ImageSource
from realign.data.pretraining import WithPretraining
from realign.data.prompts import PromptData
from realign.data.source import DataSource


def prompt_source(training: DataSpec) -> DataSpec:
    """Return a data node of the prompts in the format of the training data, for evaluations that sample responses.

    Demonstrations and preference pairs become `PromptData` with the same template, columns and file; all other nodes
    are returned unchanged.
    """
    if isinstance(training, WithPretraining):
        return prompt_source(training.prompts)
    if isinstance(training, DataSource) and not isinstance(training, PromptData):
        kind = ImageSource if isinstance(training, ImageSource) else DataSource
        shared = {field.name: getattr(training, field.name) for field in dataclasses.fields(kind)}
        return PromptData(**shared)
    return training


__all__ = ["prompt_source"]
