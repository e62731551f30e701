"""Compare the preset `lm_human_preferences` with the independent implementation on identical samples."""

from __future__ import annotations

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


def difference(run, steps, folder):
    """Replay the samples with the independent implementation, which pads queries on the left.

    Return the largest difference of a metric, relative above 1, and of a weight.
    """
    trainer = padded.PaddedPPO(folder / "model", run.constants())
    differences = [replay(trainer, step) for step in steps]
    return max(x.metric for x in differences), max(x.weight for x in differences)


@pytest.mark.slow
def test_on_identical_samples_losses_metrics_and_weights_of_the_preset_are_those_of_the_padded_loop(folder):
    """Train the preset with TensorFlow's Adam."""
    runtime = runs.runtime_of(RUN, folder)
    steps = list(trained(runtime, STEPS))
    runtime.close()
    assert (steps[-1].weights - steps[0].weights).abs().max() > 1e-2
    assert {len(query) for query in steps[0].queries} != {len(steps[0].queries[0])}  # some queries are padded
    metric, weight = difference(RUN, steps, folder)
    assert metric < TOLERANCE
    assert weight < TOLERANCE
