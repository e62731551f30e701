"""Add the config key to an error that a component raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from realign.errors import RealignError


@contextmanager
def located(where: str) -> Iterator[None]:
    """Prefix the message of a `RealignError` with a config key, and add the key as a note to any other exception.

    Args:
        where: config key of the component that is called inside the context.
    """
    try:
        yield
    except RealignError as error:
        error.args = (f"{where}: {error}",)
        raise
    except Exception as error:
        error.add_note(f"while calling {where}")
        raise
