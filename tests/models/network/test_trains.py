"""Test the declarations of each choice of `trains`. Training is tested in test_lora, test_shared_model and
test_transformers_model.


"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.config.construct import build
from realign.engines import OptimizerSpec, TransformersModel
from realign.errors import ConfigError
from realign.models import Causal, Lora, ValueHead
from tests.encoder_decoders import save_pair
from tests.tiny import logprobs, lower_logprobs, random_sample, save_tiny

MODEL = {"_target_": "realign.engines.TransformersModel", "path": "nowhere", "optimizer": {"lr": 0.1}}


@pytest.mark.parametrize(
    ("trains", "message"),
    [
        ({"layers": 2}, "unknown key 'models.actor.trains.layers': it is a setting of TopLayers, not of All"),
        (
            {"_target_": "realign.models.TopLayers", "layers": 2, "rank": 4},
            "unknown key 'models.actor.trains.rank': it is a setting of Lora, not of TopLayers",
        ),
        (
            {"_target_": "realign.models.TopLayers"},
            "models.actor.trains.layers is missing: give it a value (int)",
        ),
        (
            {"_target_": "realign.models.Trained"},
            "models.actor.trains._target_: Trained is a base class (All, Lora, TopLayers of realign.models would fit)",
        ),
        (
            {"_target_": "realign.models.Score"},
            "models.actor.trains._target_: Score is not a Trained (All, Lora, TopLayers of realign.models would fit)",
        ),
    ],
)
def test_a_choice_has_its_own_settings_only(trains: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build({**MODEL, "trains": trains}, TransformersModel, "models.actor")
    assert str(error.value).startswith(message)


ONE = MicroBatchSpec()
STEP = OptimizerSpec(lr=1e-2, grad_clip=None)
LENGTHS = ((9, 4, 6), (12,), (3, 5))


def load(folder, lora=None, **fields):
    spec = TransformersModel(str(folder), device="cpu", optimizer=STEP, trains=lora or Lora(rank=4), **fields)
    return spec.load("actor", seed=0).engine


def plain_logprobs(module, data):
    parts = []
    for ids in data.sequences():
        logp = module(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1).detach()
        parts.append(torch.cat([torch.zeros(1), logp[torch.arange(len(ids) - 1), ids[1:]]]))
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("family", "config"), [("llama", {"tie_word_embeddings": True}), ("gpt2", {}), ("qwen3_moe", {})]
)
def test_the_base_stays_and_the_saved_folder_is_the_trained_model(tmp_path, family, config):
    folder = save_tiny(tmp_path / "m", family, **config)
    engine, data = load(folder), random_sample(LENGTHS)
    base = {n.replace(".base_layer", ""): p for n, p in engine.module.named_parameters() if "lora_" not in n}
    start = {name: p.detach().clone() for name, p in base.items()}
    lower_logprobs(engine, data, 3)
    assert all(torch.equal(p, start[name]) for name, p in base.items())
    assert not any(p.requires_grad for p in base.values())
    engine.save(tmp_path / "out")
    engine.save(tmp_path / "out")
    assert all(torch.equal(p, start[name]) for name, p in base.items())  # weights are not merged in place
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    want = logprobs(engine, data)
    torch.testing.assert_close(plain_logprobs(merged.eval(), data), want, atol=1e-5, rtol=1e-5)
    original = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert (plain_logprobs(original, data) - want).abs().max() > 1e-2
    moved = {n for n, p in merged.named_parameters() if not torch.equal(p, dict(original.named_parameters())[n])}
    assert all(p.ndim > 1 for n, p in merged.named_parameters() if n in moved)
    assert family != "qwen3_moe" or any("experts" in n for n in moved)
    assert not any("emb" in n or "wte" in n or "lm_head" in n for n in moved)
    again = TransformersModel(str(tmp_path / "out")).load("actor", seed=0).engine
    torch.testing.assert_close(logprobs(again, data), want, atol=1e-5, rtol=1e-5)


def test_adapters_compute_what_the_paper_says(tmp_path):
    engine = load(save_tiny(tmp_path / "m", "llama"), Lora(rank=2, alpha=6, target_modules=["q_proj"]))
    data = random_sample(LENGTHS)
    lower_logprobs(engine, data, 2)
    layer = engine.module.model.layers[1].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert (a.shape, b.shape) == ((2, 64), (64, 2))
    assert not hasattr(engine.module.model.layers[1].self_attn.k_proj, "lora_A")
    engine.save(tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.layers[1].self_attn.q_proj.weight
    torch.testing.assert_close(merged, layer.base_layer.weight + 3 * b @ a, atol=1e-6, rtol=1e-6)
    assert b.any()


def test_adapters_alone_are_a_folder_of_peft(tmp_path):
    folder = save_tiny(tmp_path / "m")
    engine, data = load(folder, Lora(rank=4, merge_on_save=False)), random_sample(LENGTHS)
    lower_logprobs(engine, data, 3)
    engine.save(tmp_path / "out")
    assert not list((tmp_path / "out").glob("model*.safetensors"))
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 32, str(folder))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "out")
    torch.testing.assert_close(plain_logprobs(adapted.eval(), data), logprobs(engine, data), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_with_adapters_answers(tmp_path, dtype):
    engine = load(save_tiny(tmp_path / "m"), head=Causal(ValueHead(1)), dtype=dtype, gradient_checkpointing=True)
    data = random_sample(LENGTHS)
    lower_logprobs(engine, data, 3)
    prompts = SequenceSample.from_sequences(["a", "b"], {"prompt_ids": [[[5, 6, 7]], [[8, 9]]]})
    answered = engine.generate(prompts, GenerationConfig(n=2, max_new_tokens=6, fixed_length=True), seed=1)
    mask_T = answered["loss_mask"]
    scored = logprobs(engine, answered)[mask_T]
    limit = 1e-5 if dtype == "float32" else 5e-2
    torch.testing.assert_close(scored, answered["logprobs"][mask_T], atol=limit, rtol=limit)


def test_a_model_with_adapters_continues_exactly(tmp_path):
    folder, data = save_tiny(tmp_path / "m"), random_sample(LENGTHS)
    whole, first, second = load(folder), load(folder), load(folder)
    lower_logprobs(whole, data, 3)
    lower_logprobs(first, data, 2)
    second.load_state_dict(first.state_dict())
    lower_logprobs(second, data, 1)
    assert torch.equal(logprobs(second, data), logprobs(whole, data))


def test_bad_adapters_are_refused(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "m", "llama")
    with pytest.raises(ConfigError, match=r"models\.actor\.trains: .*c_attn"):
        load(folder, Lora(target_modules=["c_attn"]))
    with pytest.raises(ConfigError, match=r"target_modules=\['lm_head'\]: LoRA cannot adapt the head"):
        load(folder, Lora(target_modules=["lm_head"]))
    with pytest.raises(ConfigError, match="LoRA cannot adapt the embeddings"):
        load(folder, Lora(target_modules=["embed_tokens"]))
    tied = save_tiny(tmp_path / "tied", "llama", tie_word_embeddings=True)
    for layer in ("lm_head", "embed_tokens"):
        with pytest.raises(ConfigError, match="LoRA cannot adapt the embeddings and head"):
            load(tied, Lora(target_modules=["q_proj", layer]))
    with pytest.raises(ConfigError, match="LoRA cannot adapt the embeddings"):  # those of the encoder are the same
        load(save_pair("t5", tmp_path / "t5"), Lora(target_modules=["embed_tokens"]))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ConfigError, match=r"models\.actor\.trains=lora: peft is not installed. Run pip install 'realign-rl\[peft\]'"
    ):
        load(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_base_model_and_adapter_that_are_saved_apart_are_the_trained_model(tmp_path, tied):
    """Also with merge_on_save, for servers that get adapters alone."""
    folder = save_tiny(tmp_path / "m", "llama", tie_word_embeddings=tied)
    engine, data = load(folder, Lora(rank=3, merge_on_save=True)), random_sample(LENGTHS)
    lower_logprobs(engine, data, 3)
    assert engine.adapter_rank == 3
    engine.save_base(tmp_path / "base")
    engine.save_adapter(tmp_path / "adapter")
    base, info = AutoModelForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    start = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(x, start.state_dict()[name]) for name, x in base.state_dict().items())
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(plain_logprobs(adapted, data), logprobs(engine, data), atol=1e-5, rtol=1e-5)
    assert {path.name for path in (tmp_path / "adapter").glob("*.safetensors")} == {"adapter_model.safetensors"}
