"""Rollouts of llama.cpp with the weights of a Qwen2 model, through the in-process server of xllamacpp."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{x}_proj.{part}": f"attn_{x}.{part}" for x in "qkv" for part in ("weight", "bias")},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"mlp.{x}_proj.weight": f"ffn_{x}.weight" for x in ("gate", "up", "down")},
}
"""Names of a layer's weights in transformers and in a GGUF file."""


def write_gguf(model: Any, path: Path) -> None:
    """Write an untied Qwen2 model in fp32, with a vocabulary of words that no text needs."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(config.eos_token_id)
    for name, x in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), x.detach().float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outer or name == "lm_head.weight":
        return outer.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}"


def open_llama(model: Any, folder: Path, slots: int, length: int, prompt: int) -> Callable[[int, int], object]:
    """Start a server with one thread in this process, and return its rollouts.

    Args:
        model: Qwen2 model.
        folder: Folder for the GGUF file.
        slots: Sequences that are decoded in one batch.
        length: Tokens of a slot.
        prompt: Tokens of each prompt.
    """
    import xllamacpp

    path = folder / "model.gguf"
    write_gguf(model, path)
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.n_predict = slots * length, slots, length
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_prompt, params.warmup, params.verbosity, params.n_threads_http = False, False, -1, slots + 2
    server = xllamacpp.Server(params)

    def sample(rows: int, tokens: int) -> object:
        def one(row: int) -> object:
            answer = server.handle_completions(
                {
                    "prompt": (torch.arange(3, 3 + prompt) + row).tolist(),
                    "n_predict": tokens,
                    "max_tokens": tokens,
                    "ignore_eos": True,
                    "temperature": 1.0,
                    "samplers": ["temperature"],
                    "seed": row,
                }
            )
            counted = answer["usage"]["completion_tokens"] if isinstance(answer, dict) else None
            assert counted == tokens, answer
            return answer

        with ThreadPoolExecutor(rows) as pool:
            return list(pool.map(one, range(rows)))

    return sample


__all__ = ["open_llama", "write_gguf"]
