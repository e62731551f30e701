"""The contracts: data (`SequenceSample`), models (`ModelInterface`, `PipelinableEngine`) and the graph of RPCs.

Imports torch, numpy and `realign.functional`; everything else in realign is written against what stands here.
"""

from realign.api.data import SequenceSample, part_sizes
from realign.api.dataflow import RPC, DataflowGraph, Sync
from realign.api.lengths import Lengths
from realign.api.microbatch import MicroBatches, MicroBatchSpec, plan_microbatches
from realign.api.model import (
    GenerationConfig,
    Model,
    ModelInterface,
    ModelOutput,
    PipelinableEngine,
    derive_seed,
)
from realign.api.stats import (
    Correlation,
    Max,
    Mean,
    Min,
    Stat,
    Stats,
    Sum,
    Variance,
    correlation,
    masked_max,
    masked_mean,
    masked_variance,
    merge_stats,
    stat_values,
)

__all__ = [
    "RPC",
    "Correlation",
    "DataflowGraph",
    "GenerationConfig",
    "Lengths",
    "Max",
    "Mean",
    "MicroBatchSpec",
    "MicroBatches",
    "Min",
    "Model",
    "ModelInterface",
    "ModelOutput",
    "PipelinableEngine",
    "SequenceSample",
    "Stat",
    "Stats",
    "Sum",
    "Sync",
    "Variance",
    "correlation",
    "derive_seed",
    "masked_max",
    "masked_mean",
    "masked_variance",
    "merge_stats",
    "part_sizes",
    "plan_microbatches",
    "stat_values",
]
