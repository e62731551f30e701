"""Write a tiny BART with random weights for the tokenizer of a demo: an encoder-decoder model to train.

python -m realign.demo.arithmetic runs/arithmetic
python examples/tiny_bart.py runs/arithmetic/model runs/bart
realign experiment=sft_arithmetic name=sft_bart models.actor.path=runs/bart
realign experiment=grpo_arithmetic name=grpo_bart models.actor.path=runs/sft_bart/final/actor
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, BartConfig, BartForConditionalGeneration

from realign.demo.tiny import save


def write(tokenizer: Path, folder: Path, *, seed: int = 0) -> None:
    """Write a BART with 2 layers in the encoder and 2 in the decoder, and the tokenizer.

    Args:
        tokenizer: folder of the tokenizer.
        folder: output folder.
        seed: seed of the weights.
    """
    words = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    config = BartConfig(
        vocab_size=len(words),
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_position_embeddings=32,
        init_std=0.06,
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
        decoder_start_token_id=words.pad_token_id,
        forced_eos_token_id=None,
    )
    torch.manual_seed(seed)
    save(folder, BartForConditionalGeneration(config), words)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
