"""Tiny language models that read images, and text with images, built in memory without downloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from realign.api import SequenceSample
from realign.engines.training.transformers_engine import TransformersEngine
from realign.models.network.attention import ATTENTION
from tests.tiny import VOCAB, engine_over

IMAGE, VIDEO, START, END = VOCAB - 4, VOCAB - 3, VOCAB - 2, VOCAB - 1
PATCH, MERGE = 4, 2
VALUES = 3 * PATCH**2
"""Values of a patch: three colors of its pixels."""

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
_VISION = {
    "qwen2_5_vl": {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16},
    "qwen2_vl": {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": 64},
}
_VISION["qwen2_5_vl"]["fullatt_block_indexes"] = [1]
_SHARED = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 1}


def tiny_image_config(family: str = "qwen2_5_vl") -> Any:
    """Return the config of a tiny model with the vocabulary of `tiny_tokenizer`."""
    return AutoConfig.for_model(
        family,
        text_config=_TEXT,
        vision_config={**_VISION[family], **_SHARED, "initializer_range": 0.1},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )


def tiny_image_model(family: str = "qwen2_5_vl", *, attention: str = ATTENTION, seed: int = 0) -> Any:
    """Return a tiny model that reads images, in eval mode and fp32, with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(
            tiny_image_config(family), attn_implementation=attention, dtype=torch.float32
        )
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def tiny_image_engine(family: str = "qwen2_5_vl", **settings: Any) -> TransformersEngine:
    """Return an engine over a tiny model that reads images."""
    return engine_over(tiny_image_model(family), **settings)


def random_images(sizes: Sequence[tuple[int, int]], seed: int) -> tuple[Tensor, Tensor]:
    """Return patches and grids of images with random pixels, given their heights and widths in merged patches."""
    grids = torch.tensor([(1, MERGE * h, MERGE * w) for h, w in sizes], dtype=torch.int64).view(-1, 3)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(grids.prod(1).sum()), VALUES, generator=generator), grids


def random_prompt(sizes: Sequence[tuple[int, int]], generator: np.random.Generator) -> list[int]:
    """Return random text of one to five tokens before, between and after the tokens of images."""

    def text() -> list[int]:
        return generator.integers(3, IMAGE, generator.integers(1, 6)).tolist()

    ids = text()
    for h, w in sizes:
        ids += [START, *[IMAGE] * (h * w), END, *text()]
    return ids


def image_prompts(sizes: Sequence[Sequence[tuple[int, int]]], *, seed: int = 0) -> SequenceSample:
    """Return prompts with random text and images of the given sizes: key `prompt_ids` and the keys of images."""
    generator = np.random.default_rng(seed)
    prompts = [[random_prompt(own, generator)] for own in sizes]
    images = [random_images(own, seed + i) for i, own in enumerate(sizes)]
    return SequenceSample.from_sequences(
        [f"p{i}" for i in range(len(sizes))],
        {
            "prompt_ids": prompts,
            "pixel_values": [[pixels] for pixels, _ in images],
            "image_grid_thw": [[grids] for _, grids in images],
        },
    )


def image_sample(
    sizes: Sequence[Sequence[tuple[int, int]]], responses: Sequence[Sequence[int]], *, seed: int = 0
) -> SequenceSample:
    """Return `image_prompts`, each with random responses of the given lengths."""
    prompts = image_prompts(sizes, seed=seed)
    generator = np.random.default_rng(seed + 1)
    ids, given = [], []
    for prompt, lengths in zip(prompts.sequences("prompt_ids"), responses, strict=True):
        answers = [torch.from_numpy(generator.integers(3, IMAGE, n)) for n in lengths]
        ids.append([torch.cat([prompt, answer]) for answer in answers])
        given.append([torch.arange(len(prompt) + n) < len(prompt) for n in lengths])
    whole = SequenceSample.from_sequences(prompts.ids, {"input_ids": ids, "prompt_mask": given})
    return whole.with_tokens(loss_mask=~whole["prompt_mask"]).merge(prompts.select(["pixel_values", "image_grid_thw"]))
