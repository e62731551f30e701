"""Tiny random models of all families of causal language models in transformers."""

from __future__ import annotations

import copy
from types import EllipsisType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from realign.models.network.attention import ATTENTION
from tests.tiny import VOCAB

LARGEST = 5_000_000
"""Maximum number of parameters of a tiny model."""

_SIZES: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input",
    64: "hidden_size d_model n_embd embed_dim word_embed_proj_dim embedding_size model_dim emb_dim lru_width",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_attention_heads n_head n_heads num_heads "
    "decoder_attention_heads encoder_attention_heads attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts linear_num_value_heads",
    2: "num_key_value_heads num_experts_per_tok moe_k moe_topk num_experts_per_token linear_num_key_heads "
    "n_mamba_heads",
    16: "head_dim global_head_dim q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim linear_key_head_dim "
    "linear_value_head_dim state_size ssm_state_size mamba_d_state mamba_d_head mamba_head_dim "
    "hidden_size_per_layer_input",
    96: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff dim_ff intermediate_size_mlp",
    128: "max_position_embeddings n_positions max_seq_len n_ctx context_length mamba_d_ssm",
    32: "moe_intermediate_size shared_expert_intermediate_size",
    8: "qk_rope_head_dim attention_window mamba_n_heads mamba_num_heads time_step_rank mamba_dt_rank chunk_size "
    "mamba_chunk_size adapter_rank",
    1: "encoder_layers n_group topk_group mamba_n_groups n_groups bos_token_id num_memory_blocks",
    5: "sliding_window attention_window_size window_size",
    0: "pad_token_id",
}
_SMALL: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()}
_SMALL |= {"eos_token_id": 2} | dict.fromkeys(("initializer_range", "init_std", "initializer_factor"), 0.1)
_OPTIONAL = frozenset(
    {"head_dim", "pad_token_id", "sliding_window", "q_lora_rank", "moe_k", "n_inner", "num_key_value_heads"}
)
"""Settings that keep the value None."""
_HYBRID = ["linear_attention", "full_attention"] * 2
_SPARSE = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 6}

_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "deepseek_v32": _SPARSE,
    "dots1": {"n_shared_experts": 1, "head_dim": 16},
    "falcon": {"alibi": False, "head_dim": ...},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "glm_moe_dsa": _SPARSE,
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
        "intermediate_size": 96,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": _HYBRID},
    "hunyuan_v1_dense": {"head_dim": 16, "num_key_value_heads": 2},
    "hunyuan_v1_moe": {"head_dim": 16, "num_key_value_heads": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "ministral": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True},
    "rwkv": {"attention_hidden_size": 64},
    "xlstm": {"v_head_dim": ...},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings of single families; `...` keeps the default."""


def family_config(family: str) -> PreTrainedConfig:
    """Return the config of a tiny model: 4 layers, all kinds of layers that the default config has.

    Raises:
        ValueError: the family has a text model and others, or is too large even so.
    """
    default = AutoConfig.for_model(family)
    if hasattr(default, "text_config"):
        raise ValueError(f"{family} has a text model that is a family of its own")
    small: dict[str, Any] = {}
    for name, size in _SMALL.items():
        if _has(default, name) and not (name in _OPTIONAL and getattr(default, name) is None):
            small[name] = size
    if "kv_lora_rank" in small and "num_key_value_heads" in small:
        small["num_key_value_heads"] = 4
    if "qk_rope_head_dim" in small:
        small["head_dim"] = small["qk_rope_head_dim"]
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(kinds := getattr(default, name, None), list):
            kinds = list(dict.fromkeys(kinds))
            small[name] = [kinds[i % len(kinds)] for i in range(4)]
    own = _OWN.get(family, {})
    chosen = {k: v for k, v in (small | own).items() if not isinstance(v, EllipsisType)}
    try:
        return AutoConfig.for_model(family, **chosen)
    except AttributeError:  # the family derives the kinds of its layers from other settings
        return AutoConfig.for_model(family, **{k: v for k, v in chosen.items() if k != "layer_types"})


def _has(config: PreTrainedConfig, name: str) -> bool:
    try:
        return hasattr(config, name)
    except RuntimeError:  # gemma4_text: the setting differs between layers
        return False


def family_model(family: str, *, attention: str = ATTENTION) -> PreTrainedModel:
    """Return a tiny model with random weights, in eval mode, loaded as realign loads a model.

    Raises:
        ValueError: see `family_config`.
    """
    config = family_config(family)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{family} has {size} parameters in a tiny config")
    with torch.random.fork_rng(devices=[]):
        model = _built(config, attention)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # biases start at 0, which would hide errors
                torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def _built(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    def build(**implementation: str) -> PreTrainedModel:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, **implementation)

    try:
        return build(attn_implementation=attention)
    except KeyError as error:
        if error.args != (ATTENTION,):
            raise
        return build()
