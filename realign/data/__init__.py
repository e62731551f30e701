"""Datasets: read rows from a file, format them with a template, tokenize them once, and draw reproducible batches."""

from realign.data.dataset import Dataset, DataSpec, LoadReport, PackedDataset, PackedTokens
from realign.data.excerpt import Excerpt
from realign.data.files import Table, read_rows
from realign.data.order import batch_indices, epoch_order
from realign.data.preferences import LabelKind, PreferenceData, PreferenceDataset
from realign.data.pretraining import PromptsWithPretraining, WithPretraining
from realign.data.prompts import PromptData, PromptDataset
from realign.data.source import DataSource, TooLong
from realign.data.split import Split
from realign.data.supervised import SupervisedData, SupervisedDataset
from realign.data.templates import Template
from realign.data.text import Blocks, TextData

__all__ = [
    "Blocks",
    "DataSource",
    "DataSpec",
    "Dataset",
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
    "Split",
    "SupervisedData",
    "SupervisedDataset",
    "Table",
    "Template",
    "TextData",
    "TooLong",
    "WithPretraining",
    "batch_indices",
    "epoch_order",
    "read_rows",
]
