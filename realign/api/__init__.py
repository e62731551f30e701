"""The contracts: data (`SequenceSample`), models (`ModelInterface`, `PipelinableEngine`) and the graph of RPCs.

Imports torch, numpy and `realign.functional`; everything else in realign is written against what stands here.
"""

from realign.api.data import SequenceSample, part_sizes
from realign.api.dataflow import RPC, DataflowGraph, Sync
from realign.api.generation import GenerationConfig
from realign.api.in_process_sampler import InProcessSampler
from realign.api.lengths import Lengths
from realign.api.microbatch import MicroBatches, MicroBatchSpec, plan_microbatches
from realign.api.model import Model, ModelInterface, ModelOutput, PipelinableEngine
from realign.api.sampler import Capabilities, Completion, Handle, Request, Sampler, SamplerSpec, Tokens, WeightSource
from realign.api.seeds import derive_seed
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
    "Capabilities",
    "Completion",
    "Correlation",
    "DataflowGraph",
    "GenerationConfig",
    "Handle",
    "InProcessSampler",
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
    "Request",
    "Sampler",
    "SamplerSpec",
    "SequenceSample",
    "Stat",
    "Stats",
    "Sum",
    "Sync",
    "Tokens",
    "Variance",
    "WeightSource",
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
