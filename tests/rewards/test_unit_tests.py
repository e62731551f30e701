import pytest

from realign.rewards import RewardPool, unit_tests
from realign.rewards.unit_tests import passes

TESTS = {"tests": "assert double(2) == 4\nassert double(-1) == -2"}
RIGHT = "def double(x):\n    return 2 * x\n"


def block(code, language="python"):
    return f"Here it is:\n```{language}\n{code}```\nDone."


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (block(RIGHT), 1.0),
        (block(RIGHT, ""), 1.0),
        (RIGHT, 1.0),
        (block("def double(x):\n    return x + 2\n"), 0.0),
        (block(RIGHT) + block("double = 3\n"), 0.0),
        (block(RIGHT + "print('noise', end='')\n"), 1.0),
        (block("import sys\nsys.exit(0)\n"), 0.0),
        (block("import os\nos._exit(0)\n"), 0.0),
        (block("while True pass"), 0.0),
        (block("import sys\nprint(open(sys.argv[1]).read())\nsys.exit(0)\n"), 0.0),
        ("I cannot.", 0.0),
    ],
)
def test_a_program_earns_if_its_tests_run_to_their_end(response, reward):
    assert passes("Double a number.", response, TESTS) == reward


def test_a_program_that_does_not_end_is_wrong_not_unjudged(monkeypatch):
    monkeypatch.setattr(unit_tests, "TIMEOUT_S", 0.2)
    assert passes("", "while True: pass", TESTS) == 0.0


def test_in_the_workers_a_row_without_tests_fails_alone():
    with RewardPool(
        "realign.rewards.unit_tests:passes", workers=1, timeout_s=30, memory_mb=2048, max_failed_fraction=0.5
    ) as pool:
        found = pool.score(["", ""], [RIGHT, RIGHT], [TESTS, {}])
    assert found.values == [1.0, None]
    assert "KeyError: 'tests'" in found.failures[0].message
