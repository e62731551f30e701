"""Engines: machines that run a transformers model on packed sequences. They know no algorithm.

`loading` turns a config into an engine; `engine` cuts, packs and steps, and `layout` says which rows a pass computes;
`network` runs and saves what has weights: the model, and beside it `value_head`, `lora` or the `branches` of a frozen
reference, and `trained` says which weights train; `attention` is the one function through which every model attends;
`output` is what a loss sees of a forward pass; `optim`, `stepping` and `ema` turn gradients into steps and averages;
`generation` samples; `shared` lets roles share a model; `sharded` is the engine of several processes, of which each has
a part of the weights (`fsdp`, `parts`). Transformers itself is imported when a model is loaded.
"""

from realign.engines.distributed.spec import Sharding
from realign.engines.network.heads import Causal, Head, HeadInit, Score, Value, ValueHead, ValueHidden
from realign.engines.network.kernels import Backend
from realign.engines.network.trains import All, Lora, TopLayers, Trained
from realign.engines.sampling.in_process import InProcessSampling
from realign.engines.shared_model import Share, SharedModel
from realign.engines.training.optimizer import OptimizerSpec, Schedule, ScheduleKind, ScheduleUnit, learning_rate
from realign.engines.transformers_model import DType, TransformersModel

__all__ = [
    "All",
    "Backend",
    "Causal",
    "DType",
    "Head",
    "HeadInit",
    "InProcessSampling",
    "Lora",
    "OptimizerSpec",
    "Schedule",
    "ScheduleKind",
    "ScheduleUnit",
    "Score",
    "Sharding",
    "Share",
    "SharedModel",
    "TopLayers",
    "Trained",
    "TransformersModel",
    "Value",
    "ValueHead",
    "ValueHidden",
    "learning_rate",
]
