"""The device of a model: its choice, the precision of matrix products, deterministic kernels, and free memory."""

from __future__ import annotations

import os
from enum import StrEnum

import torch

from realign.errors import ConfigError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable with the workspace of cuBLAS, on which the order of its sums depends."""


class DType(StrEnum):
    """Precision of matrix products. Weights, optimizer state, log-probs, values and losses are always fp32."""

    auto = "auto"
    """bfloat16 on a CUDA device that computes in it, float32 otherwise."""
    float32 = "float32"
    """Full fp32, without TF32 on CUDA."""
    bfloat16 = "bfloat16"
    """bfloat16 by autocast. A CPU rounds only the weights, and the products of the backward pass if it multiplies
    bfloat16, see `realign.functional.rounding`; with several ranks or `torch_compile` it uses autocast, too."""


def supports_bfloat16(device: torch.device) -> bool:
    """Return whether a device is a GPU with matrix products in bf16: compute capability 8.0 and above, or ROCm."""
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def products_dtype(dtype: DType, device: torch.device) -> torch.dtype:
    """Return the data type of matrix products on a device."""
    half = dtype is DType.bfloat16 or (dtype is DType.auto and supports_bfloat16(device))
    return torch.bfloat16 if half else torch.float32


def disable_tf32(device: torch.device) -> None:
    """Compute fp32 products in fp32 for the rest of the process, also convolutions, for which torch allows TF32.

    TF32 has a mantissa of 10 bits. With it, log-probs of sampling and training differ by 1e-3 nats instead of 1e-5.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def use_deterministic_algorithms() -> None:
    """Use deterministic kernels for the rest of the process. torch warns about operators that have none.

    cuBLAS reads its setting when it starts, so this must precede the first matrix product on CUDA.
    """
    # One of the two values that NVIDIA documents as deterministic; the other, :16:8, is slower.
    os.environ.setdefault(CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # The engine reads no uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def pick_device(device: str) -> torch.device:
    """Return the torch device of this name; `auto` selects CUDA if it is available.

    Raises:
        ConfigError: the device is unknown to torch, lacks float64, or is CUDA and not available.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r}: unknown device. Use auto, cpu or cuda.") from error
    if picked.type == "mps":
        raise ConfigError(f"device={device!r}: MPS has no float64, which statistics and sampling need. Use cpu.")
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: torch finds no CUDA device. Use cpu or auto.")
    return picked


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a CUDA device in bytes, including memory that torch's allocator can reuse."""
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + reusable
