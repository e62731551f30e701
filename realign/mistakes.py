"""Distinguish errors that realign raises on purpose from bugs."""

from __future__ import annotations

import dis


def raised_on_purpose(error: BaseException, package: str = "realign") -> bool:
    """Return whether a `raise` statement of `package` raised the error. Any other error is a bug."""
    traceback = error.__traceback__
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    by_raise = frame.f_code.co_code[traceback.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return by_raise and frame.f_globals.get("__name__", "").split(".")[0] == package
