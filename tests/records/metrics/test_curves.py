"""Test the learning curves of a run."""

from __future__ import annotations

import math

import pytest
from matplotlib.axes import Axes

from realign.api import Panel
from realign.records.metrics.curves import FURTHER, HELD_OUT, TRAINING, colors, draw_curves, smooth_curve, split_unit


def test_training_and_evaluation_have_their_colors_and_no_two_metrics_share_one():
    assert colors(["eval/reward", "reward"], "eval/") == {"eval/reward": HELD_OUT, "reward": TRAINING}
    many = colors(["a", "eval/a", "b", "eval/b", "c"], "eval/")
    assert many == {"a": TRAINING, "eval/a": HELD_OUT, "b": FURTHER[0], "eval/b": FURTHER[1], "c": FURTHER[2]}


def test_smoothing_keeps_a_straight_line_and_reduces_noise():
    line = [0.5 * i for i in range(100)]
    averages = smooth_curve(line)
    assert averages is not None
    assert averages[5:-5] == pytest.approx(line[5:-5])
    noisy = smooth_curve([1.0 if i % 2 else -1.0 for i in range(300)])
    assert noisy is not None
    assert max(map(abs, noisy[20:-20])) < 0.2


def test_values_that_are_not_finite_do_not_spread():
    values = [1.0] * 100
    values[50] = math.nan
    assert smooth_curve(values) == [1.0] * 100


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


PANELS = (
    Panel("reward", {"reward": "sampled"}),
    Panel("likelihood", {"nll": "training batch"}),
    Panel("entropy", {"entropy": "training batch"}),
)


def test_points_stand_at_their_steps_and_metrics_that_stay_at_0_are_left_out(tmp_path, monkeypatch):
    drawn: dict[str, tuple[list[float], list[float]]] = {}
    plot = Axes.plot

    def watched(self, x, y, **kwargs):
        drawn[kwargs["label"]] = (list(x), list(y))
        return plot(self, x, y, **kwargs)

    monkeypatch.setattr(Axes, "plot", watched)
    history = [{"step": i, "reward": i / 4, "eval/reward": 0.0, "entropy": 1.0} for i in range(5)]
    del history[0]["reward"]
    draw_curves({"run": history}, tmp_path / "c.png", title="x", panels=PANELS)
    quarters = [0.25, 0.5, 0.75, 1.0]
    assert drawn == {
        "sampled": (quarters, quarters),
        "training batch": ([0.0, *quarters], [1.0] * 5),
    }


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="No curves for"):
        draw_curves({"x": [{"step": 1, "unknown": 1.0}]}, tmp_path / "c.png", title="x", panels=PANELS)
