"""The contracts: data (`SequenceSample`), models (`ModelInterface`, `PipelinableEngine`) and the graph of RPCs.

This package imports torch, numpy and `realign.functional`. All other packages of realign depend on it.
"""

from realign.api.callback import (
    Callback,
    CallbackResult,
    EndEvent,
    EndStatus,
    EvaluationEvent,
    StartEvent,
    StepEvent,
)
from realign.api.dataflow import RPC, SAMPLED, DataflowGraph, Sync, rl_graph
from realign.api.engine import EngineCapabilities, ModelOutput, PipelinableEngine, QValues
from realign.api.generation import GenerationConfig
from realign.api.in_process_sampler import InProcessSampler
from realign.api.interface import (
    Calibratable,
    Keys,
    ModelInterface,
    Panel,
    Plan,
    Role,
    RoleModel,
    Weights,
    is_component_key,
)
from realign.api.lengths import Lengths
from realign.api.microbatch import MicroBatches, MicroBatchSpec, plan_microbatches
from realign.api.model import Compute, Model, ModelFacts, ModelSpec, TokenizerSource
from realign.api.rewards import total_rewards
from realign.api.sample import SequenceSample, part_sizes
from realign.api.sampler import Capabilities, Completion, Handle, Request, Sampler, SamplerSpec, Tokens, WeightSource
from realign.api.seeds import derive_seed
from realign.api.stats import (
    Correlation,
    LossStats,
    Max,
    Mean,
    Min,
    Stat,
    Stats,
    Sum,
    TokenValues,
    Trace,
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
    "SAMPLED",
    "Calibratable",
    "Callback",
    "CallbackResult",
    "Capabilities",
    "Completion",
    "Compute",
    "Correlation",
    "DataflowGraph",
    "EndEvent",
    "EndStatus",
    "EngineCapabilities",
    "EvaluationEvent",
    "GenerationConfig",
    "Handle",
    "InProcessSampler",
    "Keys",
    "Lengths",
    "LossStats",
    "Max",
    "Mean",
    "MicroBatchSpec",
    "MicroBatches",
    "Min",
    "Model",
    "ModelFacts",
    "ModelInterface",
    "ModelOutput",
    "ModelSpec",
    "Panel",
    "PipelinableEngine",
    "Plan",
    "QValues",
    "Request",
    "Role",
    "RoleModel",
    "Sampler",
    "SamplerSpec",
    "SequenceSample",
    "StartEvent",
    "Stat",
    "Stats",
    "StepEvent",
    "Sum",
    "Sync",
    "TokenValues",
    "TokenizerSource",
    "Tokens",
    "Trace",
    "Variance",
    "WeightSource",
    "Weights",
    "correlation",
    "derive_seed",
    "is_component_key",
    "masked_max",
    "masked_mean",
    "masked_variance",
    "merge_stats",
    "part_sizes",
    "plan_microbatches",
    "rl_graph",
    "stat_values",
    "total_rewards",
]
