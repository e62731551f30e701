"""Give a CPU build of torch the virtual device: import this module before torch, then call `install`."""

from __future__ import annotations

import ctypes
import sys

from tests.virtual_cuda.build import library

if "torch" in sys.modules:
    raise ImportError("the virtual device must be loaded before torch, which asks only once whether there is CUDA")
ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)

import contextlib  # noqa: E402
import inspect  # noqa: E402
from collections import defaultdict  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from itertools import pairwise  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.nn.attention import varlen  # noqa: E402
from torch.utils import _device  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402

from tests.virtual_cuda.counts import COUNTS  # noqa: E402

DEVICE = torch.ops.virtual_cuda
CAPACITY = 141 * 10**9
"""Bytes of memory that the device reports (an H200). `limit` sets a bound that is enforced."""
HALF = (torch.float16, torch.bfloat16)
torch_varlen_attention = varlen.varlen_attn
cpu_attention = F.scaled_dot_product_attention


@contextlib.contextmanager
def limit(free: int) -> Iterator[None]:
    """Make the device full after `free` more bytes; further ones raise torch's `OutOfMemoryError`."""
    capacity = DEVICE.live_bytes() + free
    DEVICE.set_limit(capacity)
    torch.cuda.mem_get_info = lambda device=None: (capacity - DEVICE.live_bytes(), capacity)
    try:
        yield
    finally:
        DEVICE.set_limit(0)
        torch.cuda.mem_get_info = CUDA["mem_get_info"]


# Streams and events: there is one stream, and everything runs in order.


class Stream:
    """The only stream."""

    device = torch.device("cuda", 0)
    cuda_stream = stream_id = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...
    def record_event(self, event: Any = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        COUNTS.wait("stream.synchronize")


class Event:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1.0

    def synchronize(self) -> None:
        COUNTS.wait("event.synchronize")


# Attention: one operator with the checks of the CUDA kernels, computed by the CPU's.


class Attention(torch.autograd.Function):
    """One attention kernel, forward and backward."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], name: str, launches: tuple[int, int], *given: Any) -> Tensor:
        COUNTS.launch(name, launches[0])
        with torch.enable_grad(), COUNTS.pause():
            ctx.inputs = [None if x is None else DEVICE.host(x.detach()).requires_grad_(x.requires_grad) for x in given]
            ctx.output = compute(*ctx.inputs)
        ctx.name, ctx.launches = f"{name} backward", launches[1]
        with COUNTS.pause():
            return DEVICE.device(ctx.output.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        COUNTS.launch(ctx.name, ctx.launches)
        with COUNTS.pause():
            wanted = [x for x in ctx.inputs if x is not None and x.requires_grad]
            gradients = iter(torch.autograd.grad(ctx.output, wanted, DEVICE.host(grad).contiguous()))
            trained = [x is not None and x.requires_grad for x in ctx.inputs]
            return None, None, None, *(DEVICE.device(next(gradients)) if wants else None for wants in trained)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stand for `scaled_dot_product_attention`, with the kernel that CUDA would choose."""
    given = [x for x in (query, key, value, attn_mask) if x is not None]
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not any(x.is_cuda for x in given):
        return cpu_attention(query, key, value, attn_mask, **options)
    if not all(x.is_cuda for x in given):
        raise RuntimeError("Expected all tensors to be on the same device (attention)")
    if torch.is_autocast_enabled("cuda"):
        half = torch.get_autocast_dtype("cuda")
        query, key, value = (x.to(half) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(half)
    flash = attn_mask is None and query.dtype in HALF and query.shape[-1] <= 256
    efficient = attn_mask is None or (query.stride(-1) == 1 and not enable_gqa)
    name, launches = (
        ("flash attention", (1, 3))
        if flash
        else ("efficient attention", (1, 2))
        if efficient
        else ("attention", (9, 12))
    )

    def compute(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return cpu_attention(q, k, v, mask, **options)

    return Attention.apply(compute, name, launches, query, key, value, attn_mask)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Stand for `torch.nn.attention.varlen.varlen_attn`, with the checks of its CUDA kernel.

    Fake tensors go to torch's own function, which knows the shapes of its results.
    """
    if isinstance(query, FakeTensor):
        known = {"scale": scale, "window_size": window_size, "enable_gqa": enable_gqa, **options}
        return torch_varlen_attention(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **known)
    if not query.is_cuda or query.dtype not in HALF:
        raise RuntimeError(f"varlen_attn needs half precision on CUDA, found {query.dtype} on {query.device}")
    if block_table is not None:
        return paged(query, key, value, cu_seq_q, max_k, scale, window_size, seqused_k, block_table)
    assert cu_seq_k is not None
    for bounds in (cu_seq_q, cu_seq_k):
        if not bounds.is_cuda or bounds.dtype != torch.int32:
            raise RuntimeError(f"cu_seqlens must be int32 on CUDA, found {bounds.dtype} on {bounds.device}")
    if query.stride(-1) != 1 or query.shape[-1] > 256 or query.shape[-1] % 8:
        raise RuntimeError(
            f"varlen_attn does not support a head size of {query.shape[-1]} with stride {query.stride(-1)}"
        )
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads and {key.shape[1]} key heads need enable_gqa=True")
    with COUNTS.pause():
        spans_q, spans_k = spans(cu_seq_q, max_q, len(query)), spans(cu_seq_k, max_k, len(key))

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for rows, columns in zip(spans_q, spans_k, strict=True):
            i = (
                torch.arange(rows.stop - rows.start)[:, None]
                + (columns.stop - columns.start)
                - (rows.stop - rows.start)
            )
            j = torch.arange(columns.stop - columns.start)
            seen = torch.ones(len(i), len(j), dtype=torch.bool)
            if window_size[1] == 0:
                seen &= j <= i
            if window_size[0] >= 0:
                seen &= j >= i - window_size[0]
            heads = (x.transpose(0, 1)[None] for x in (q[rows], k[columns], v[columns]))
            parts.append(cpu_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1))
        return torch.cat(parts)

    return Attention.apply(compute, "varlen attention", (2, 4), query, key, value)


def paged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    longest: int,
    scale: float | None,
    window_size: Sequence[int],
    used: Tensor | None,
    table: Tensor,
) -> Tensor:
    """Attend from one query per sequence to keys and values in pages, with the checks of the CUDA kernel."""
    tensors = (key, value, cu_seq_q, table, used)
    if used is None or not all(x is not None and x.is_cuda for x in tensors):
        raise RuntimeError("block_table needs seqused_k, and all tensors on CUDA")
    if any(x.dtype != torch.int32 for x in (cu_seq_q, table, used)) or table.stride(-1) != 1:
        raise RuntimeError("bounds, block_table and seqused_k must be int32, and rows of block_table contiguous")
    if key.shape[1] % 256 or any(x.stride(-1) != 1 for x in (query, key, value)):
        raise RuntimeError(f"Paged KV cache block size {key.shape[1]} must be divisible by 256")
    with COUNTS.pause():
        bounds, pages, lengths = (DEVICE.host(x).tolist() for x in (cu_seq_q, table, used))
    if bounds != list(range(len(query) + 1)) or max(lengths) > longest or max(lengths) > key.shape[1] * table.shape[1]:
        raise RuntimeError(f"lengths {lengths} do not fit a largest length of {longest} and {table.shape[1]} pages")

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = []
        for row, length in enumerate(lengths):
            first = max(0, length - window_size[0] - 1) if window_size[0] >= 0 else 0
            own = [x[pages[row]].flatten(0, 1)[first:length].transpose(0, 1)[None] for x in (k, v)]
            rows.append(cpu_attention(q[row][None, :, None], *own, scale=scale, enable_gqa=True)[0, :, 0])
        return torch.stack(rows)

    return Attention.apply(compute, "varlen attention", (2, 4), query, key, value)


def spans(cu_seqlens: Tensor, longest: int, tokens: int) -> list[slice]:
    """Return the tokens of each sequence; a wrong bound raises an error, since the kernel would read other memory."""
    bounds = DEVICE.host(cu_seqlens).tolist()
    if bounds[-1] != tokens or any(stop - start > longest for start, stop in pairwise(bounds)):
        raise RuntimeError(f"cu_seqlens {bounds} do not fit {tokens} tokens in sequences of at most {longest}")
    return [slice(start, stop) for start, stop in pairwise(bounds)]


# Operators that only CUDA has.

AT = torch.library.Library("aten", "IMPL")


def fused_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Stand for the kernel of `F.rms_norm`."""
    with COUNTS.pause(), _disable_current_modes():
        host, own = DEVICE.host(x), None if weight is None else DEVICE.host(weight)
        scale = (host.double().pow(2).mean(-1, keepdim=True) + (eps or 0)).rsqrt()
        out = (host * scale * (1 if own is None else own)).to(x.dtype)
        return DEVICE.device(out), DEVICE.device(scale.float())


def add_product(
    x: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    """Stand for `torch.addmm(..., out_dtype=...)`, which sums products of half precision in fp32."""
    if a.dtype != b.dtype or a.dtype not in HALF or not x.dtype == out.dtype == out_dtype == torch.float32:
        raise RuntimeError(f"addmm: {a.dtype} and {b.dtype} cannot be added to {x.dtype} with out_dtype={out_dtype}")
    with COUNTS.pause(), _disable_current_modes():
        hosts = [DEVICE.host(y) for y in (x, a, b)]
        out.copy_(DEVICE.device(torch.addmm(hosts[0], hosts[1].float(), hosts[2].float(), beta=beta, alpha=alpha)))
    return out


# The functions of `torch.cuda` that a CPU build lacks.


def properties(device: Any = None) -> SimpleNamespace:
    """Return the properties of the device."""
    return SimpleNamespace(
        name="virtual device",
        total_memory=CAPACITY,
        major=9,
        minor=0,
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        gcnArchName="",
        L2_cache_size=50 * 2**20,
        uuid="0",
        is_integrated=False,
        shared_memory_per_block_optin=232_448,
        regs_per_multiprocessor=65_536,
    )


def forbid_synchronization(mode: str | int) -> None:
    """Stand for `torch.cuda.set_sync_debug_mode`."""
    COUNTS.forbidden = mode in ("error", 2)


STREAM = Stream()
CUDA: dict[str, Callable[..., Any]] = {
    "Event": Event,
    "Stream": Stream,
    "StreamContext": contextlib.nullcontext,  # a type, as torch.compile asks
    "_lazy_init": lambda: None,
    "can_device_access_peer": lambda a, b: True,
    "current_device": lambda: 0,
    "current_stream": lambda device=None: STREAM,
    "default_stream": lambda device=None: STREAM,
    "device": contextlib.nullcontext,
    "device_count": lambda: 1,
    "empty_cache": lambda: None,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: properties().name,
    "get_device_properties": properties,
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "init": lambda: None,
    "initial_seed": lambda: 0,
    "ipc_collect": lambda: None,
    "is_available": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: False,
    "is_initialized": lambda: True,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "max_memory_allocated": lambda device=None: DEVICE.peak_bytes(),
    "max_memory_reserved": lambda device=None: DEVICE.peak_bytes(),
    "mem_get_info": lambda device=None: (CAPACITY - DEVICE.live_bytes(), CAPACITY),
    "memory_allocated": lambda device=None: DEVICE.live_bytes(),
    "memory_reserved": lambda device=None: DEVICE.live_bytes(),
    "memory_stats": lambda device=None: defaultdict(int),
    "memory_summary": lambda *args, **kwargs: "",
    "reset_peak_memory_stats": lambda device=None: DEVICE.reset_peak(),
    "seed_all": lambda: None,
    "set_device": lambda device: None,
    "set_rng_state": lambda state, device="cuda": None,
    "set_rng_state_all": lambda states: None,
    "set_stream": lambda stream: None,
    "set_sync_debug_mode": forbid_synchronization,
    "stream": lambda stream: contextlib.nullcontext(),
    "synchronize": lambda device=None: COUNTS.wait("cuda.synchronize"),
    "utilization": lambda device=None: 50,
}


def install() -> None:
    """Replace what a CPU build of torch lacks. `torch.cuda.is_available()` is true from now on, in this process."""
    for name, replacement in CUDA.items():
        setattr(torch.cuda, name, replacement)
    torch.version.cuda = "12.8"
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    F.scaled_dot_product_attention = attention
    varlen_attention.__signature__ = inspect.signature(varlen.varlen_attn)  # type: ignore[attr-defined]
    varlen.varlen_attn = varlen_attention
    AT.impl("_fused_rms_norm", fused_rms_norm, "CUDA")
    AT.impl("addmm.dtype_out", add_product, "CUDA")
    _install_storages()
    _install_tensor()


def _install_storages() -> None:
    resize, clone = torch.UntypedStorage.resize_, torch.UntypedStorage.clone

    def bytes_of(storage: Any) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        DEVICE.resize_storage(bytes_of(storage), size)
        return storage

    def cloned(storage: Any) -> Any:
        return bytes_of(storage).clone().untyped_storage() if storage.device.type == "cuda" else clone(storage)

    torch.UntypedStorage.resize_ = resize_
    torch.UntypedStorage.clone = cloned


def _install_tensor() -> None:
    _device._device_constructors()  # cached, and must contain torch's own `tensor`
    make = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Stand for `torch.tensor`, which builds on the host, copies and waits. Dispatch modes do not see it."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda" and not isinstance(data, Tensor):
            COUNTS.wait("torch.tensor of Python values")
            COUNTS.launch("memcpy")
        return make(data, *args, **kwargs)

    torch.tensor = tensor
