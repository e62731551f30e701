from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from realign.api import MicroBatchSpec, stat_values
from realign.engines import OptimizerSpec, SharedModel, TransformersModel
from realign.models import Causal, Lora, ValueHead
from tests.tiny import logprobs, random_sample, save_tiny, tiny_engine


def test_weights_of_another_engine_make_it_compute_the_same_bit_by_bit():
    one, other = tiny_engine("llama", model={"seed": 1}), tiny_engine("llama", model={"seed": 2})
    data = random_sample(((9, 4), (6,)))
    assert not logprobs(one, data).equal(logprobs(other, data))
    other.load_weights(one.weights())
    assert logprobs(one, data).equal(logprobs(other, data))
    assert all(other.weights()[name].equal(x) for name, x in one.weights().items())


def test_a_value_head_goes_along(tmp_path):
    path = str(save_tiny(tmp_path / "m", "llama"))
    one, other = (
        TransformersModel(path, device="cpu", head=Causal(ValueHead(1))).load(role, seed=seed).engine
        for role, seed in (("critic", 0), ("target", 1))
    )
    assert any(name.startswith("value_head.branch.") for name in one.weights())
    name = "value_head.head.0.weight"
    with torch.no_grad():
        one.weights()[name].add_(1)
    other.load_weights(one.weights())
    assert other.weights()[name].equal(one.weights()[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"extra": torch.zeros(1)}, r"models.actor: .* 'extra' is not a weight of the model"),
        (
            lambda w: {name: x for name, x in w.items() if name != "lm_head.weight"},
            r"models.actor: .* 'lm_head.weight' is missing in the given weights",
        ),
        (
            lambda w: w | {"model.norm.weight": torch.zeros(3)},
            r"models.actor: .* 'model.norm.weight' has shape \[3\], expected \[\d+\]",
        ),
    ],
)
def test_other_weights_are_refused_and_nothing_has_changed(change, message):
    engine = tiny_engine("llama")
    before = {name: x.clone() for name, x in engine.weights().items()}
    with pytest.raises(ValueError, match=message):
        engine.load_weights(change({name: x + 1 for name, x in before.items()}))
    assert all(engine.weights()[name].equal(x) for name, x in before.items())


def test_who_shares_a_model_gives_its_weights_and_takes_none(tmp_path):
    actor = TransformersModel(
        str(save_tiny(tmp_path / "m", "llama")), device="cpu", optimizer=OptimizerSpec(lr=1e-3), trains=Lora(rank=2)
    ).load("actor", seed=0)
    view = SharedModel("actor").load("view", seed=0, loaded={"actor": actor}).engine
    assert view.weights().keys() == actor.engine.weights().keys()
    with pytest.raises(ValueError, match=r"models.view shares the model of role 'actor'"):
        view.load_weights(view.weights())
    start = SharedModel("actor", "reference").load("ref", seed=0, loaded={"actor": actor}).engine
    with pytest.raises(ValueError, match=r"reference branch of role 'actor' without separate weights"):
        start.weights()


ONE = MicroBatchSpec()

LENGTHS = ((9, 4, 6), (12,))

DECAY = 0.75

STEP = OptimizerSpec(lr=1e-2, grad_clip=None, ema_decay=DECAY)


def load(folder, **fields):
    spec = TransformersModel(str(folder), device="cpu", optimizer=STEP, **fields)
    return spec.load("actor", seed=0).engine


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
        average = {f"module.{n}": p for n, p in module.named_parameters()} | {
            f"value_head.{n}": p for n, p in head.items()
        }
        assert average.keys() == wanted.keys()
        for name, p in average.items():
            torch.testing.assert_close(p.detach(), wanted[name].float(), atol=1e-6, rtol=1e-6, msg=name)
        assert module.lm_head.weight is module.model.embed_tokens.weight
    assert max(float((trained[n] - want[n]).abs().max()) for n in want) > 1e-3


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
    plain = TransformersModel(str(folder), optimizer=replace(STEP, ema_decay=None)).load("actor", seed=0).engine
    with pytest.raises(ValueError, match=r"the engine has averaged weights, but the saved state does not"):
        second.load_state_dict(plain.state_dict())
