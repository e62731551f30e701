"""A transformers model, read from files and run on packed sequences.

- `files`: model folders that a run reads, and folders that it writes.
- `module_reader`: reads the module of a model, also in 4 bits, and merges an adapter into it.
- `network`: the model, its attention, heads, LoRA adapters, branches and outputs.
- `parts`: a rank's shard of a weight, and which layers make a stage of a pipeline.
- `model_shape`: sizes of a model, from its config alone.
- `device` and `host`: choice of the device, precision of matrix products, and free memory.

The transformers package is imported when a model is loaded.
"""

from realign.models.device import DType
from realign.models.files.adapters import AdapterStart
from realign.models.network.heads import Causal, Head, HeadInit, QHeads, Score, Value, ValueHead, ValueHidden
from realign.models.network.kernels import Backend
from realign.models.network.trains import All, Lora, TopLayers, Trained

__all__ = [
    "AdapterStart",
    "All",
    "Backend",
    "Causal",
    "DType",
    "Head",
    "HeadInit",
    "Lora",
    "QHeads",
    "Score",
    "TopLayers",
    "Trained",
    "Value",
    "ValueHead",
    "ValueHidden",
]
