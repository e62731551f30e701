"""Report that a device has no memory left as a `RunError` with the setting that lowers the memory use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from realign.errors import RunError
from realign.ranks import current

_OTHER_ALLOCATORS = re.compile(
    r"can't allocate memory"  # torch on CPU
    r"|CUDA error: out of memory|Cuda failure \d+ 'out of memory'"  # CUDA outside of torch's allocator, and NCCL
    r"|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED"
)
"""Matches the RuntimeErrors of torch for allocations that do not raise `torch.OutOfMemoryError`."""
SMALLER = "Use a smaller model, more ranks, or devices with more memory."
"""What to change if the weights themselves do not fit."""


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
        if not is_out_of_memory(error):
            raise
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        ranks = current()
        where = f" on rank {ranks.rank} of {ranks.size}" if ranks.size > 1 else ""
        raise RunError(f"{what}{where}: out of memory ({first_line}). {cure}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch raised this error because a device, or the host, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _OTHER_ALLOCATORS.search(str(error)) is not None
