from __future__ import annotations

import errno
import warnings

import pytest
import yaml

from realign.api import MicroBatchSpec
from realign.cli.exit_codes import describe, exit_code, plain_warnings, user_message
from realign.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ExitCode,
    RealignError,
    RewardError,
    RunComplete,
    RunError,
    SettingsError,
    TransientError,
)
from realign.signals import Interrupted

ONE_LINE = "n_microbatches=0: must be at least 1"


def caught_from(action) -> BaseException:
    try:
        action()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def mistake():
    return MicroBatchSpec(n_microbatches=0)


def bug():
    raise ValueError("a bug in a user's own loss")


def test_a_warning_is_one_line_printed_once_and_keeps_its_place_with_debug():
    before = warnings.formatwarning
    with plain_warnings(debug=False):
        one = warnings.formatwarning("a rate\n  of 0", UserWarning, "x.py", 3)
        assert one == "warning: a rate of 0\n"
        assert warnings.formatwarning("a rate of 0", UserWarning, "y.py", 4) == ""
        assert "x.py:3" in warnings.formatwarning("old", DeprecationWarning, "x.py", 3)
    with plain_warnings(debug=True):
        assert "x.py:3" in warnings.formatwarning("a rate of 0", UserWarning, "x.py", 3)
    assert warnings.formatwarning is before


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunComplete("all steps are done"), 0),
        (ValueError("bug"), 1),
        (TypeError("bug"), 1),
        (RuntimeError("bug"), 1),
        (AssertionError("bug"), 1),
        (KeyError("bug"), 1),
        (ConfigError("key"), 2),
        (SettingsError("eps=-1: must be positive"), 2),
        (DataError("row"), 2),
        (CheckpointError("damaged"), 2),
        (RewardError("too many failures"), 2),
        (RunError("non-finite"), 2),
        (RealignError("other"), 2),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), 2),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 2),
        (yaml.YAMLError("bad file"), 2),
        (TransientError("lost worker"), 75),
        (OSError(errno.ENOSPC, "No space left on device"), 75),
        (KeyboardInterrupt(), 130),
        (Interrupted(2), 130),
        (Interrupted(15), 143),
    ],
    ids=repr,
)
def test_the_class_of_an_error_decides_the_exit_code(error, code):
    assert exit_code(error) == code
    assert code in list(ExitCode)
    for debug in (False, True):
        assert describe(error, debug)[1] == code


def test_user_errors_are_one_line_and_bugs_are_none():
    assert user_message(caught_from(mistake)) == ONE_LINE
    assert user_message(FileNotFoundError(2, "No such file", "x")) == "[Errno 2] No such file: 'x'"
    assert user_message(ConfigError("two\n  lines")) == "two lines"
    assert user_message(caught_from(bug)) is None
