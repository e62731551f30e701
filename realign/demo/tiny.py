"""Shared code of the demo tasks: a tiny model, a word-level tokenizer, and JSONL output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realign.models.files.model_folder import quiet_transformers
from realign.own_files import replace_text

PAD, EOS = "<pad>", "<|endoftext|>"  # transformers expects this EOS token of a Qwen2 tokenizer


@dataclass(frozen=True)
class Task:
    """Paths of the model and data files of a task."""

    model: Path
    demonstrations: Path
    """JSONL of the demonstrations for SFT."""
    prompts: Path
    """JSONL of the training problems of reinforcement learning, with answers."""
    held_out: Path
    """JSONL of held-out problems, with answers."""

    @classmethod
    def of(cls, folder: Path) -> Task:
        """Return the paths of the files in a folder."""
        return cls(
            folder / "model", folder / "demonstrations.jsonl", folder / "prompts.jsonl", folder / "held_out.jsonl"
        )


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSONL file."""
    replace_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def save(folder: Path, model: Any, *processors: Any) -> None:
    """Write a model and its tokenizer (and image processor) to a folder, without progress bars."""
    with quiet_transformers():
        for part in (model, *processors):
            part.save_pretrained(folder)


def build_tokenizer(words: Iterable[str], *, split: Any, decoder: Any = None) -> Any:
    """Return a word-level tokenizer with EOS and padding tokens, which adds no start token.

    Args:
        words: Vocabulary without the two special tokens.
        split: Pre-tokenizer that splits a text into words.
        decoder: Decoder that joins words; None joins them with spaces.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = split
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def build_model(family: str, vocabulary: int, *, seed: int, positions: int = 64) -> Any:
    """Return a randomly initialized model with 300,000 parameters, excluding embeddings.

    Args:
        family: Model type of transformers with the settings of Llama. It also selects the tokenizer class that loads
            the folder. The class of qwen2 treats any vocabulary as byte pairs, so it supports single characters only.
        vocabulary: Number of tokens.
        seed: Seed of the weights.
        positions: Length of the context window in tokens.
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
        max_position_embeddings=positions,
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 20.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
