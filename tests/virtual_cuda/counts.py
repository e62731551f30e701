"""Count the kernel launches and host synchronizations of operators on the virtual device.

The counts are lower bounds: an operator is one launch unless `KERNELS` says otherwise. A synchronization is recorded
with the line of realign that caused it, since the cure is there.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[2]
FREE = frozenset(
    {
        "alias",
        "as_strided",
        "detach",
        "detach_",
        "device",
        "empty",
        "empty_like",
        "empty_strided",
        "host",
        "is_pinned",
        "is_same_size",
        "lift",
        "lift_fresh",
        "live_bytes",
        "new_empty",
        "new_empty_strided",
        "peak_bytes",
        "prim_device",
        "record_stream",
        "reset_peak",
        "_reshape_alias",
        "resize_",
        "resize_storage",
        "set_",
        "squeeze_",
        "t_",
        "transpose_",
        "_unsafe_view",
        "unsqueeze_",
        "_local_scalar_dense",
    }
)
"""Operators that launch no kernel."""
WAITING = frozenset(
    {
        "_assert_async_",
        "bincount",
        "equal",
        "histc",
        "is_nonzero",
        "_local_scalar_dense",
        "masked_select",
        "nonzero",
        "_unique2",
        "unique_consecutive",
        "unique_dim",
    }
)
"""Operators whose result or shape the host must wait for."""
KERNELS = {
    "bincount": 3,
    "cumsum": 2,
    "embedding_dense_backward": 6,
    "masked_select": 5,
    "multinomial": 3,
    "nonzero": 4,
    "sort": 3,
    "topk": 2,
    "_unique2": 8,
}
"""Kernels of operators that launch several. These are estimates."""
FOREACH = 36
"""Tensors that one kernel of a multi-tensor operator processes."""


class SynchronizationError(RuntimeError):
    """The host waited for the device where `torch.cuda.set_sync_debug_mode` forbids it."""


@dataclass
class Counts:
    """What happened on the device since `clear`."""

    launches: Counter[str] = field(default_factory=Counter)
    """Kernel launches by operator."""
    synchronizations: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Times that the host waited, by reason and line."""
    copies: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Copies to the device that the host does not wait for, by kind and line."""
    forbidden: bool = False
    """Whether a synchronization raises `SynchronizationError`."""
    paused: int = 0

    def clear(self) -> None:
        """Forget what was counted."""
        for counter in (self.launches, self.synchronizations, self.copies):
            counter.clear()

    def launch(self, name: str, kernels: int = 1) -> None:
        """Count kernels."""
        if not self.paused:
            self.launches[name] += kernels

    def wait(self, reason: str) -> None:
        """Count a synchronization."""
        if self.paused:
            return
        self.synchronizations[reason, calling_line()] += 1
        if self.forbidden:
            raise SynchronizationError(f"called a synchronizing CUDA operation: {reason} ({calling_line()})")

    def copy(self, kind: str) -> None:
        """Count a copy that the host does not wait for."""
        if not self.paused:
            self.copies[kind, calling_line()] += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count nothing inside."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1


COUNTS = Counts()
"""The counts of this process. CUDA has one device context per process, too."""


def calling_line() -> str:
    """Return the innermost line of realign on the stack, as `realign/engines/...py:12`."""
    ours = [frame for frame in traceback.extract_stack() if f"{ROOT}/realign/" in frame.filename]
    if not ours:
        return "elsewhere"
    return f"{Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno}"


def observe(operator: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Count one operator, called with these arguments."""
    name = operator._schema.name.partition("::")[2]
    tensors = list(tensors_of((args, kwargs)))
    target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    if name in ("_to_copy", "copy_"):
        _observe_copy(name, args, kwargs, target)
    elif target == "cuda" or any(tensor.is_cuda for tensor in tensors):
        if name in WAITING:
            COUNTS.wait(name)
        if name.startswith(("index", "_index_put")):
            _observe_index(name, args)
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            COUNTS.wait("repeat_interleave without output_size")
        if name.startswith(("_foreach", "_fused_adam")):
            COUNTS.launch(name, max(1, -(-len(args[0]) // FOREACH)))
        elif name not in FREE and not operator.is_view:
            COUNTS.launch(name, KERNELS.get(name, 1))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))


def _observe_copy(name: str, args: Any, kwargs: dict[str, Any], target: str | None) -> None:
    source = args[1] if name == "copy_" else args[0]
    to = args[0].device.type if name == "copy_" else target or source.device.type
    lazy = bool(kwargs.get("non_blocking", len(args) > 2 and name == "copy_" and args[2]))
    match source.device.type, to:
        case "cuda", "cuda":
            COUNTS.launch(name)
        case "cuda", "cpu":
            if lazy:
                COUNTS.copy("device to host")
            else:
                COUNTS.wait("device to host")
        case "cpu", "cuda":
            COUNTS.launch("memcpy")
            if lazy:  # from pageable memory, the host still waits until the driver has staged the bytes
                COUNTS.copy("host to device" if source.is_pinned() else "host to device, not pinned")
            else:
                COUNTS.wait("host to device")


def _observe_index(name: str, args: Any) -> None:
    if len(args) < 2 or not isinstance(args[1], list | tuple):
        return
    indices = [index for index in args[1] if index is not None]
    if any(not index.is_cuda and index.dim() for index in indices):
        COUNTS.wait("index on the host")
    masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    # Setting the elements of a mask to one number is a masked fill.
    if masks and (name == "index" or args[2].numel() != 1):
        COUNTS.wait("boolean mask")
        COUNTS.launch("nonzero", KERNELS["nonzero"] * len(masks))
    if name != "index" and len(args) > 3 and args[3]:
        COUNTS.launch("index_put_sort", 6)


class Observer(TorchDispatchMode):
    """Counts every operator of a thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        observe(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Counts]:
    """Count inside: in this thread, in threads started meanwhile, and in backward passes."""
    COUNTS.clear()
    run = threading.Thread.run

    def observed(thread: threading.Thread) -> None:
        with Observer():
            run(thread)

    threading.Thread.run = observed  # type: ignore[method-assign]
    try:
        with Observer():
            yield COUNTS
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]
