"""Reading with transformers: errors and warnings of its loaders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from realign.errors import DataError, RealignError


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars of transformers, and its warnings about missing weights, which the caller reports."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def readable(what: str, kind: type[RealignError] = DataError) -> Iterator[None]:
    """Convert exceptions of transformers to an error of class `kind` in one line, with the original as the cause."""
    try:
        yield
    except RealignError as error:
        raise type(error)(f"{what}: {error}") from error
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        cure = " Set trust_remote_code=true of this role to run it." if "trust_remote_code" in str(error) else ""
        raise kind(f"{what}: {name}{first}{cure}") from error
