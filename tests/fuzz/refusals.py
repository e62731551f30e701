"""What every fuzz target asks: a call gives something that works, or a ValueError of ours that names the thing."""

from __future__ import annotations

import dis
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

from realign.errors import RealignError

BOUNDED = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
"""Of the tests, which draw the same examples in every run; `benchmarks/fuzz.py` draws others."""


class Refused:
    """What stands in place of a result."""

    def __init__(self, message: str) -> None:
        self.message = message


def attempt(call: Callable[[], Any], *names: str) -> Any:
    """What `call` gives, or `Refused` if it raised an error on purpose.

    Args:
        call: what is tried.
        names: the message must hold one of these; without any, it must just say something.

    Raises:
        AssertionError: the error was raised by numpy, torch or Python, and not by a `raise` of realign, or its
            text names nothing.
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
