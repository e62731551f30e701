"""Rewards of reasoning-gym tasks, with a substitute of the package that scores as it does."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from realign.rewards import reasoning
from realign.rewards.reasoning import last_number, verified

ROW = {"prompt": "2 + 3 =", "answer": "5", "task": "chain_sum", "metadata": {"source_index": 1}}


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """Install a module `reasoning_gym` whose verifier gives 1 for the answer, and less for a text that contains it."""
    module = ModuleType("reasoning_gym")
    asked = []

    def get_score_answer_fn(task):
        def score(answer, entry):
            asked.append((task, answer, entry))
            contained = entry["answer"] in answer
            return 1.0 if answer == entry["answer"] else len(entry["answer"]) / len(answer) if contained else 0.0

        return score

    module.get_score_answer_fn = get_score_answer_fn
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    reasoning._verifier.cache_clear()
    yield asked
    reasoning._verifier.cache_clear()


def test_the_verifier_of_the_task_gets_the_stripped_response_and_the_entry(package):
    assert verified("ignored", " 5\n", ROW) == 1.0
    assert verified("", "so it is 5", ROW) == 0.1
    entry = {"question": "2 + 3 =", "answer": "5", "metadata": {"source_index": 1}}
    assert package == [("chain_sum", "5", entry), ("chain_sum", "so it is 5", entry)]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("2 + 3 = 5.", 1.0),
        ("The answer is 5", 1.0),
        ("5, or rather 6", 0.0),
        ("15", 0.0),
        ("-5", 0.0),
        ("5.0", 0.0),
        ("five", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_last_number_counts_and_a_number_that_contains_the_answer_is_wrong(response, reward):
    assert last_number("", response, ROW) == reward
