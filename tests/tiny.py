"""Tiny models of all supported families and a tiny tokenizer, built in memory without downloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from realign.api import MicroBatchSpec, SequenceSample, masked_max, masked_mean, stat_values
from realign.engines.training.optimizer import OptimizerSpec
from realign.engines.training.transformers_engine import TransformersEngine
from realign.functional import nll_loss
from realign.interfaces.components import TokenMean
from realign.models.network.attention import ATTENTION
from realign.models.network.settings import NetworkSettings

SPECIAL = ("<pad>", "<bos>", "<eos>")
TEXT = "0123456789+-*/=()., :?!'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\n"
VOCAB = 97
EOS = 2

_GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 1}
_GPT2 |= {"eos_token_id": 2, "pad_token_id": 0}
_OPT = {"vocab_size": VOCAB, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
_OPT |= {"max_position_embeddings": 128, "word_embed_proj_dim": 48, "pad_token_id": 0, "bos_token_id": 1}
_OPT |= {"eos_token_id": 2, "do_layer_norm_before": True}
_LLAMA = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
_LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
_LLAMA |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GEMMA = {**_LLAMA, "head_dim": 24, "sliding_window": 5, "query_pre_attn_scalar": 24, "num_hidden_layers": 4}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "qwen2": {**_LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {**_LLAMA, "head_dim": 24},
    "mistral": {**_LLAMA, "sliding_window": 5, "head_dim": 24},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**_GEMMA, "sliding_window_pattern": 2},
    "phi3": {**_LLAMA, "sliding_window": 5},
    "opt": _OPT,
    "gpt_neox": {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
    "qwen3_moe": {**_LLAMA, "head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {**_LLAMA, "num_local_experts": 4, "sliding_window": 5},
}
"""Config values of supported families: sliding windows, soft caps, shared heads, odd head sizes and experts."""

UNPACKED: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    "falcon": {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "alibi": False,
    },
}
"""Families whose own attention ignores the registered function, so that they run unpacked."""

OTHERS: dict[str, dict[str, Any]] = {
    "gpt_oss": {**_LLAMA, "head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "granite": {**_LLAMA, "logits_scaling": 3.0},
    "cohere2": {**_LLAMA, "head_dim": 16, "sliding_window": 5, "logit_scale": 0.25},
    "olmo2": _LLAMA,
}
"""Further supported families: attention sinks, scaled logits, and norms in unusual places."""

CLASSES = {
    "causal": AutoModelForCausalLM,
    "score": AutoModelForSequenceClassification,
    "value": AutoModelForTokenClassification,
}


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """Return the config of a tiny model with a vocabulary of `VOCAB` tokens and 128 positions."""
    return AutoConfig.for_model(family, **{**FAMILIES, **OTHERS, **UNPACKED}[family] | overrides)


def tiny_model(
    family: str = "qwen2", *, head: str = "causal", seed: int = 0, attention: str = ATTENTION, **overrides: Any
) -> PreTrainedModel:
    """Return a tiny model in eval mode and fp32. Its random weights are large enough that attention matters.

    Args:
        family: key of `FAMILIES`, `OTHERS` or `UNPACKED`.
        head: causal | score | value.
        seed: seed of the weights.
        attention: name of transformers' attention implementation.
        overrides: config values.
    """
    extra = {} if head == "causal" else {"num_labels": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(family, initializer_range=0.1, **extra, **overrides)
        model = CLASSES[head].from_config(config, attn_implementation=attention, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # biases start at 0, which would hide errors
                torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def tiny_engine(
    family: str = "qwen2", *, optimizer: OptimizerSpec | None = None, model: dict[str, Any] | None = None, **engine: Any
) -> TransformersEngine:
    """Return an engine over a tiny model. `model` is passed to `tiny_model`, and `engine` to `engine_over`."""
    return engine_over(tiny_model(family, **(model or {})), optimizer=optimizer, **engine)


def engine_over(module: Any, **engine: Any) -> TransformersEngine:
    """Return an engine over a model; `engine` contains fields of `NetworkSettings` and arguments of the engine."""
    names = {field.name for field in fields(NetworkSettings)} & engine.keys()
    settings = NetworkSettings(**{name: engine.pop(name) for name in names})
    return TransformersEngine("actor", module, tiny_tokenizer(), settings, seed=0, **engine)


def random_sample(lengths: Sequence[Sequence[int]], *, seed: int = 0, prompt: int = 2) -> SequenceSample:
    """Return random text. `lengths` are the lengths of sequences by prompt, and `prompt` is the number of prompt
    tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = [[torch.randint(3, VOCAB, (n,), generator=generator) for n in group] for group in lengths]
    given = [[torch.arange(n) < prompt for n in group] for group in lengths]
    sample = SequenceSample.from_sequences([f"p{i}" for i in range(len(lengths))], {"input_ids": ids})
    sample = sample.with_tokens(prompt_mask=given)
    return sample.with_tokens(loss_mask=~sample["prompt_mask"])


def ids(text: str) -> list[int]:
    """Return the ids of text in the tiny tokenizer. A full stop is the end token."""
    return [EOS if c == "." else 3 + TEXT.index(c) for c in text]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per character of `TEXT`, `SPECIAL` as ids 0 to 2, and reserved tokens up to
    `VOCAB`."""
    tokens = [*SPECIAL, *TEXT]
    tokens += [f"<r{i}>" for i in range(VOCAB - len(tokens))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<r0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<r0>",
        clean_up_tokenization_spaces=False,
    )


def save_tiny(folder: Path, family: str = "llama", **model: Any) -> Path:
    """Write a tiny model and the tiny tokenizer as a Hugging Face folder. `model` is passed to `tiny_model`.

    The default is not qwen2: in its folders, transformers would load Qwen's own tokenizer, which splits text
    differently.
    """
    tiny_model(family, **{"attention": "eager", **model}).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


ONE = MicroBatchSpec()


# The first step of Adam is lr * sign(gradient), which would hide errors. A large eps keeps the step proportional to
# the gradient, so that equal parameters imply equal gradients.
STEP = OptimizerSpec(lr=1e-2, eps=1.0, grad_clip=None)


class Likelihood:
    """Supervised loss with a choice of aggregation, as an interface defines it."""

    def __init__(self, aggregation=None):
        self.aggregation = aggregation or TokenMean()

    def loss(self, output, data):
        mask_T = data["loss_mask"]
        logprobs_T, entropy_T = output.logprobs_and_entropy(where_T=mask_T)
        nll_T = nll_loss(logprobs_T, mask_T)
        loss = self.aggregation.total(nll_T - 0.01 * entropy_T, mask_T, data.cu_seqlens())
        return loss, {
            "nll": masked_mean(nll_T, mask_T),
            "nll_max": masked_max(nll_T, mask_T),
            "pair": (nll_T.detach().sum(), mask_T.sum()),
        }

    def weight(self, data):
        return self.aggregation.weight(data["loss_mask"], data.cu_seqlens())


def train(engine, data, spec=ONE, loss=None):
    loss = loss or Likelihood()
    return engine.train_batch(data, spec, loss.loss, loss.weight)


def weights(engine):
    return {name: x.detach().clone() for name, x in engine.module.named_parameters()}


def logprobs(engine, data, spec=ONE):
    return engine.forward(data, spec, lambda out, mb: mb.with_tokens(logprobs=out.logprobs()))["logprobs"]


def lower_logprobs(engine, data, steps=1):
    """Train to make the sequences less likely, and return the engine."""
    for _ in range(steps):
        engine.train_batch(data, ONE, lambda out, mb: (out.logprobs().sum(), {}), lambda d: d["loss_mask"].sum())
    return engine


def gradients(engine, data, spec, loss):
    """Return the gradient by name, and the metrics, of one step."""
    stats = engine.accumulate(data, spec, loss, torch.tensor(30.0))
    return {n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None}, stat_values(stats)


def assert_same(a, b, atol=1e-6):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], atol=atol, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
