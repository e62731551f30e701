"""Tiny encoder-decoder models, and their log-probs by the forward pass of transformers with labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from realign.api import SequenceSample
from tests.families import family_config
from tests.tiny import VOCAB, tiny_tokenizer

FAMILIES: dict[str, dict[str, Any]] = {
    # generate of transformers 5.23 fails if a T5 has more layers in the decoder than in the encoder
    "t5": {"d_kv": 16, "d_ff": 96, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4},
    "bart": {
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "max_position_embeddings": 128,
        "init_std": 0.2,
    },
}
"""Config values: scaled outputs and relative positions (t5); a bias of the logits and learned positions (bart)."""


def tiny_pair(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a tiny encoder-decoder model in eval mode and fp32."""
    given = {"vocab_size": VOCAB, "d_model": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    given |= {"decoder_start_token_id": 0, **FAMILIES[family], **overrides}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **given), dtype=torch.float32)
        for name, x in model.state_dict().items():
            if name.endswith("bias") and "relative" not in name:  # biases start at 0, which would hide errors
                torch.nn.init.normal_(x, std=0.1)
    return model.eval()


def family_pair(family: str) -> PreTrainedModel:
    """Return a tiny model of another family, in eval mode."""
    config = family_config(family)
    config.decoder_start_token_id = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForSeq2SeqLM.from_config(config).eval()


def save_pair(family: str, folder: Path) -> Path:
    """Write a tiny model with its tokenizer, and return the folder."""
    tiny_pair(family).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def own_logprobs(model: Any, sequence: Tensor, prompt: int) -> Tensor:
    """Return the log-probs of a response by the model's own forward pass with labels; `prompt` is its first index."""
    labels = sequence[None, prompt:]
    logits = model(input_ids=sequence[None, :prompt], labels=labels).logits[0]
    return logits.log_softmax(-1).gather(1, labels[0, :, None])[:, 0]


def sample_of(shape: list[list[tuple[int, int]]], *, seed: int = 0) -> SequenceSample:
    """Return random text, given the lengths of prompt and response of each sequence by prompt.

    A response of length 0 leaves a sequence without trained tokens.
    """
    drawn = torch.Generator().manual_seed(seed)
    sizes = [[p + r for p, r in group] for group in shape]
    ids = [[torch.randint(3, VOCAB, (n,), generator=drawn) for n in group] for group in sizes]
    masks = [[torch.arange(p + r) >= p for p, r in group] for group in shape]
    return SequenceSample.from_sequences(list(range(len(shape))), {"input_ids": ids, "loss_mask": masks})
