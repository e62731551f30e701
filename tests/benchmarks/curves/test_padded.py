"""Compare the preset `lm_human_preferences` with the independent implementation on identical samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.curves import padded, runs, task
from benchmarks.curves.replay import replay, trained

STEPS = 20
TOLERANCE = 1e-5
RUN = runs.Run(width=32, steps=STEPS, batch=16, lr=1e-3, horizon=100)
"""Small batches; a horizon that moves the KL coefficient by 3% per step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("curves")
    task.prepare(path, width=32, rows=200, steps=40)
    return path


@pytest.fixture(scope="module")
def recorded(folder):
    """Train the preset with TensorFlow's Adam, see `record`."""
    return record(RUN, folder)


def record(run, folder):
    """Train the preset. Return the run and its steps."""
    runtime = runs.runtime_of(run, folder)
    steps = list(trained(runtime, STEPS))
    runtime.close()
    return run, steps


def difference(run, steps, folder, **changes):
    """Replay the samples with the independent implementation.

    Return the largest difference of a metric, relative above 1, and of a weight.
    """
    trainer = padded.PaddedPPO(folder / "model", replace(run.constants(), **changes))
    differences = [replay(trainer, step) for step in steps]
    return max(x.metric for x in differences), max(x.weight for x in differences)


@pytest.mark.parametrize(
    ("adam", "pad_left"),
    [
        ("tensorflow", False),
        pytest.param("tensorflow", True, marks=pytest.mark.slow),
        pytest.param("pytorch", True, marks=pytest.mark.slow),
    ],
)
def test_on_identical_samples_losses_metrics_and_weights_of_the_preset_are_those_of_the_padded_loop(
    adam, pad_left, recorded, folder
):
    run, steps = recorded if adam == RUN.adam else record(replace(RUN, adam=adam), folder)
    moved = (steps[-1].weights - steps[0].weights).abs().max()
    assert moved > 1e-2
    assert {len(query) for query in steps[0].queries} != {len(steps[0].queries[0])}  # some queries are padded
    metric, weight = difference(run, steps, folder, pad_left=pad_left)
    assert metric < TOLERANCE
    assert weight < TOLERANCE
