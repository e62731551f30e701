from __future__ import annotations

import errno
import os

import pytest

from realign.errors import CheckpointError, RealignError, RunComplete, is_transient


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO", "ESTALE", "ETIMEDOUT", "ECONNREFUSED", "EMFILE"])
def test_a_full_disk_and_an_unreachable_server_are_transient(code):
    number = getattr(errno, code)
    assert is_transient(OSError(number, os.strerror(number)))


@pytest.mark.parametrize("code", ["ENOENT", "EACCES", "EPERM", "ENOTDIR", "EISDIR", "EROFS", "EFBIG", "ENAMETOOLONG"])
def test_a_wrong_path_and_a_missing_permission_are_not_transient(code):
    number = getattr(errno, code)
    assert not is_transient(OSError(number, os.strerror(number)))


def test_a_timeout_and_a_lost_connection_without_a_code_are_transient():
    assert is_transient(TimeoutError("no answer for 5 s"))
    assert is_transient(ConnectionError("the server closed the connection"))


def test_an_error_without_a_code_is_classified_by_its_cause():
    def caused_by(cause):
        error = OSError("the model was not saved")
        error.__cause__ = cause
        return error

    full = OSError(errno.ENOSPC, "No space left on device")
    assert is_transient(caused_by(full))
    assert is_transient(caused_by(caused_by(full)))
    assert not is_transient(caused_by(PermissionError(errno.EACCES, "Permission denied")))
    assert not is_transient(caused_by(ValueError("wrong shape")))
    assert not is_transient(OSError("no code and no cause"))


def test_a_complete_run_is_a_checkpoint_error_that_the_command_line_can_tell_apart():
    assert issubclass(RunComplete, CheckpointError)
    assert issubclass(CheckpointError, RealignError)
    assert not issubclass(CheckpointError, ValueError)
