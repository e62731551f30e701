from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from realign.demo.sentiment import continuation, openings, prepare, vocabulary
from realign.rewards.sentiment import compound


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    sizes = {"demonstrations": 400, "pairs": 200, "held_out_pairs": 100, "held_out": 32}
    return prepare(tmp_path_factory.mktemp("task"), seed=0, **sizes)


def share_right(path: Path) -> float:
    """Return the fraction of pairs whose label agrees with VADER."""
    found = [compound(r["prompt"], r["chosen"], {}) - compound(r["prompt"], r["rejected"], {}) for r in rows(path)]
    assert 0 not in found
    return sum(difference > 0 for difference in found) / len(found)


def test_openings_have_no_tone_and_demonstrations_no_tone_on_average(task):
    assert {compound(opening, "", {}) for opening in openings()} == {0.0}
    tones = [compound(r["prompt"], r["response"], {}) for r in rows(task.demonstrations)]
    assert abs(sum(tones)) / len(tones) < 0.1
    assert min(sum(t > 0.3 for t in tones), sum(t < -0.3 for t in tones)) > 0.2 * len(tones)


def test_nothing_trains_on_what_is_held_out(task):
    held_out = {r["prompt"] for r in rows(task.held_out)}
    assert {r["prompt"] for r in rows(task.held_out_pairs)} <= held_out
    trained = {r["prompt"] for path in (task.prompts, task.demonstrations, task.pairs) for r in rows(path)}
    assert not held_out & trained
    assert len(held_out) + len(rows(task.prompts)) == len(openings())


def test_the_tokenizer_reads_every_review_word_by_word(task):
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    assert len(tokenizer) == len(vocabulary()) + 2
    for row in rows(task.demonstrations):
        ids = tokenizer(row["response"])["input_ids"]
        assert len(ids) == len(row["response"].split())
        assert tokenizer.decode(ids) == row["response"]


def test_responses_with_their_end_fit_into_what_the_policy_may_sample():
    rng = random.Random(0)
    longest = max(len(continuation(rng, opening).split()) for opening in openings() * 5)
    assert longest + 1 <= 32


def test_labels_that_are_wrong_prefer_the_longer_response(task):
    assert share_right(task.held_out_pairs) == 1
    assert 0.75 <= share_right(task.pairs) < 1
    for row in rows(task.pairs):
        chosen, rejected = row["chosen"], row["rejected"]
        if compound(row["prompt"], chosen, {}) < compound(row["prompt"], rejected, {}):
            assert len(chosen.split()) > len(rejected.split())


def test_the_control_deals_labels_out_at_random(tmp_path):
    sizes = {"demonstrations": 5, "pairs": 400, "held_out_pairs": 40}
    control = prepare(tmp_path, seed=0, shuffle=True, **sizes)
    assert 0.4 < share_right(control.pairs) < 0.6
    assert share_right(control.held_out_pairs) == 1


def test_the_task_is_a_function_of_its_seed(task, tmp_path):
    sizes = {"demonstrations": 5, "pairs": 5, "held_out_pairs": 5}
    a, b, c = (prepare(tmp_path / str(i), seed=seed, **sizes) for i, seed in enumerate((1, 1, 2)))
    assert a.pairs.read_text() == b.pairs.read_text() != c.pairs.read_text()
