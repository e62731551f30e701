"""Engines: the machine for one network, which scores, trains, and hands out its weights. They contain no algorithm.

- `transformers_model` and `shared_model`: config nodes that load an engine, or share the model of another role.
- `cached_logprobs`: an engine that scores each row of a run once.
- `memory`: estimate of the memory that a model needs, from the sizes in its config.
- `training`: the single-process engine, optimizers, gradient steps, weights by name and their moving average.
- `distributed`: the engine that shards weights and batches over several processes.
"""

from realign.engines.distributed.sharding import Sharding
from realign.engines.shared_model import Share, SharedModel
from realign.engines.training.load_balancing import LoadBalancing
from realign.engines.training.optimizer import OptimizerSpec, Schedule, ScheduleKind, learning_rate
from realign.engines.training.torch_optimizer import TorchOptimizer
from realign.engines.transformers_model import TransformersModel

__all__ = [
    "LoadBalancing",
    "OptimizerSpec",
    "Schedule",
    "ScheduleKind",
    "Sharding",
    "Share",
    "SharedModel",
    "TorchOptimizer",
    "TransformersModel",
    "learning_rate",
]
