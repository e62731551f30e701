import math
from pathlib import Path

import pytest

from realign.rewards import FailureKind, RewardPool
from realign.rewards.pool.worker import ONE, Expected, Problem, check_answers

PATCHES = f"{Path(__file__).parent / 'patching_rewards.py'}"
ANYTHING = {
    "text": "pwn",
    "number as text": "1.0",
    "nan": math.nan,
    "infinity": -math.inf,
    "too large": 1e39,
    "int": 1,
    "bool": True,
    "subclass of float": type("F", (float,), {})(1.0),
    "list": [1.0],
    "dict": {"kind": "timeout"},
    "complex": 1j,
    "bytes": b"1",
    "object": object(),
    "nested": [[1.0]],
}


def forged(**fields):
    problem = object.__new__(Problem)
    problem.__dict__.update(fields)
    return problem


@pytest.mark.parametrize("value", ANYTHING.values(), ids=ANYTHING)
def test_a_value_that_is_no_finite_float_is_a_failure(value):
    for expected, answers in (([ONE], [value]), ([Expected(2)], [[0.0, value]])):
        (answer,) = check_answers(answers, expected)
        assert type(answer) is Problem
        assert answer.kind is FailureKind.nonsense


@pytest.mark.parametrize("value", [1.0, [], [1.0], [1.0, 2.0, 3.0], (1.0, 2.0), {0: 1.0, 1: 2.0}])
def test_dense_rewards_of_another_length_or_type_are_a_failure(value):
    (answer,) = check_answers([value], [Expected(2)])
    assert answer.kind is FailureKind.nonsense


@pytest.mark.parametrize(
    "fields",
    [{}, {"kind": FailureKind.crash}, {"kind": "crash", "message": "x"}, {"kind": FailureKind.crash, "message": b""}],
)
def test_a_forged_failure_is_replaced(fields):
    (answer,) = check_answers([forged(**fields)], [ONE])
    assert answer.kind is FailureKind.nonsense


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("do", ["raise", "return", "unreachable"])
def test_text_of_a_reward_function_reaches_the_log_escaped(do, workers, caplog):
    text = "a\x1b[2J\x1b]0;t\x07\u202eb\u2028c\x9b"
    with pool("speaks", workers=workers) as rewards:
        scores = rewards.score(["p"], ["r"], [{"do": do, "text": text}])
    shown = scores.failures[0].message + caplog.text
    assert "\\x1b]0;t\\x07" in shown.replace("\\\\", "\\")
    assert all(c.isprintable() or c in "\n\t" for c in shown)


def pool(name, workers=1):
    return RewardPool(
        f"{PATCHES}:{name}",
        workers=workers,
        timeout_s=20.0,
        memory_mb=None,
        max_failed_fraction=1.0,
        patience_s=0.0,
    )


@pytest.mark.parametrize(
    ("target", "value"),
    [
        ("as_answer", "'pwn'"),
        ("as_answer", "{}"),
        ("answer", "float('nan')"),
        ("_answer_in_turn", "[1.0]"),
        ("checked code", "float('inf')"),
        ("send", "10 ** 400"),
    ],
)
def test_a_worker_whose_code_the_function_changed_gets_no_other_value_through(target, value):
    with pool("patches") as rewards:
        scores = rewards.score(["p"] * 2, ["r"] * 2, [{"target": target, "value": value}] * 2)
    assert scores.values == [None, None]
    assert {f.kind for f in scores.failures} == {FailureKind.nonsense}
