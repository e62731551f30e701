"""Marks tests that need a C++ compiler. The library is built once per process, and cached between test sessions."""

from __future__ import annotations

import pytest
import torch

from realign.api import GenerationConfig
from realign.models import Lora
from realign.models.network.heads import read_head
from realign.samplers.in_process.compiled.library import COMPILERS, LibraryError, find_compiler, load_library
from realign.samplers.in_process.generate import generate
from realign.samplers.in_process.rollout_model import RolloutModel
from realign.samplers.in_process.settings import InProcessSampling
from tests.samplers.in_process.rollouts import prompts, sample_of
from tests.tiny import tiny_model

requires_compiler = pytest.mark.skipif(
    find_compiler() is None, reason=f"no C++ compiler is installed (CXX, {', '.join(COMPILERS)})"
)


def close(half: bool) -> float:
    """Return how far results may be from torch's: products by tiles of bf16 have 16 bits."""
    library = load_library()
    return 5e-5 if half and not isinstance(library, LibraryError) and library.realign_has_tiles() else 1e-5


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
KNOWN = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with scaled positions": ("llama", {"rope_parameters": LLAMA3}),
    "wide llama": ("llama", {"intermediate_size": 256, "head_dim": 32}),
    "mistral": ("mistral", {}),
    "phi3": ("phi3", {}),
    "phi3 with positions in a part of a head": ("phi3", {"partial_rotary_factor": 0.5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {}),
}


def rollout(model, fused, max_slots=5, **config):
    config = GenerationConfig(**{"max_new_tokens": 24, "n": 3, "temperature": 0.8} | config)
    return generate(
        RolloutModel(model, read_head(model), fusion=fused),
        sample_of(prompts()),
        config,
        InProcessSampling(max_slots=max_slots),
        seed=0,
        eos_token_ids=range(2, 8),
        tokenizer=None,
    )


def adapted_model(family="llama"):
    """Return a model with trained LoRA adapters."""
    model = tiny_model(family)
    Lora(target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]).prepare(model, path="", seed=0)
    for name, x in model.named_parameters():
        if "lora_B" in name:
            x.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return model
