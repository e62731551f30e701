"""Test optimizers, also those of other libraries: updates, groups, schedules, resuming, and errors."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

from realign.config import build_experiment, compose
from realign.engines import (
    OptimizerSpec,
    Schedule,
    ScheduleKind,
    TorchOptimizer,
    learning_rate,
)
from realign.engines.training.optimizer import usual_rate
from realign.engines.training.stepper import Stepper
from realign.engines.training.torch_optimizer import ELEMENTWISE, MixedOptimizer
from realign.errors import ConfigError, SettingsError
from realign.records.checkpoint.serialize import pack, unpack
from tests.tiny import lower_logprobs, random_sample, tiny_engine


def run(spec, start, gradients):
    """Return the parameters after each step of our optimizer, with the learning rates of the schedule."""
    parameter = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = spec.build([parameter])
    path = []
    for t, gradient in enumerate(gradients, start=1):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        spec.set_step(optimizer, lr=learning_rate(spec, t - 1), step=t)
        optimizer.step()
        path.append(parameter.detach().numpy().copy())
    return np.stack(path)


def gradients(n=20, shape=(3, 2)):
    # For small entries, the position of epsilon matters.
    return np.random.default_rng(0).normal(size=(n, *shape)) * np.array([1.0, 1e-5])


def test_a35_epsilon_hat_adam_equals_tensorflows():
    spec = OptimizerSpec(lr=0.01, betas=(0.9, 0.99), eps=1e-5, eps_hat=True)
    start = np.ones((3, 2))
    x, m, v, path = start.copy(), np.zeros_like(start), np.zeros_like(start), []
    for t, g in enumerate(gradients(), start=1):
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g**2
        lr_t = 0.01 * math.sqrt(1 - 0.99**t) / (1 - 0.9**t)
        x = x - lr_t * m / (np.sqrt(v) + 1e-5)
        path.append(x)
    got = run(spec, start, gradients())
    np.testing.assert_allclose(got, np.stack(path), rtol=1e-9)
    plain = run(OptimizerSpec(lr=0.01, betas=(0.9, 0.99), eps=1e-5), start, gradients())
    assert np.abs(got - plain).max() > 1e-3  # plain Adam is a different optimizer


def test_a35_the_bias_correction_of_each_step_has_its_own_number():
    """With betas of 1/2 and gradients of 4, m is 2 and 3, and v is 8 and 12."""
    first = math.sqrt(1 / 2) / (1 / 2) * 2 / (math.sqrt(8) + math.sqrt(8))
    second = math.sqrt(3 / 4) / (3 / 4) * 3 / (math.sqrt(12) + math.sqrt(8))
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    spec = OptimizerSpec(lr=1.0, betas=(0.5, 0.5), eps=math.sqrt(8), eps_hat=True, weight_decay=0.0, grad_clip=None)
    stepper = Stepper("actor", spec, [weight])
    path = []
    for _ in range(2):
        weight.grad = torch.full((1,), 4.0, dtype=torch.float64)
        stepper.step(torch.tensor(1.0), torch.tensor(1.0))
        path.append(weight.item())
    assert path == pytest.approx([-first, -first - second], rel=1e-9)


def test_adamw_against_its_paper():
    spec = OptimizerSpec(lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    start = np.ones((3, 2))
    x, m, v, path = start.copy(), np.zeros_like(start), np.zeros_like(start), []
    for t, g in enumerate(gradients(), start=1):
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g**2
        x = x - 0.01 * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-6) + 0.1 * x)
        path.append(x)
    np.testing.assert_allclose(run(spec, start, gradients()), np.stack(path), rtol=1e-9)


def test_trap_d14_learning_rate_by_formula():
    def rates(steps, **schedule):
        spec = OptimizerSpec(lr=2.0, schedule=Schedule(**schedule))
        return [learning_rate(spec, s) for s in range(steps)]

    assert rates(3) == [2.0, 2.0, 2.0]
    assert rates(4, warmup=3) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    # lr * (1 - step / n), as in openai/lm-human-preferences. After the end, the rate stays constant.
    assert rates(6, kind=ScheduleKind.linear, total=4) == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0, 0.0])
    assert rates(6, kind=ScheduleKind.linear, total=5, warmup=1) == pytest.approx([1.0, 2.0, 1.5, 1.0, 0.5, 0.0])
    cosine = [2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * s / 4))) for s in range(5)]
    assert rates(6, kind=ScheduleKind.cosine, total=4, min_ratio=0.1) == pytest.approx([*cosine, 0.2])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Schedule(kind=ScheduleKind.linear),
            "total=null: kind=linear needs a length. Set total, in optimizer steps.",
        ),
        (lambda: Schedule(kind="sine"), r"kind='sine': unknown choice \(valid: constant, linear, cosine\)"),
        (lambda: OptimizerSpec(betas=(0.9, 1.0)), r"betas\[1\]=1.0: must be at least 0 and below 1"),
    ],
)
def test_bad_values_are_refused_by_name(build, message):
    with pytest.raises(SettingsError, match=message):
        build()


DATA = random_sample(((9, 4, 6), (12,)))

TRAINABLE = [
    *(
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "SGD",
    ),
]


class EightBit(torch.optim.Optimizer):
    """SGD with momentum whose state is 8-bit numbers, a scale and a Python number, as in bitsandbytes."""

    def __init__(self, params, lr=1e-3, gain: float = 1.0):
        super().__init__(params, {"lr": lr, "gain": gain})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                old = state["code"].float() * state["scale"] if state else torch.zeros_like(p)
                new = 0.9 * old + p.grad
                scale = new.abs().max().reshape(1) / 127
                code = (new / scale).round().to(torch.int8)
                state |= {"step": state.get("step", 0) + 1, "code": code, "scale": scale}
                p -= group["lr"] * group["gain"] * code.float() * scale

    def state_dict(self):
        state = super().state_dict()
        inner = {i: {"code": x["code"], "scale": x["scale"]} for i, x in state["state"].items()}
        return {**state, "state": {i: {"step": x["step"], "inner": inner[i]} for i, x in state["state"].items()}}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        for i, p in enumerate(q for group in self.param_groups for q in group["params"]):
            inner = {name: x.clone() for name, x in state["state"][i]["inner"].items()}
            self.state[p] = {"step": int(state["state"][i]["step"]), **inner}


class Forgetful(EightBit):
    """An optimizer that leaves the conversion of its state to torch."""

    state_dict = torch.optim.Optimizer.state_dict
    load_state_dict = torch.optim.Optimizer.load_state_dict


def spec(name, **fields):
    return TorchOptimizer(of=f"torch.optim.{name}", **fields)


def weights(engine):
    return {name: x.clone() for name, x in engine.weights().items()}


def updated(optimizer, settings, start, gradients):
    parameter = nn.Parameter(start.clone())
    made = optimizer([parameter], settings)
    for step, gradient in enumerate(gradients, start=1):
        parameter.grad = gradient.clone()
        if isinstance(settings, OptimizerSpec):
            settings.set_step(made, lr=settings.lr, step=step)
        made.step()
    return parameter.detach()


@pytest.mark.parametrize("name", sorted({*ELEMENTWISE, "Adafactor"}))
def test_an_optimizer_updates_like_its_class(name):
    torch.manual_seed(0)
    start, gradients = torch.randn(4, 6), [torch.randn(4, 6) for _ in range(4)]
    cls = getattr(torch.optim, name)
    more = {"weight_decay": 0.1}
    ours = updated(lambda p, s: s.build(p), spec(name, lr=0.01, **more), start, gradients)
    theirs = updated(lambda p, s: cls(p, lr=0.01, **more), None, start, gradients)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, start)


def test_arguments_of_the_class_are_passed_and_checked():
    optimizer = spec("SGD", lr=1e-3, arguments={"momentum": 0.5, "nesterov": True}).build(
        [nn.Parameter(torch.ones(2, 2))]
    )
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["nesterov"]) == (0.5, True)
    assert spec("Adam", lr=1e-3, arguments={"betas": [0.8, 0.9]}).build([nn.Parameter(torch.ones(1))]).defaults[
        "betas"
    ] == (
        0.8,
        0.9,
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_muon_updates_the_matrices_of_layers_and_adamw_the_rest(family):
    settings = spec("Muon", lr=0.02, other_lr=1e-3, weight_decay=0.1, betas=(0.8, 0.9))
    engine = tiny_engine(family, optimizer=settings)
    optimizer = engine._stepper.optimizer
    assert isinstance(optimizer, MixedOptimizer)
    (muon,), (adamw,) = optimizer.first, optimizer.rest
    names = {id(p): name for name, p in engine.module.named_parameters()}
    by_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    by_adamw = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert by_muon | by_adamw == set(names.values())
    assert all(".layers." in name or ".h." in name for name in by_muon)
    assert any("emb" in name or "wte" in name for name in by_adamw)
    assert not any("norm" in name or "ln_" in name or "bias" in name for name in by_muon)
    before = weights(engine)
    lower_logprobs(engine, DATA, 1)
    assert {group["lr"] for group in muon.param_groups} == {0.02}
    assert {group["lr"] for group in adamw.param_groups} == {1e-3}
    assert adamw.defaults["betas"] == (0.8, 0.9)
    assert all(not torch.equal(x, before[name]) for name, x in engine.weights().items() if name in by_muon)


@pytest.mark.parametrize("of", [*(f"torch.optim.{name}" for name in TRAINABLE), f"{__name__}.EightBit"])
def test_resuming_from_a_checkpoint_is_exact(of):
    settings = TorchOptimizer(of=of, lr=1e-3, schedule=Schedule("linear", total=9), ema_decay=0.5)
    whole, first, second = (tiny_engine(optimizer=settings) for _ in range(3))
    lower_logprobs(whole, DATA, 4)
    packed = pack(lower_logprobs(first, DATA, 2).state_dict(), copy=True)
    state = unpack(packed.state, packed.tensors)
    second.load_state_dict(state)
    lower_logprobs(second, DATA, 2)
    for name, x in weights(whole).items():
        assert torch.equal(x, second.weights()[name])
    for one, two in zip(whole._average.average, second._average.average, strict=True):
        assert torch.equal(one, two)


def test_a_state_of_other_shapes_or_dtypes_is_refused():
    engine = lower_logprobs(tiny_engine(optimizer=spec("SGD", lr=0.1, arguments={"momentum": 0.9})), DATA)
    state = engine.state_dict()
    state["optimizer"]["optimizer"]["state"][0]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"parameter 0 has shape .*, but its momentum_buffer has \[3\]"):
        engine.load_state_dict(state)
    forgetful = lower_logprobs(tiny_engine(optimizer=TorchOptimizer(of=f"{__name__}.Forgetful", lr=0.1)), DATA)
    with pytest.raises(ValueError, match=r"Forgetful restores its code as torch\.float32, but it was torch\.int8"):
        forgetful.load_state_dict(forgetful.state_dict())


class ScheduleFree(torch.optim.SGD):
    """An optimizer with modes."""

    def train(self): ...

    def eval(self): ...


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "of='': must be the import path of an optimizer, such as torch.optim.SGD"),
        ({"of": "os.system"}, "of='os.system': must be the import path of an optimizer"),
        ({"of": "torch.optim.Nothing"}, "of=torch.optim.Nothing: must be a class derived from torch.optim.Optimizer"),
        ({"of": "torch.nn.Linear"}, "must be a class derived from torch.optim.Optimizer"),
        ({"of": "no_such_package.Adam"}, "of=no_such_package.Adam: cannot be imported"),
        ({"of": "torch.optim.LBFGS"}, "torch.optim.LBFGS: it evaluates the loss several times in each step"),
        ({"of": "torch.optim.SparseAdam"}, "it needs sparse gradients"),
        ({"of": "torch.optim.Rprop"}, "it ignores lr after the first step"),
        ({"of": f"{__name__}.ScheduleFree"}, "it must be told about training and evaluation"),
        ({"of": "torch.optim.SGD", "betas": (0.8, 0.9)}, r"betas=\(0.8, 0.9\): it concerns AdamW. Set arguments.betas"),
        ({"of": "torch.optim.SGD", "eps_hat": True}, "eps_hat=True: it concerns AdamW"),
        ({"of": "torch.optim.SGD", "other_lr": 0.1}, "other_lr=0.1: SGD updates all weights"),
        (
            {"of": "torch.optim.SGD", "arguments": {"momentums": 1}},
            "momentums: torch.optim.SGD does not take .* momentum",
        ),
        ({"of": "torch.optim.SGD", "arguments": {"maximize": True}}, "maximize: torch.optim.SGD does not take"),
        ({"of": "torch.optim.SGD", "arguments": {"momentum": -1}}, "refuses them: Invalid momentum value: -1"),
        ({"of": f"{__name__}.EightBit", "weight_decay": 0.1}, "EightBit has no weight decay"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused_by_name(fields, message):
    with pytest.raises(SettingsError, match=message):
        TorchOptimizer(**fields)


def optimizer_of(tmp_path, *words):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1", "response": "2"}\n')
    config = compose(["experiment=sft", "models.actor.path=x", f"data.path={tmp_path / 'pairs.jsonl'}", *words])
    experiment = build_experiment(config)
    return experiment.models["actor"].optimizer, experiment.resolved["models"]["actor"]["optimizer"]


def test_a_config_names_the_class_and_its_arguments(tmp_path):
    from realign.config.construct import build

    words = ["_target_=torch.optim.Muon", "lr=0.02", "momentum=0.9", "other_lr=1e-4", "weight_decay=0.1"]
    made, resolved = optimizer_of(tmp_path, *(f"models.actor.optimizer.{word}" for word in words))
    assert made == spec(
        "Muon",
        lr=0.02,
        other_lr=1e-4,
        weight_decay=0.1,
        arguments={"momentum": 0.9},
        schedule=Schedule("cosine", warmup=10, total=100),
    )
    assert build(resolved, OptimizerSpec, "optimizer") == made
    assert TorchOptimizer.fields_for("torch.optim.SGD", {"betas": 1, "lr": 2}) == {
        "of": "torch.optim.SGD",
        "arguments": {"betas": 1},
        "lr": 2,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["_target_=torch.optim.SGD", "momentums=1"],
            r"models\.actor\.optimizer.*momentums: torch\.optim\.SGD does not",
        ),
        (["_target_=torch.optim.LBFGS"], r"models\.actor\.optimizer.*it evaluates the loss several times"),
        (["_target_=torch.nn.Linear"], r"models\.actor\.optimizer\._target_: Linear is not a OptimizerSpec"),
        (
            ["_target_=bitsandbytes.optim.AdamW8bit"],
            r"models\.actor\.optimizer.*bitsandbytes is not installed. Run pip install 'realign-rl\[quantization\]'",
        ),
        (["_target_=subprocess.Popen"], r"part of Python's standard library"),
        (["_target_=torch.optim.SGD", "lr=-1"], r"models\.actor\.optimizer\.lr=-1.*: must be at least 0"),
    ],
)
def test_a_config_with_a_wrong_optimizer_names_the_key(tmp_path, monkeypatch, words, message):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=message):
        optimizer_of(tmp_path, *(f"models.actor.optimizer.{word}" for word in words))


@pytest.mark.parametrize(
    ("weights", "adapters", "critic", "expected"),
    [
        (300_000, False, False, 1e-4),
        (134_515_008, False, False, 1e-5),  # SmolLM2-135M
        (596_049_920, False, False, 1e-5),  # Qwen3-0.6B
        (1_543_714_304, False, False, 2e-6),
        (7_615_616_512, False, False, 1e-6),
        (7_615_616_512, True, False, 1e-5),
        (7_615_616_512, False, True, 5e-6),
    ],
)
def test_the_usual_rate_follows_from_the_size(weights, adapters, critic, expected):
    assert usual_rate(weights, adapters=adapters, critic=critic) == pytest.approx(expected)
