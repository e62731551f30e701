from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from realign.api import MicroBatchSpec, stat_values
from realign.engines import Causal, Lora, OptimizerSpec, TransformersModel, ValueHead
from tests.tiny import random_sample, save_tiny

ONE = MicroBatchSpec()
LENGTHS = ((9, 4, 6), (12,))
DECAY = 0.75
STEP = OptimizerSpec(lr=1e-2, grad_clip=None, ema_decay=DECAY)


def load(folder, **fields):
    spec = TransformersModel(str(folder), device="cpu", optimizer=STEP, **fields)
    return spec.load("actor", seed=0).machine


def step(engine, seed=0, step_if=None):
    def loss(out, mb):
        values = 0 if engine.value_head is None else out.values().sum()
        return out.logprobs().sum() + values, {}

    data = random_sample(LENGTHS, seed=seed)
    return stat_values(engine.train_batch(data, ONE, loss, lambda d: d["loss_mask"].sum(), step_if))


def test_the_average_follows_the_formula_and_is_saved_beside_the_model(tmp_path):
    engine = load(save_tiny(tmp_path / "m", "llama", tie_word_embeddings=True), head=Causal(ValueHead()))
    own = dict(engine.network.named_parameters())
    want = {name: p.detach().clone().double() for name, p in own.items()}
    for seed in range(4):
        step(engine, seed)
        want = {name: DECAY * ema + (1 - DECAY) * own[name].detach().double() for name, ema in want.items()}
    step(engine, step_if=lambda stats: False)  # without an optimizer step, the average does not change
    trained = {name: p.detach().clone() for name, p in own.items()}
    engine.save(tmp_path / "out" / "actor")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["actor", "actor_ema"]
    assert all(torch.equal(p, trained[name]) for name, p in own.items())
    for folder, wanted in (("actor", trained), ("actor_ema", want)):
        module = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / folder)
        head = load_file(tmp_path / "out" / folder / "value_head.safetensors")
        found = {f"module.{n}": p for n, p in module.named_parameters()} | {
            f"value_head.{n}": p for n, p in head.items()
        }
        assert found.keys() == wanted.keys()
        for name, p in found.items():
            torch.testing.assert_close(p.detach(), wanted[name].float(), atol=1e-6, rtol=1e-6, msg=name)
        assert module.lm_head.weight is module.model.embed_tokens.weight
    assert max(float((trained[n] - want[n]).abs().max()) for n in want) > 1e-3


def test_the_average_of_adapters_is_saved_merged(tmp_path):
    engine = load(save_tiny(tmp_path / "m"), trains=Lora(rank=4))
    for seed in range(3):
        step(engine, seed)
    layer = engine.module.model.layers[0].mlp.up_proj
    engine.save(tmp_path / "actor")
    parameters = {id(p): a for p, a in zip(engine._average.parameters, engine._average.average, strict=True)}
    a, b = (parameters[id(x["default"].weight)] for x in (layer.lora_A, layer.lora_B))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "actor_ema").model.layers[0].mlp.up_proj.weight
    torch.testing.assert_close(found, layer.base_layer.weight + 8 * b @ a, atol=1e-6, rtol=1e-6)
    assert len(parameters) == 2 * 7 * 3  # adapters of seven linear layers in three blocks; the base has no average


def test_the_average_continues_exactly(tmp_path):
    folder = save_tiny(tmp_path / "m")
    whole, first, second = load(folder), load(folder), load(folder)
    for seed in range(3):
        step(whole, seed)
    for seed in range(2):
        step(first, seed)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    step(second, 2)
    for a, b in zip(whole._average.average, second._average.average, strict=True):
        assert torch.equal(a, b)
    plain = TransformersModel(str(folder), optimizer=replace(STEP, ema_decay=None)).load("actor", seed=0).machine
    with pytest.raises(ValueError, match=r"the engine has averaged weights, but the saved state does not"):
        second.load_state_dict(plain.state_dict())
