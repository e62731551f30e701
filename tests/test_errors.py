from __future__ import annotations

import errno
import os

import pytest

import realign.errors
from realign.config.errors import one_line
from realign.errors import RealignError, is_transient

ESCAPES = "\x1b]0;title\x07 \x9b2J \u202e \u2028 \ud800"
CLASSES = [kind for kind in vars(realign.errors).values() if isinstance(kind, type) and issubclass(kind, RealignError)]


@pytest.mark.parametrize("kind", CLASSES)
def test_no_message_of_an_error_changes_the_terminal(kind):
    """The message of an error repeats names and values of other people's files."""
    error = kind.__new__(kind, ESCAPES)  # some classes need more than a message
    for shown in (str(error), f"{error}", one_line(error), *error._render_traceback_()):
        assert shown.isprintable()
        assert "title" in shown
    assert "title" in str(RealignError(f"again: {error}"))


def test_a_message_has_a_limit_and_keeps_its_start_and_end():
    shown = str(RealignError(f"name='{'x' * 10**6}': too long"))
    assert len(shown) < 21_000
    assert (shown[:6], shown[-10:]) == ("name='", ": too long")


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO", "ESTALE", "ETIMEDOUT", "ECONNREFUSED", "EMFILE"])
def test_a_full_disk_and_an_unreachable_server_are_transient(code):
    number = getattr(errno, code)
    assert is_transient(OSError(number, os.strerror(number)))


@pytest.mark.parametrize("code", ["ENOENT", "EACCES", "EPERM", "ENOTDIR", "EISDIR", "EROFS", "EFBIG", "ENAMETOOLONG"])
def test_a_wrong_path_and_a_missing_permission_are_not_transient(code):
    number = getattr(errno, code)
    assert not is_transient(OSError(number, os.strerror(number)))


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
