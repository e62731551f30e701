from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from realign.engines import OptimizerSpec, Schedule, ScheduleKind, ScheduleUnit, learning_rate
from realign.errors import SettingsError


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


def test_weight_decay_spares_biases_and_norms():
    spec = OptimizerSpec(lr=0.1, weight_decay=0.5, eps=1e-8)
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = spec.build([matrix, vector])
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    spec.set_step(optimizer, lr=spec.lr, step=1)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95))
    assert torch.equal(vector, torch.ones(2))


def test_one_fused_call_updates_all_parameters():
    optimizer = OptimizerSpec().build([torch.nn.Parameter(torch.ones(2, 2)) for _ in range(3)])
    assert all(group["fused"] for group in optimizer.param_groups)


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
        (lambda: Schedule(ScheduleKind.linear, total=0), "total=0: must be at least 1, or null"),
        (lambda: Schedule(warmup=-1), "warmup=-1: must be at least 0"),
        (lambda: Schedule(min_ratio=1.5), "min_ratio=1.5: must be at least 0 and at most 1"),
        (lambda: Schedule(kind="sine"), r"kind='sine': unknown choice \(valid: constant, linear, cosine\)"),
        (lambda: OptimizerSpec(lr=-1), "lr=-1: must be at least 0"),
        (lambda: OptimizerSpec(betas=(0.9, 1.0)), r"betas=\[0.9, 1.0\]: must be two numbers of at least 0 and below 1"),
        (lambda: OptimizerSpec(eps=0), "eps=0: must be above 0"),
        (lambda: OptimizerSpec(grad_clip=0.0), "grad_clip=0.0: must be above 0 and finite, or null"),
        (lambda: OptimizerSpec(weight_decay=-0.1), "weight_decay=-0.1: must be at least 0"),
        (lambda: OptimizerSpec(ema_decay=1.0), "ema_decay=1.0: must be above 0 and below 1, or null"),
        (lambda: OptimizerSpec(ema_decay=0.0), "ema_decay=0.0: must be above 0 and below 1, or null"),
        (lambda: OptimizerSpec(max_nonfinite_in_a_row=0), "max_nonfinite_in_a_row=0: must be at least 1"),
    ],
)
def test_bad_values_are_refused_by_name(build, message):
    with pytest.raises(SettingsError, match=message):
        build()


def test_names_are_taken_as_text():
    assert Schedule(kind="linear", total=3, unit="train_step").unit is ScheduleUnit.train_step


def test_a_run_shorter_than_its_warm_up_only_warms_up():
    spec = OptimizerSpec(lr=1.0, schedule=Schedule(ScheduleKind.cosine, warmup=20, total=10))
    assert [learning_rate(spec, step) for step in (0, 9)] == pytest.approx([1 / 21, 10 / 21])
    assert learning_rate(spec, 20) == 1.0
