"""Datasets: read rows from files or the hub, format and tokenize them, and draw reproducible batches."""

from realign.data.combined import (
    PromptsWithPretraining,
    PromptsWithResponses,
    PromptsWithResponsesDataset,
    WithPretraining,
)
from realign.data.curriculum import Curriculum, PassRate, Prefer, PromptHistory
from realign.data.data_source import DataSource
from realign.data.dataset import Dataset, DataSpec, LoadReport, PackedDataset, PackedTokens, SequenceDataset
from realign.data.encoding import DroppedRow, EncodedRow, RowEncoder, TooLong
from realign.data.excerpt import Excerpt
from realign.data.order import batch_indices, epoch_order
from realign.data.preferences import LabelKind, PreferenceData, PreferenceDataset, RatedPairs
from realign.data.prompts import PromptData, PromptDataset
from realign.data.rendering import AssistantMasks
from realign.data.row_sources import RowSource, Split, Table, read_rows
from realign.data.streaming import StreamedDataset
from realign.data.supervised import Blocks, SupervisedData, SupervisedDataset, TextData
from realign.data.unpaired import RewardedData, RewardedDataset, UnpairedData, UnpairedDataset
from realign.data.writer import Template, Turns

__all__ = [
    "AssistantMasks",
    "Blocks",
    "Curriculum",
    "DataSource",
    "DataSpec",
    "Dataset",
    "DroppedRow",
    "EncodedRow",
    "Excerpt",
    "LabelKind",
    "LoadReport",
    "PackedDataset",
    "PackedTokens",
    "PassRate",
    "Prefer",
    "PreferenceData",
    "PreferenceDataset",
    "PromptData",
    "PromptDataset",
    "PromptHistory",
    "PromptsWithPretraining",
    "PromptsWithResponses",
    "PromptsWithResponsesDataset",
    "RatedPairs",
    "RewardedData",
    "RewardedDataset",
    "RowEncoder",
    "RowSource",
    "SequenceDataset",
    "Split",
    "StreamedDataset",
    "SupervisedData",
    "SupervisedDataset",
    "Table",
    "Template",
    "TextData",
    "TooLong",
    "Turns",
    "UnpairedData",
    "UnpairedDataset",
    "WithPretraining",
    "batch_indices",
    "epoch_order",
    "read_rows",
]
