"""Suggestions in messages about unknown names."""

from __future__ import annotations

import pytest

from realign.config.errors import MANY, nearest, suggest


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("temprature", "temperature"),
        ("epocs", "epochs"),
        ("h10", "h100"),
        ("lamda", "lam"),
        ("modle", "model"),
        ("eval", "evaluation"),
        ("batch", "batch_prompts"),
    ],
)
def test_a_misspelled_or_shortened_name_is_suggested(word, name):
    assert nearest(word, [name, "rewards", "xyz", "evaluations"]) == name


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("banana", ["balanced", "band_of"]),
        ("critic", ["actor", "ref"]),
        ("max_length", ["max_new_tokens"]),
        ("foo", ["for"]),
        ("clip_low", ["low"]),
        ("ref", ["reference_model"]),  # too short to count as the beginning
        ("math", []),
    ],
)
def test_an_unrelated_name_is_not_suggested(word, names):
    assert nearest(word, names) is None
    assert "did you mean" not in suggest(word, names)


def test_a_suggestion_is_followed_by_all_names_if_they_are_few():
    assert suggest("sets", ["seed", "sete"]) == "; did you mean 'sete'? (valid: seed, sete)"
    assert suggest("nothing", [f"name{i}" for i in range(MANY + 1)]) == ""
