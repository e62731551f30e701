from __future__ import annotations

import errno
import warnings

import pytest
import yaml
from submitit.core.utils import UncompletedJobError

from realign.api import MicroBatchSpec
from realign.cli.exit_codes import describe, exit_code, plain_warnings, run_guarded, user_message
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


def stopped():
    raise Interrupted(15, "stopped after step 3")


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


def test_every_exit_code_of_the_table_is_reachable():
    reached = {0, 1, 2, 75, 130, 143}
    assert reached == set(ExitCode)


def test_user_errors_are_one_line_and_bugs_are_none():
    assert user_message(caught_from(mistake)) == ONE_LINE
    assert user_message(FileNotFoundError(2, "No such file", "x")) == "[Errno 2] No such file: 'x'"
    assert user_message(ConfigError("two\n  lines")) == "two lines"
    assert user_message(caught_from(bug)) is None


def test_the_message_of_a_failed_job_of_a_sweep_ends_with_its_last_line():
    said = "Job 7 (task: 0) has no output\nError stream produced:\n-----\nerror: steps=0: must be at least 1\n"
    assert (
        user_message(UncompletedJobError(said)) == "Job 7 (task: 0) has no output: error: steps=0: must be at least 1"
    )
    assert user_message(UncompletedJobError("")) == "UncompletedJobError"


def test_an_error_has_a_text_and_an_exit_code():
    assert describe(caught_from(mistake), debug=False) == (f"error: {ONE_LINE}", 2)
    assert describe(caught_from(stopped), debug=False) == ("stopped after step 3", 143)
    assert describe(RunComplete("all steps are done"), debug=False) == ("all steps are done", 0)
    assert describe(KeyboardInterrupt(), debug=True) == ("interrupted", 130)
    for error, debug, expected in ((caught_from(mistake), True, 2), (caught_from(bug), False, 1)):
        text, code = describe(error, debug)
        assert code == expected
        assert text.startswith("Traceback (most recent call last):")
        assert text.endswith(f"{type(error).__name__}: {error}")


def test_a_guarded_action_prints_user_errors_and_raises_bugs(capsys):
    assert run_guarded(lambda: None, debug=False) == 0
    assert run_guarded(lambda: 5, debug=False) == 5
    assert run_guarded(mistake, debug=False) == 2
    assert run_guarded(stopped, debug=False) == 143
    assert capsys.readouterr().err == f"error: {ONE_LINE}\nstopped after step 3\n"
    with pytest.raises(ValueError, match="own loss"):
        run_guarded(bug, debug=False)
    assert capsys.readouterr().err == ""
    assert run_guarded(mistake, debug=True) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert ONE_LINE in err
