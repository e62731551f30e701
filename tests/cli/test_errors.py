from __future__ import annotations

import warnings

import pytest
import torch
from submitit import SlurmExecutor
from submitit.core.utils import UncompletedJobError

from realign.api import MicroBatchSpec
from realign.cli.errors import BUG, USER_ERROR, described, guarded, plain_warnings, user_message
from realign.functional import LMHead
from realign.runtime.processes.signals import Interrupted


def caught_from(action) -> BaseException:
    try:
        action()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def mistake():
    return MicroBatchSpec(n_microbatches=0)


def bug():
    return LMHead(torch.ones(4, 5)).logits(torch.ones(2, 3))


def stopped():
    raise Interrupted(15, "stopped after step 3")


def test_a_warning_is_one_line_told_once_and_keeps_its_place_with_debug():
    before = warnings.formatwarning
    with plain_warnings(debug=False):
        one = warnings.formatwarning("a rate\n  of 0", UserWarning, "x.py", 3)
        assert one == "warning: a rate of 0\n"
        assert warnings.formatwarning("a rate of 0", UserWarning, "y.py", 4) == ""
        assert "x.py:3" in warnings.formatwarning("old", DeprecationWarning, "x.py", 3)
    with plain_warnings(debug=True):
        assert "x.py:3" in warnings.formatwarning("a rate of 0", UserWarning, "x.py", 3)
    assert warnings.formatwarning is before


def test_what_realign_or_the_disk_says_is_one_line_and_a_bug_is_none():
    assert user_message(ValueError("never raised")) is None
    assert user_message(caught_from(mistake)) == "n_microbatches=0: must be at least 1"
    by_torch = caught_from(bug)
    assert isinstance(by_torch, RuntimeError)
    assert user_message(by_torch) is None
    assert user_message(FileNotFoundError(2, "No such file", "x")) == "[Errno 2] No such file: 'x'"


def test_a_job_of_a_sweep_that_failed_is_told_with_its_last_line():
    said = "Job 7 (task: 0) has no output\nError stream produced:\n-----\nerror: steps must be at least 1, found 0\n"
    assert user_message(UncompletedJobError(said)) == (
        "Job 7 (task: 0) has no output: error: steps must be at least 1, found 0"
    )


def test_where_there_is_no_slurm_one_line_says_so(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    text = 'Could not detect "srun", are you indeed on a slurm cluster?'
    assert user_message(caught_from(lambda: SlurmExecutor("x"))) == text


def test_an_error_has_a_text_and_an_exit_code():
    one_line = "n_microbatches=0: must be at least 1"
    assert described(caught_from(mistake), debug=False) == (f"error: {one_line}", USER_ERROR)
    assert described(caught_from(stopped), debug=False) == ("stopped after step 3", 143)
    assert described(KeyboardInterrupt(), debug=True) == ("interrupted", 130)
    for error, debug in ((caught_from(mistake), True), (caught_from(bug), False)):
        text, code = described(error, debug)
        assert code == BUG
        assert text.startswith("Traceback (most recent call last):")
        assert text.endswith(f"{type(error).__name__}: {error}")


def test_a_guarded_action_says_its_mistake_and_hands_on_its_bug(capsys):
    assert guarded(lambda: None, debug=False) == 0
    assert guarded(lambda: 5, debug=False) == 5
    assert guarded(mistake, debug=False) == 2
    assert guarded(stopped, debug=False) == 143
    assert capsys.readouterr().err == "error: n_microbatches=0: must be at least 1\nstopped after step 3\n"
    with pytest.raises(RuntimeError):
        guarded(bug, debug=False)
    with pytest.raises(ValueError, match="n_microbatches"):
        guarded(mistake, debug=True)
    assert capsys.readouterr().err == ""
