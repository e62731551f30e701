"""Test that docs/guides/sizing.md has the estimates of today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from realign.api.memory import MemoryWork
from realign.engines import OptimizerSpec
from realign.engines.memory import MemoryModel
from realign.models import Causal, Lora
from realign.models.model_shape import shape_of

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "sizing.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (\S+B) \| (.*) \|$", PAGE, re.MULTILINE))
NAMES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
MODELS = {
    "0.5B": (896, 24, 14, 2, 4864, 151936),
    "1.5B": (1536, 28, 12, 2, 8960, 151936),
    "3B": (2048, 36, 16, 2, 11008, 151936),
    "7B": (3584, 28, 28, 4, 18944, 152064),
    "14B": (5120, 48, 40, 8, 13824, 152064),
    "32B": (5120, 64, 40, 8, 27648, 152064),
    "70B": (8192, 80, 64, 8, 28672, 128256),
}
WORK = MemoryWork(trains=True, scores=True, samples=False, tokens=16384, optimizer_step_tokens=10**6)


@pytest.mark.parametrize("name", MODELS)
def test_the_sizes_of_a_model_are_those_of_the_estimate(name):
    sizes = MODELS[name]
    kind = LlamaConfig if name == "70B" else Qwen2Config
    config = kind(**dict(zip(NAMES, sizes, strict=True)), tie_word_embeddings=sizes[0] < 3000)

    def estimate(trains: Lora | None = None, checkpointing: bool = True):
        shape = shape_of(config, Causal(), trains=trains)
        model = MemoryModel(
            shape,
            torch.device("cuda"),
            torch.bfloat16,
            optimizer=OptimizerSpec(),
            gradient_checkpointing=checkpointing,
        )
        return model.estimate(WORK)

    step, lora = estimate(), estimate(Lora(rank=16))
    gib = [
        step.weights,
        estimate(checkpointing=False).activations,
        step.activations,
        step.kept + step.passing,
        lora.kept + lora.passing,
    ]
    cache = 1000 * 2 * shape_of(config, Causal()).cache_token / 2**20
    assert ROWS[name].split(" | ") == [*(f"{size / 2**30:,.1f}" for size in gib), f"{cache:.0f}"]
