"""Failed episodes: the log contains the first traceback in full, and later failures are counted."""

from __future__ import annotations

import inspect
import re

import pytest

from realign.api.environment import Response
from realign.environments import EnvironmentPool, Failures, Limits, SharedLoop, TurnWriter, load_environment
from realign.environments.event_loops import EnvironmentFailure
from realign.errors import RewardError
from tests.environments import environment_fixtures as fixtures
from tests.tiny import tiny_tokenizer


def line_of(member: object, text: str) -> int:
    """Return the line number of a source line in the fixtures."""
    lines, first = inspect.getsourcelines(member)
    return first + next(i for i, line in enumerate(lines) if text in line)


def failures_of(cls: type, row: dict, **arguments: object) -> list[str]:
    """Run two episodes of one turn, and return their failures."""
    make = load_environment(f"{fixtures.__name__}:{cls.__name__}", arguments)
    loop = SharedLoop("mine", Limits(timeout_s=20.0, concurrency=4))
    with EnvironmentPool("mine", make, TurnWriter(tiny_tokenizer()), loop) as environments:
        answers = environments.reset([(row, 0)] * 2)
        live = [i for i, answer in enumerate(answers) if answer.step is not None]
        answers += environments.step({i: Response("x", (1,), 0, False) for i in live})
    return [answer.failure for answer in answers if answer.failure]


@pytest.mark.parametrize(
    ("cls", "row", "method", "raising", "exception"),
    [
        (fixtures.BadConstructor, {}, "__init__", "raise ValueError", "ValueError: pages must be positive"),
        (fixtures.Bad, {"how": "reset"}, "reset", "raise KeyError", "KeyError: 'no such page'"),
        (fixtures.Bad, {"how": "raise"}, "step", "raise RuntimeError", "RuntimeError: the tool broke"),
    ],
)
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_first_traceback_of_an_environment_is_logged_in_full_and_later_ones_are_counted(
    caplog, cls, row, method, raising, exception, fraction
):
    failures = failures_of(cls, row)
    assert len(failures) == 2
    checked = Failures("mine", fraction)
    if fraction:
        checked.check(failures, 2)
        checked.check(failures, 2)
    else:
        message = (
            rf"failed in 2 of 2 episodes \(2 times {re.escape(exception)}\), which exceeds max_failed_fraction=0.0"
        )
        with pytest.raises(EnvironmentFailure, match=message) as caught:
            checked.check(failures, 2)
        assert isinstance(caught.value, RewardError)
        assert "\n" not in str(caught.value)
    (logged,) = (record.getMessage() for record in caplog.records if record.name.startswith("realign."))
    assert "Traceback (most recent call last):" in logged
    line = line_of(getattr(cls, method), raising)
    assert f'environment_fixtures.py", line {line}, in {method}' in logged
    assert logged.endswith(exception)
