"""Samplers: who samples the responses of a model.

- `in_process`: the model in the process of the run, with decoding slots and a KV cache.
- `servers`: vLLM or SGLang, over HTTP; weights are sent after each step.
"""

from realign.samplers.in_process.settings import InProcessSampling
from realign.samplers.servers.sglang import Sglang
from realign.samplers.servers.vllm import Vllm

__all__ = ["InProcessSampling", "Sglang", "Vllm"]
