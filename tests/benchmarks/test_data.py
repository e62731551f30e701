from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import data, loops
from realign.api import Lengths, MicroBatchSpec, plan_microbatches


@pytest.mark.slow
def test_the_benchmark_checks_every_operation_and_ends_with_json(capsys, monkeypatch):
    monkeypatch.setattr(data, "BUDGET", 2048)  # so that few sequences already form several micro-batches
    data.main(["sizes=64", "repeats=1"])
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert [row["operation"] for row in report["rows"]] == [
        "gather",
        "take",
        "minibatches",
        "merge",
        "plan",
        "plan, split",
        "restore",
        "GAE",
        "normalise by group",
        "keep the best 2",
    ]
    assert all(row["sequences"] == 64 and row["ratio"] > 0 for row in report["rows"])
    assert len(lines) == 2 + len(report["rows"])


def test_results_that_differ_are_found():
    sample = data.make_sample(16)
    operations = [*data.sample_operations(sample), *data.credit_operations(sample)]
    other = data.make_sample(16, seed=1)
    others = [*data.sample_operations(other), *data.credit_operations(other)]
    for operation, wrong in zip(operations, others, strict=True):
        operation.check(operation.ours(), operation.loop())
        if operation.name not in ("plan", "keep the best 2"):  # the results of these operations are few small numbers
            with pytest.raises(AssertionError):
                operation.check(operation.ours(), wrong.loop())


def test_padded_gae_by_hand():
    rewards = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    values = torch.tensor([[0.5, 1.0], [2.0, 0.0]])
    advantages, returns = loops.padded_gae(rewards, values, gamma=0.5, lam=0.5)
    last = 2 - 1  # delta of the last token of the first sequence; the second sequence has one token
    expected = torch.tensor([[1 + 0.5 * 1 - 0.5 + 0.25 * last, last], [3 - 2, 0.0]])
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + values)


def test_normalisation_and_choice_by_hand():
    scores, groups = torch.tensor([1.0, 10.0, 3.0, 12.0]), ["a", "b", "a", "b"]
    found = loops.normalize_by_group(scores, groups, 0.0)
    torch.testing.assert_close(found, torch.tensor([-1.0, -1.0, 1.0, 1.0]) / math.sqrt(2))
    assert loops.best_of_group([1.0, 3.0, 3.0, 2.0, 0.0], ["a", "a", "a", "a", "b"], 1) == [
        False,
        True,
        False,
        False,
        True,
    ]


def test_packing_by_hand():
    assert loops.pack([[3, 1], [5], [2, 2]], 9) == [[0, 1, 3, 4], [2]]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=12), st.integers(27, 60))
def test_packing_is_the_rule_of_plan_microbatches(groups, budget):
    plan = plan_microbatches(Lengths.of(groups), MicroBatchSpec(max_tokens_per_microbatch=budget))
    assert loops.pack(groups, budget) == [part.tolist() for part in plan]
