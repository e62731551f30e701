"""Compare the preset `lm_human_preferences` with the independent implementation on identical samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.curves import padded, runs, task
from benchmarks.curves import recorded as recorded_batches
from benchmarks.curves.replay import replay, trained
from realign.errors import DataError

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


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.0},
        {"scaled_logprobs": False},
        {"kl_coef": 0.2},
        {"kl_target": 0.5},
        {"horizon": 10_000},
        {"gamma": 0.99},
        {"lam": 1.0},
        {"clip": 0.1},
        {"value_clip": 0.01},
        {"value_coef": 0.2},
        {"epochs": 3},
        {"lr": 1.001e-3},
        {"updates": STEPS + 1},
        {"betas": (0.9, 0.99)},
        {"eps": 1e-6},
        {"tensorflow_adam": False},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_comparison_detects_a_change_of_any_constant(changes, recorded, folder):
    run, steps = recorded
    metric, weight = difference(run, steps[:4], folder, **changes)
    assert max(metric, weight) > 3 * TOLERANCE


def spoken(words):
    return lambda ids: " ".join(words[i] for i in ids)


def test_scores_of_the_preset_are_those_of_the_independent_cut(recorded, folder):
    run, steps = recorded
    words = list(runs.vocabulary(folder))
    for step in steps:
        scores = padded.scores(step.responses, spoken(words), lambda text: runs.score_text(run.reward, text))
        assert torch.equal(scores, step.scores)
    assert any((step.scores == -1).any() and (step.scores != -1).any() for step in steps)


def test_queries_of_the_preset_are_those_of_the_independent_excerpt(recorded, folder):
    _, steps = recorded
    texts = list(task.passages(200, 0))
    every = {tuple(query) for query in padded.queries(texts, runs.vocabulary(folder), runs.QUERY_TOKENS)}
    assert {tuple(query) for step in steps for query in step.queries} == every


def test_a_query_ends_with_a_full_stop_after_the_first_one():
    known = {word: i for i, word in enumerate([".", "a", "b", "c"])}
    texts = ["a . b . c", "a . b c . c .", "a b", "a b c .", "a . b c"]
    assert padded.queries(texts, known, 4) == [[2, 0], [2, 3, 0], [1, 2, 3, 0]]


def test_a_response_is_scored_up_to_its_first_full_stop_after_a_position():
    words = [".", "a"]
    found = padded.scores(torch.tensor([[1, 0, 1, 0, 1], [0, 0, 1, 1, 1]]), spoken(words), len, after=2)
    assert found.tolist() == [len("a . a ."), -1.0]


def test_sampled_responses_do_not_depend_on_the_side_of_the_padding(folder):
    queries = [[5, 6, 7], [8], [9, 10]]
    left, between = (
        padded.PaddedPPO(folder / "model", padded.Constants(updates=1, pad_left=side)).sample(queries)
        for side in (True, False)
    )
    assert left.shape == (3, 24)
    assert torch.equal(left, between)


def test_the_first_step_of_adam_differs_by_the_place_of_epsilon():
    gradient, eps = 1e-4, 1e-5
    found = {}
    for tensorflow in (True, False):
        weight = torch.zeros(1, dtype=torch.float64)
        constants = padded.Constants(updates=1, eps=eps, tensorflow_adam=tensorflow)
        padded.Adam([weight], constants).step([torch.full((1,), gradient, dtype=torch.float64)], lr=1.0)
        found[tensorflow] = -float(weight)
    assert found[True] == pytest.approx(gradient / (gradient + eps / 0.001**0.5))
    assert found[False] == pytest.approx(gradient / (gradient + eps))


@pytest.mark.parametrize("adam", ["tensorflow", "pytorch"])
def test_on_recorded_queries_responses_and_rewards_both_implementations_are_equal(adam, folder, tmp_path):
    """The arrays have the shapes and the padding of those of openai/lm-human-preferences."""
    generator = torch.Generator().manual_seed(0)
    words = len(runs.vocabulary(folder))
    queries = torch.randint(words, (17, 12), generator=generator)
    for row, query in enumerate(queries):
        query[12 - row % 5 :] = words + 2  # padding on the right
    arrays = {
        "queries": queries,
        "responses": torch.randint(words, (17, 9), generator=generator),
        "rewards": torch.randn(17, 9, generator=generator),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array.numpy())
    batches = recorded_batches.read(tmp_path, vocabulary=words, batch=8)
    assert [len(batch.queries) for batch in batches] == [8, 8]
    assert [len(query) for query in batches[0].queries[:5]] == [12, 11, 10, 9, 8]
    run = replace(RUN, adam=adam, batch=8, steps=2, lr=1e-3)
    ours = list(recorded_batches.realign_records(run, 0.7, folder / "model", batches))
    theirs = list(recorded_batches.padded_records(run, 0.7, folder / "model", batches))
    assert len(ours) == len(theirs) == 2
    assert ours[0]["ratio_var"] > 1e-5
    for own, other in zip(ours, theirs, strict=True):
        assert own.keys() == other.keys()
        for name, value in own.items():
            assert value == pytest.approx(other[name], rel=TOLERANCE, abs=TOLERANCE), name


def test_recorded_arrays_of_other_shapes_are_refused(tmp_path):
    for name, shape in (("queries", (4, 3)), ("responses", (4, 2)), ("rewards", (4,))):
        np.save(tmp_path / f"{name}.npy", np.zeros(shape))
    with pytest.raises(DataError, match=r"rewards \(4,\): expected \[N, Q\], \[N, R\] and \[N, R\]"):
        recorded_batches.read(tmp_path, vocabulary=10, batch=2)
