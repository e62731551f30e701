"""Test that a model with a merged adapter is the model that peft computes, for each kind of adapter and of ties."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import (
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from realign.engines import TransformersModel
from realign.errors import DataError
from realign.models.network import merge
from realign.models.network.merge import merge_adapter
from tests.encoder_decoders import save_pair
from tests.tiny import VOCAB, save_tiny, tiny_tokenizer

IDS = torch.arange(3, 13)[None]
LORA = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
KINDS = {
    "plain": LORA,
    "head": {**LORA, "target_modules": ["q_proj", "lm_head"]},
    "embeddings": {**LORA, "target_modules": ["q_proj", "embed_tokens"]},
    "both": {**LORA, "target_modules": ["embed_tokens", "lm_head"]},
    "tied in peft": {**LORA, "target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "regex": {**LORA, "target_modules": r".*(layers\.0\..*_proj|lm_head)"},
    "all-linear": {**LORA, "target_modules": "all-linear"},
    "saved head": {**LORA, "modules_to_save": ["lm_head"]},
    "saved embeddings": {**LORA, "modules_to_save": ["embed_tokens"]},
    "saved both": {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved tied": {**LORA, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "dora": {**LORA, "use_dora": True},
    "dora of the head": {**LORA, "use_dora": True, "target_modules": ["lm_head"]},
    "rslora": {**LORA, "use_rslora": True},
    "patterns": {**LORA, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 16}},
    "bias": {**LORA, "bias": "lora_only"},
    "tokens": {**LORA, "trainable_token_indices": [5, 60]},
    "other tokens": {**LORA, "trainable_token_indices": {"embed_tokens": [5, 60], "lm_head": [7, 61]}},
    "tokens of the head": {**LORA, "trainable_token_indices": {"lm_head": [7, 61]}},
}


def save_adapter(base, folder, config, kind=AutoModelForCausalLM, words=None):
    """Save an adapter of random weights, and return the logits that peft computes."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = kind.from_pretrained(base, dtype=torch.float32)
        if words is not None:
            module.resize_token_embeddings(words, mean_resizing=False)
        adapted = get_peft_model(module, config).eval()
        with torch.no_grad():
            for p in adapted.parameters():
                p.add_(0.05 * torch.randn_like(p) * p.requires_grad)
            given = {"decoder_input_ids": IDS} if module.config.is_encoder_decoder else {}
            logits = adapted(input_ids=IDS, **given).logits
        adapted.save_pretrained(folder)
    return logits


def logits_of(module):
    with torch.no_grad():
        return module.eval()(IDS).logits


def assert_same(actual, wanted):
    assert (actual - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def merged(base, folder, kind=AutoModelForCausalLM):
    return merge_adapter(kind.from_pretrained(base, dtype=torch.float32), folder)


@pytest.mark.parametrize(
    ("kind", "tied"), [*((kind, True) for kind in KINDS), ("head", False), ("saved both", False), ("tokens", False)]
)
def test_a_merged_model_has_the_logits_of_peft_also_when_it_is_read_again(tmp_path, kind, tied):
    base = save_tiny(tmp_path / "base", tie_word_embeddings=tied, num_hidden_layers=1)
    wanted = save_adapter(base, tmp_path / "adapter", LoraConfig(task_type="CAUSAL_LM", **KINDS[kind]))
    model = merged(base, tmp_path / "adapter")
    assert_same(logits_of(model), wanted)
    model.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert_same(logits_of(again), wanted)
    same = torch.equal(again.lm_head.weight, again.model.embed_tokens.weight)
    assert again.config.tie_word_embeddings is same is (again.lm_head.weight is again.model.embed_tokens.weight)


def test_a_run_starts_from_the_model_that_peft_computes(tmp_path):
    base = save_tiny(tmp_path / "base", tie_word_embeddings=True)
    wanted = save_adapter(base, tmp_path / "adapter", LoraConfig(**KINDS["head"], task_type="CAUSAL_LM"))
    tiny_tokenizer().save_pretrained(tmp_path / "adapter")
    engine = TransformersModel(str(tmp_path / "adapter"), device="cpu").load("actor", seed=0).engine
    engine.save(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert_same(logits_of(again), wanted)


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(target_modules=["k_proj", "lm_head"], feedforward_modules=[], init_ia3_weights=False),
        LoHaConfig(r=2, target_modules=["q_proj", "lm_head"], init_weights=False),
        TrainableTokensConfig(token_indices=[5, 60], init_weights=False),
        VeraConfig(r=4, target_modules=["q_proj"]),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_other_kinds_of_adapters_are_merged_as_well(tmp_path, config):
    base = save_tiny(tmp_path / "base", tie_word_embeddings=True, num_hidden_layers=1)
    config.task_type = "CAUSAL_LM"
    wanted = save_adapter(base, tmp_path / "adapter", config)
    assert_same(logits_of(merged(base, tmp_path / "adapter")), wanted)


def test_an_adapter_that_has_no_weights_to_add_to_is_refused(tmp_path):
    base = save_tiny(tmp_path / "base")
    save_adapter(base, tmp_path / "adapter", PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(DataError, match=r"^PROMPT_TUNING adapters add inputs to a model, and cannot be merged"):
        merged(base, tmp_path / "adapter")


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_family_that_cannot_untie_its_embeddings_is_refused_or_right(tmp_path, family):
    base = save_pair(family, tmp_path / "base")
    config = LoraConfig(**LORA | {"target_modules": ["lm_head"]}, task_type="SEQ_2_SEQ_LM")
    wanted = save_adapter(base, tmp_path / "adapter", config, AutoModelForSeq2SeqLM)
    if family == "t5":
        with pytest.raises(DataError, match="one weight in each model of the family 't5'"):
            merged(base, tmp_path / "adapter", AutoModelForSeq2SeqLM)
        return
    model = merged(base, tmp_path / "adapter", AutoModelForSeq2SeqLM)
    model.save_pretrained(tmp_path / "merged")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        assert_same(again(IDS, decoder_input_ids=IDS).logits, wanted)


def test_a_merge_that_changes_the_model_is_refused(tmp_path, monkeypatch):
    base = save_tiny(tmp_path / "base", tie_word_embeddings=True)
    save_adapter(base, tmp_path / "adapter", LoraConfig(**KINDS["head"], task_type="CAUSAL_LM"))
    monkeypatch.setattr(merge, "_find_shared_and_adapted", lambda module: [])  # merges into both, as before
    with pytest.raises(DataError, match=r"cannot be merged: the logits of the merged model differ by \d\.\de"):
        merged(base, tmp_path / "adapter")


@pytest.mark.parametrize("words", [VOCAB + 3, VOCAB - 3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}])
def test_embeddings_of_added_tokens_come_with_the_adapter(tmp_path, words, tied, settings):
    base = save_tiny(tmp_path / "base", tie_word_embeddings=tied, num_hidden_layers=1)
    config = LoraConfig(**LORA, **settings, task_type="CAUSAL_LM")
    wanted = save_adapter(base, tmp_path / "adapter", config, words=words)
    assert wanted.shape[-1] == words
    model = merged(base, tmp_path / "adapter")
    assert model.config.vocab_size == words
    assert_same(logits_of(model), wanted)


def test_a_weight_that_is_not_finite_is_named(tmp_path):
    base = save_tiny(tmp_path / "base")
    save_adapter(base, tmp_path / "adapter", LoraConfig(**LORA, task_type="CAUSAL_LM"))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    name = min(weights)
    save_file(weights | {name: weights[name] * torch.nan}, file)
    with pytest.raises(DataError, match=rf"has a weight '{name}' that is not finite"):
        merged(base, tmp_path / "adapter")
