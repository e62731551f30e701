"""Errors that realign raises on purpose, for the user to read in one line, told from bugs."""

from __future__ import annotations

import dis


def raised_on_purpose(error: BaseException, package: str = "realign") -> bool:
    """Whether a `raise` in realign made the error; one that an operation of torch or Python made is a bug of ours."""
    traceback = error.__traceback__
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    by_raise = frame.f_code.co_code[traceback.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return by_raise and frame.f_globals.get("__name__", "").split(".")[0] == package
