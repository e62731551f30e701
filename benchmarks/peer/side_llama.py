"""Rollouts of llama.cpp with the weights of a Qwen2 model, through the in-process server of xllamacpp."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer.work import GREEDY, Scenario

NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{x}_proj.{part}": f"attn_{x}.{part}" for x in "qkv" for part in ("weight", "bias")},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"mlp.{x}_proj.weight": f"ffn_{x}.weight" for x in ("gate", "up", "down")},
}
"""Names of a layer's weights in transformers and in a GGUF file."""


def write_gguf(model: Any, path: Path) -> None:
    """Write an untied Qwen2 model in fp32, with the word `t7` for token 7."""
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


class Llama:
    """A server with one thread in this process."""

    def __init__(self, model: Any, folder: Path, slots: int, length: int) -> None:
        """Write the weights and start the server.

        Args:
            model: Qwen2 model.
            folder: Folder for the GGUF file.
            slots: Sequences that are decoded in one batch.
            length: Tokens of a slot.
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
        self._server = xllamacpp.Server(params)

    def sample(self, prompts: list[list[int]], lengths: list[int], temperature: float = 1.0) -> list[list[int]]:
        """Sample one response of a given length for each prompt, all at the same time; return their tokens."""

        def one(row: int) -> list[int]:
            answer = self._server.handle_completions(
                {
                    "prompt": prompts[row],
                    "n_predict": lengths[row],
                    "max_tokens": lengths[row],
                    "ignore_eos": True,
                    "temperature": temperature,
                    "samplers": ["temperature"],
                    "seed": row,
                }
            )
            assert isinstance(answer, dict), answer
            return tokens_of(answer["choices"][0]["text"])

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(one, range(len(prompts))))


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a text in the words of `write_gguf`, such as `t12t7`."""
    return [int(word) for word in text.split("t")[1:]]


class Side:
    """Samples the responses of a step."""

    def __init__(self, scenario: Scenario, folder: Path, steps: int, options: dict[str, Any]) -> None:
        from transformers import Qwen2ForCausalLM

        self.scenario = scenario
        model = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        self.llama = Llama(model, folder, scenario.sequences, scenario.prompt_high + scenario.max_new)
        self.greedy = self.llama.sample(scenario.prompt_ids(1)[:1], [GREEDY], temperature=0.0)[0]

    def step(self, number: int) -> dict[str, Any]:
        """Sample the responses of a step (from 1)."""
        prompts = [ids for ids in self.scenario.prompt_ids(number) for _ in range(self.scenario.group)]
        started = time.perf_counter()
        texts = self.llama.sample(prompts, self.scenario.lengths(number))
        wall = time.perf_counter() - started
        return {"wall": wall, "lengths": [len(ids) for ids in texts], "greedy": self.greedy}
