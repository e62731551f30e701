"""Precision of matrix products: bf16 autocast or fp32, TF32 on CUDA, and deterministic kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import torch

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable with the workspace of cuBLAS, on which the order of its sums depends."""


class DType(StrEnum):
    """Precision of matrix products. Weights, optimizer state, log-probs, values and losses are always fp32."""

    auto = "auto"
    """bfloat16 on a CUDA device that computes in it, float32 otherwise."""
    float32 = "float32"
    bfloat16 = "bfloat16"


def supports_bfloat16(device: torch.device) -> bool:
    """Return whether a device is a GPU with matrix products in bf16: compute capability 8.0 and above, or ROCm."""
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def products_dtype(dtype: DType, device: torch.device) -> torch.dtype:
    """Return the data type of matrix products on a device."""
    half = dtype is DType.bfloat16 or (dtype is DType.auto and supports_bfloat16(device))
    return torch.bfloat16 if half else torch.float32


def enable_tf32(device: torch.device) -> None:
    """Allow TF32 in fp32 matrix products on CUDA. It has the exponent of fp32 and a mantissa of 10 bits."""
    if device.type == "cuda":
        _allow_tf32(True)


@contextmanager
def full_fp32(device: torch.device) -> Iterator[None]:
    """Compute fp32 matrix products without TF32, for comparisons that expect fp32 rounding errors."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if device.type != "cuda" or before == (False, False):
        yield
        return
    _allow_tf32(False)
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def use_deterministic_algorithms() -> None:
    """Use deterministic kernels for the rest of the process. torch warns about operators that have none.

    cuBLAS reads its setting when it starts, so this must precede the first matrix product on CUDA.
    """
    os.environ.setdefault(CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # The engine reads no uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _allow_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


__all__ = [
    "DType",
    "enable_tf32",
    "full_fp32",
    "products_dtype",
    "supports_bfloat16",
    "use_deterministic_algorithms",
]
