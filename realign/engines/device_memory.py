"""Free memory of a device, for sizes that follow from it."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a CUDA device in bytes, including memory that torch's allocator can reuse."""
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + reusable


__all__ = ["free_bytes"]
