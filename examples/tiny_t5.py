"""Write a tiny T5 with random weights for the tokenizer of a demo: an encoder-decoder model to train.

python -m realign.demo.arithmetic runs/arithmetic
python examples/tiny_t5.py runs/arithmetic/model runs/t5
realign experiment=sft_arithmetic name=sft_t5 models.actor.path=runs/t5
realign experiment=grpo_arithmetic name=grpo_t5 models.actor.path=runs/sft_t5/final/actor
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration


def write(tokenizer: Path, folder: Path, *, seed: int = 0) -> None:
    """Write a T5 with 470,000 parameters, and the tokenizer.

    Args:
        tokenizer: folder of the tokenizer.
        folder: output folder.
        seed: seed of the weights.
    """
    words = AutoTokenizer.from_pretrained(tokenizer)
    config = T5Config(
        vocab_size=len(words),
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
        decoder_start_token_id=words.pad_token_id,
    )
    torch.manual_seed(seed)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    words.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
