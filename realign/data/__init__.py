"""Datasets: read rows from files or the hub, format and tokenize them, and draw reproducible batches."""

from realign.data.combined import PromptsWithResponses, WithPretraining
from realign.data.curriculum import Curriculum, PassRate, Prefer, PromptHistory
from realign.data.data_source import DataSource
from realign.data.dataset import Dataset, DataSpec, LoadReport, PackedDataset, PackedTokens, SequenceDataset
from realign.data.encoding import TooLong
from realign.data.excerpt import Excerpt
from realign.data.order import batch_indices
from realign.data.preferences import LabelKind, PreferenceData, RatedPairs
from realign.data.prompts import PromptData, PromptDataset
from realign.data.rendering import AssistantMasks
from realign.data.row_sources import RowSource, Split, read_rows
from realign.data.supervised import Blocks, SupervisedData, TextData
from realign.data.unpaired import RewardedData, UnpairedData
from realign.data.writer import Template, Turns

__all__ = [
    "AssistantMasks",
    "Blocks",
    "Curriculum",
    "DataSource",
    "DataSpec",
    "Dataset",
    "Excerpt",
    "LabelKind",
    "LoadReport",
    "PackedDataset",
    "PackedTokens",
    "PassRate",
    "Prefer",
    "PreferenceData",
    "PromptData",
    "PromptDataset",
    "PromptHistory",
    "PromptsWithResponses",
    "RatedPairs",
    "RewardedData",
    "RowSource",
    "SequenceDataset",
    "Split",
    "SupervisedData",
    "Template",
    "TextData",
    "TooLong",
    "Turns",
    "UnpairedData",
    "WithPretraining",
    "batch_indices",
    "read_rows",
]
