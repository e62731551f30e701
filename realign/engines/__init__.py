"""Engines run a transformers model on packed sequences. They contain no algorithm.

- `transformers_model` and `shared_model`: config nodes that load an engine, or share the model of another role.
- `cached_logprobs`: an engine that scores each row of a run once.
- `module_reader`: reads the module of a model, also in 4 bits, and merges an adapter into it.
- `network`: the model, its attention, heads, LoRA adapters, branches and outputs.
- `device`: choice of the device, precision of matrix products, and free memory.
- `memory` and `model_shape`: estimate of the memory that a model needs, from the sizes in its config.
- `training`: the single-process engine, optimizers, gradient steps, weights by name and their moving average.
- `sampling`: generation with the model in the same process.
- `servers`: generation with servers of vLLM or SGLang.
- `distributed`: the engine that shards weights and batches over several processes.
- `files`: model folders that a run reads, and folders that it writes.

The transformers package is imported when a model is loaded.
"""

from realign.engines.device import DType
from realign.engines.distributed.sharding import Sharding
from realign.engines.files.adapters import AdapterStart
from realign.engines.network.heads import Causal, Head, HeadInit, QHeads, Score, Value, ValueHead, ValueHidden
from realign.engines.network.kernels import Backend
from realign.engines.network.trains import All, Lora, TopLayers, Trained
from realign.engines.sampling.in_process import InProcessSampling
from realign.engines.servers.sglang import Sglang
from realign.engines.servers.vllm import Vllm
from realign.engines.shared_model import Share, SharedModel
from realign.engines.training.load_balancing import LoadBalancing
from realign.engines.training.optimizer import (
    OptimizerSpec,
    Schedule,
    ScheduleKind,
    ScheduleUnit,
    learning_rate,
)
from realign.engines.training.torch_optimizer import TorchOptimizer
from realign.engines.transformers_model import TransformersModel

__all__ = [
    "AdapterStart",
    "All",
    "Backend",
    "Causal",
    "DType",
    "Head",
    "HeadInit",
    "InProcessSampling",
    "LoadBalancing",
    "Lora",
    "OptimizerSpec",
    "QHeads",
    "Schedule",
    "ScheduleKind",
    "ScheduleUnit",
    "Score",
    "Sglang",
    "Sharding",
    "Share",
    "SharedModel",
    "TopLayers",
    "TorchOptimizer",
    "Trained",
    "TransformersModel",
    "Value",
    "ValueHead",
    "ValueHidden",
    "Vllm",
    "learning_rate",
]
