from __future__ import annotations

import math

import pytest

from realign.runtime.metrics.curve_style import FURTHER, HELD_OUT, TRAINING, colors, smoothed, split_unit


def test_training_and_evaluation_have_their_colors_and_no_two_metrics_share_one():
    assert colors(["eval/reward", "reward"], "eval/") == {"eval/reward": HELD_OUT, "reward": TRAINING}
    many = colors(["a", "eval/a", "b", "eval/b", "c"], "eval/")
    assert many == {"a": TRAINING, "eval/a": HELD_OUT, "b": FURTHER[0], "eval/b": FURTHER[1], "c": FURTHER[2]}


def test_short_curves_are_not_smoothed():
    assert smoothed([1.0, 5.0] * 20) is None


def test_smoothing_keeps_a_straight_line_and_reduces_noise():
    line = [0.5 * i for i in range(100)]
    averages = smoothed(line)
    assert averages is not None
    assert averages[5:-5] == pytest.approx(line[5:-5])
    noisy = smoothed([1.0 if i % 2 else -1.0 for i in range(300)])
    assert noisy is not None
    assert max(map(abs, noisy[20:-20])) < 0.2


def test_values_that_are_not_finite_do_not_spread():
    values = [1.0] * 100
    values[50] = math.nan
    assert smoothed(values) == [1.0] * 100


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("KL (nats)", ("KL", "nats")),
        ("f(x) of y", ("f(x) of y", "")),
        ("plain", ("plain", "")),
        ("a (b) (c)", ("a (b)", "c")),
    ],
)
def test_the_unit_is_the_last_parenthesis_of_a_title(title, expected):
    assert split_unit(title) == expected
