"""Report that a device has no memory left as a `RunError` with the setting that lowers the memory use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from realign.errors import RunError

CPU_ALLOCATOR = "can't allocate memory"
"""Text of the RuntimeError of torch's CPU allocator."""


@contextmanager
def memory_limited(what: str, cure: str) -> Iterator[None]:
    """Turn an out-of-memory error of torch into a `RunError`.

    Args:
        what: operation inside the context, for the message.
        cure: sentence that says what to change.

    Raises:
        RunError: torch could not allocate memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and CPU_ALLOCATOR not in str(error):
            raise
        found = str(error).strip().partition("\n")[0].rstrip(".")
        raise RunError(f"{what}: out of memory ({found}). {cure}") from error


__all__ = ["memory_limited"]
