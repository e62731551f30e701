"""Shared oracle of all fuzz targets: a call returns a usable result, or realign raises an error
that names the cause."""

from __future__ import annotations

import dis
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from realign.errors import RealignError

BOUNDED = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
"""Settings of the tests, which draw the same examples in every run."""


class Refused:
    """Result of a call that raised an intended error."""

    def __init__(self, message: str) -> None:
        self.message = message


def attempt(call: Callable[[], Any], *names: str) -> Any:
    """Return the result of `call`, or `Refused` if realign raised an error.

    Args:
        call: function to try.
        names: texts of which the message must contain one. Without names, the message must not be empty.

    Raises:
        AssertionError: numpy, torch or Python raised the error instead of a `raise` in realign, or its text has no
            name.
    """
    try:
        return call()
    except (ValueError, RealignError) as error:
        trace = error.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        place = trace.tb_frame.f_globals.get("__name__", "")
        on_purpose = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
        if not (on_purpose and place.split(".")[0] == "realign"):
            raise AssertionError(f"the error comes from {place}, not from realign: {error}") from error
        message = str(error)
        assert len(message) > 8, message
        assert not names or any(name in message for name in names), f"names none of {names}: {message}"
        return Refused(message)


LARGEST = 2**63 - 1
NUMBERS = st.one_of(
    st.integers(-2, 4), st.sampled_from([2**31, 2**62, LARGEST, 2**63, 2**64, -(2**63)]), st.floats(), st.booleans()
)
