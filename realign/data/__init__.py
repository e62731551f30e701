"""Datasets: read rows from files or the hub, format and tokenize them, and draw reproducible batches."""

from realign.data.dataset import Dataset, DataSpec, LoadReport, PackedDataset, PackedTokens, SequenceDataset
from realign.data.distillation import PromptsWithResponses, PromptsWithResponsesDataset
from realign.data.excerpt import Excerpt
from realign.data.order import batch_indices, epoch_order
from realign.data.preferences import LabelKind, PreferenceData, PreferenceDataset, RatedPairs
from realign.data.pretraining import PromptsWithPretraining, WithPretraining
from realign.data.prompts import PromptData, PromptDataset
from realign.data.rendering import AssistantMasks
from realign.data.rewarded import RewardedData, RewardedDataset
from realign.data.row_sources import RowSource, read_rows
from realign.data.rows import Dropped, EncodedRow, RowEncoder, TooLong
from realign.data.source import DataSource
from realign.data.split import Split
from realign.data.streaming import StreamedDataset
from realign.data.supervised import SupervisedData, SupervisedDataset
from realign.data.table import Table
from realign.data.templates import Template
from realign.data.text import Blocks, TextData
from realign.data.unpaired import UnpairedData, UnpairedDataset
from realign.data.writer import Turns

__all__ = [
    "AssistantMasks",
    "Blocks",
    "DataSource",
    "DataSpec",
    "Dataset",
    "Dropped",
    "EncodedRow",
    "Excerpt",
    "LabelKind",
    "LoadReport",
    "PackedDataset",
    "PackedTokens",
    "PreferenceData",
    "PreferenceDataset",
    "PromptData",
    "PromptDataset",
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
