"""What the demos' tasks share: a tiny model, a tokenizer of whole words, and rows written as JSONL."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PAD, EOS = "<pad>", "<|endoftext|>"  # the end token that transformers expects of a Qwen2 tokenizer


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def build_tokenizer(words: Iterable[str], *, split: Any, decoder: Any = None) -> Any:
    """A tokenizer of whole words, with an end and a padding token, that puts nothing in front.

    Args:
        words: the vocabulary, without the two special tokens.
        split: the pre-tokenizer that cuts a text into words.
        decoder: joins words again; None puts a blank between them.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = split
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def build_model(family: str, vocabulary: int, *, seed: int) -> Any:
    """A randomly initialised model of 300,000 parameters beside its embeddings.

    Args:
        family: transformers' name of it, one that is shaped like Llama. It also decides which tokenizer class reads the
            folder: for qwen2 one that takes any vocabulary for byte pairs, which only spares single characters.
        vocabulary: number of tokens.
        seed: of the weights.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 20.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)
