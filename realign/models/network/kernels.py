"""Kernels for packed causal attention: selection of a kernel for a layer, and one function per kernel.

Shapes: T packed tokens, L tokens of one sequence, Hq query heads, Hk key-value heads, D head size.
"""

from __future__ import annotations

import inspect
import logging
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from realign.errors import ConfigError
from realign.functional.packed import at_least_fp32


class Backend(StrEnum):
    """Which kernel computes packed attention; `auto` selects the fastest kernel that supports the layer."""

    auto = "auto"
    """The first of flash3, flash, varlen and sdpa that is installed, works, and supports device and layer."""
    sdpa = "sdpa"
    """`scaled_dot_product_attention` of torch, sequence by sequence."""
    flash = "flash"
    """flash-attn 2 (package `flash-attn`): compute capability 8.0 and above."""
    flash3 = "flash3"
    """flash-attn 3 (module `flash_attn_interface`): compute capability 9.0. No dropout."""
    hub = "hub"
    """flash-attn of the repository `HUB_KERNEL`, with the package `kernels`. `auto` does not choose it, since it
    downloads and runs compiled code."""
    varlen = "varlen"
    """`torch.nn.attention.varlen` of torch."""


class AttentionArgs(NamedTuple):
    """Attention settings of a layer, except which tokens attend to each other."""

    scaling: float
    """Factor that multiplies the scores q k^T first."""
    dropout: float
    """Dropout probability of attention weights; 0 outside training."""
    sliding_window: int | None
    """Number of keys that a query attends to, including its own; None means all previous keys and its own."""
    softcap: float | None
    """Replaces scores x by softcap * tanh(x / softcap); None disables it."""
    sinks_H: Tensor | None
    """[Hq] attention sinks (gpt_oss): one extra score per head in the softmax, without a value; None for no sinks."""


CONTEXT = "realign_context"
"""Keyword of a model call that gives the attention function the boundaries of the packed sequences."""

HUB_KERNEL = "kernels-community/flash-attn2"
"""Repository of the kernel of `Backend.hub`."""

_BY_SPEED = (Backend.flash3, Backend.flash, Backend.varlen)
"""Kernels that `auto` tries, in this order, before sdpa."""

_MODULES = {Backend.flash: "flash_attn", Backend.flash3: "flash_attn_interface", Backend.hub: "kernels"}
_CURES = {
    Backend.flash: "pip install 'realign-rl[flash-attn]'",
    Backend.flash3: "build flash-attn 3 from the folder hopper of its repository",
    Backend.hub: "pip install kernels",
}
_NAMES = {
    Backend.flash: "flash-attn 2",
    Backend.flash3: "flash-attn 3",
    Backend.hub: HUB_KERNEL,
    Backend.varlen: "varlen of torch",
}


logger = logging.getLogger(__name__)


def preferred_kernel(backend: Backend, device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the kernel for layers without special features on a device, for the launch table."""
    if backend is Backend.auto:
        args = AttentionArgs(64**-0.5, 0.0, None, None, None)
        candidates = (b for b in _BY_SPEED if _device_obstacle(b, device, dtype) is None)
        backend = next((b for b in candidates if _works(b, device, dtype, (1, 1, 64), args)), Backend.sdpa)
    return _NAMES.get(backend, backend.value)


def missing_package(backend: Backend) -> str | None:
    """Return why the package of a kernel cannot be used, with a fix; None if it can be imported or is not needed."""
    if (why := _not_installed(backend)) is not None or backend not in _MODULES:
        return why
    try:
        _import_kernel(backend)
    except Exception as error:  # a build for another version of torch raises ImportError, OSError and others
        return f"needs {_NAMES[backend]} ({_CURES[backend]}), whose import fails: {_line(error)}"
    return None


def _not_installed(backend: Backend) -> str | None:
    module = _MODULES.get(backend)
    return None if module is None or find_spec(module) else f"needs {_NAMES[backend]} ({_CURES[backend]})"


def choose_backend(backend: Backend, q: Tensor, v: Tensor, args: AttentionArgs) -> Backend:
    """Return the kernel for a layer: `backend`, or with `auto` the fastest kernel that supports the layer.

    Raises:
        ConfigError: the backend does not support the layer. The message names the backend and the reason.
    """
    layer = q.device, q.dtype, (q.shape[1], v.shape[1], q.shape[-1])
    if backend is Backend.auto:
        candidates = (b for b in _BY_SPEED if _obstacle(b, q, v, args) is None)
        return next((b for b in candidates if _works(b, *layer, args)), Backend.sdpa)
    why = _obstacle(backend, q, v, args)
    if why is None and backend is not Backend.sdpa:
        why = _failure(backend, *layer, args._replace(dropout=0.0))
    if why is not None:
        raise ConfigError(f"attention={backend.value}: this backend {why}. Set attention=auto or sdpa.")
    return backend


def _works(
    backend: Backend, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], args: AttentionArgs
) -> bool:
    """Return whether `auto` can choose a kernel; log once why it skips one that should work."""
    why = _failure(backend, device, dtype, heads, args._replace(dropout=0.0))  # dropout would draw random numbers
    if why is not None:
        _log_skipped(backend, why)
    return why is None


@cache
def _failure(
    backend: Backend, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], args: AttentionArgs
) -> str | None:
    """Return the error of a kernel that attends within one short sequence; None if it runs.

    `heads` are the numbers of query heads and key-value heads, and the head size.
    """
    queries, keys, size = heads
    try:
        q, k = (torch.zeros(1, n, 8, size, device=device, dtype=dtype) for n in (queries, keys))
        bounds = torch.tensor([0, 8], dtype=torch.int32, device=device)
    except Exception:  # the device is full or in use, which says nothing about the kernel
        return None
    try:
        with torch.no_grad():
            packed_attention(backend, q, k, k, args, Packing(bounds, 8, bounds, 8))
            if q.is_cuda:
                torch.cuda.synchronize(device)  # kernels run after the call, which cannot report their errors
    except torch.OutOfMemoryError:
        return None
    except Exception as error:  # whatever a damaged package raises
        return f"fails: {_line(error)}"
    return None


@cache
def _log_skipped(backend: Backend, why: str) -> None:
    logger.warning("attention=auto skips %s, which %s", _NAMES[backend], why)


def _line(error: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _obstacle(backend: Backend, q: Tensor, v: Tensor, args: AttentionArgs) -> str | None:
    """Return why the kernel cannot compute this layer, or None if it can."""
    if backend is Backend.sdpa:
        return None
    if (why := _device_obstacle(backend, q.device, q.dtype)) is not None:
        return why
    # limits of flash-attn, whose kernels varlen of torch contains as well
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"does not support heads of size {q.shape[-1]} with values of size {v.shape[-1]}"
    if args.sinks_H is not None:
        return "does not support attention sinks"
    if backend is Backend.flash3 and args.dropout:
        return "does not support dropout"
    if backend is not Backend.varlen:
        return None
    accepted = _varlen_parameters() or frozenset()
    if args.softcap is not None or args.dropout:
        return "supports neither soft caps nor dropout"
    if args.sliding_window is not None and "window_size" not in accepted:
        return "does not support sliding windows in this version of torch"
    return None


def _device_obstacle(backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run on a device with this data type, or None if it can."""
    if backend is Backend.sdpa:
        return None
    if device.type != "cuda":
        return f"needs a CUDA device, but the model is on {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"supports float16 and bfloat16, but the model computes in {str(dtype).removeprefix('torch.')}"
    if (why := _not_installed(backend)) is not None:
        return why
    if backend is Backend.varlen and _varlen_parameters() is None:
        return "needs a version of torch with torch.nn.attention.varlen"
    has = capability(device)
    if backend is Backend.flash3 and has is not None and has[0] != 9:
        return f"needs compute capability 9.0, but the device has {has[0]}.{has[1]}"
    if has is not None and has < (8, 0):
        return f"needs compute capability 8.0, but the device has {has[0]}.{has[1]}"
    return None


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA device; None on ROCm."""
    return None if torch.version.hip is not None else torch.cuda.get_device_capability(device)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, mask: Tensor) -> Tensor:
    """Compute attention with plain operators, for soft caps and sinks.

    Of one sequence it returns [1, Hq, L, D]. In a decode step of B rows, the heads that share keys are where a sequence
    has its tokens: q and the result are [B, Hk, Hq / Hk, D].

    `mask` is added to the scores: 0 where a query attends to a key, else -inf.
    """
    if (groups := q.shape[1] // k.shape[1]) > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * args.scaling
    if args.softcap is not None:
        scores = args.softcap * torch.tanh(scores / args.softcap)
    scores = at_least_fp32(scores) + mask
    if args.sinks_H is None:
        weights = scores.softmax(-1)
    else:
        sinks = args.sinks_H.to(scores.dtype).view(1, q.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return F.dropout(weights.to(v.dtype), args.dropout) @ v


class Packing(NamedTuple):
    """Boundaries of packed sequences. With more keys than queries, the queries are the last tokens of a sequence."""

    cu_queries: Tensor
    """int32 [S + 1]."""
    longest_query: int
    cu_keys: Tensor
    """int32 [S + 1]."""
    longest_key: int


def packed_attention(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, packing: Packing
) -> Tensor:
    """Run a kernel other than sdpa. q [1, Hq, T, D], k, v [1, Hk, K, D]; returns [1, T, Hq, D]."""
    if backend is Backend.varlen:
        return varlen_attention(q, k, v, args, packing)
    return flash_attention(backend, q, k, v, args, packing)


def flash_attention(backend: Backend, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, packing: Packing) -> Tensor:
    """Run a kernel with the interface of flash-attn. q [1, Hq, T, D], k, v [1, Hk, K, D]; returns [1, T, Hq, D].

    Under `torch.use_deterministic_algorithms`, the backward pass is deterministic.
    """
    keywords: dict[str, Any] = {} if backend is Backend.flash3 else {"dropout_p": args.dropout}
    function = _hub_module().flash_attn_varlen_func if backend is Backend.hub else _import_kernel(backend)
    out = function(
        *(x[0].transpose(0, 1) for x in (q, k, v)),
        cu_seqlens_q=packing.cu_queries,
        cu_seqlens_k=packing.cu_keys,
        max_seqlen_q=packing.longest_query,
        max_seqlen_k=packing.longest_key,
        softmax_scale=args.scaling,
        causal=True,
        # keys before and after that of the query, which `sliding_window` counts as well
        window_size=(-1, -1) if args.sliding_window is None else (args.sliding_window - 1, 0),
        softcap=args.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **keywords,
    )
    result: Tensor = out[0] if isinstance(out, tuple) else out  # early versions of flash-attn 3 also return sums
    return result[None]


def _import_kernel(backend: Backend) -> Any:
    """Import the function of a package. The hub's function loads the kernel, which may download it."""
    if backend is Backend.flash3:
        from flash_attn_interface import flash_attn_varlen_func  # type: ignore[import-not-found]
    elif backend is Backend.hub:
        from kernels import get_kernel  # type: ignore[import-not-found]

        return get_kernel
    else:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
    return flash_attn_varlen_func


@cache
def _hub_module() -> Any:
    return _import_kernel(Backend.hub)(HUB_KERNEL)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, packing: Packing) -> Tensor:
    """Run the kernel of torch; apply scaling and GQA before the call if this torch version lacks the keywords."""
    from torch.nn.attention.varlen import varlen_attn

    accepted = _varlen_parameters() or frozenset()
    keywords: dict[str, Any] = {}
    if "window_size" in accepted:
        # no keys after that of the query: causal, without a keyword of its own
        keywords["window_size"] = (-1 if args.sliding_window is None else args.sliding_window - 1, 0)
    else:
        keywords["is_causal"] = True
    if "scale" in accepted:
        keywords["scale"] = args.scaling
    else:
        # the kernel itself then multiplies the scores by D ** -0.5
        q = q * (args.scaling * q.shape[-1] ** 0.5)
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in accepted:
            keywords["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    bounds = packing.cu_queries, packing.cu_keys, packing.longest_query, packing.longest_key
    out = varlen_attn(q, k, v, *bounds, **keywords)
    assert isinstance(out, Tensor)
    return out[None]


PAGE = 256
"""Tokens of a page of a KV cache. The kernel of torch accepts multiples of 256."""


class Pages(NamedTuple):
    """Where the keys and values of a decode step are."""

    cu_queries: Tensor
    """int32 [B + 1]: 0, 1, 2, ..., since each row has one query."""
    table_BW: Tensor
    """int32 [B, W] page of each `PAGE` tokens of a row."""
    lengths_B: Tensor
    """int32 [B] tokens of each row, with the new one."""
    longest: int
    """At least the largest of them."""


def paged_attention(q: Tensor, pool: Tensor, args: AttentionArgs, pages: Pages) -> Tensor:
    """Attend from the new token of each row, q [B, Hq, D], to keys and values in pages; return [B, Hq, D].

    `pool` [pages, `PAGE`, 2 Hk, D] has the key heads of each token, then its value heads. Only a CUDA device has a
    kernel. On a CPU, plain operators define the result.
    """
    keys, values = pool.chunk(2, 2)  # in one tensor, so that one kernel writes both
    window = args.sliding_window
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            q,
            keys,
            values,
            pages.cu_queries,
            None,
            1,
            pages.longest,
            scale=args.scaling,
            # the only query of a row is its last token, so nothing has to be hidden from it but keys before its window
            window_size=(-1, -1) if window is None else (window - 1, 0),
            enable_gqa=True,
            seqused_k=pages.lengths_B,
            block_table=pages.table_BW,
        )
        assert isinstance(out, Tensor)
        return out
    at = torch.arange(pages.table_BW.shape[1] * PAGE)
    last = pages.lengths_B[:, None]
    seen_BL = (at < last) if window is None else (at < last) & (at >= last - window)
    k, v = (x[pages.table_BW.long()].flatten(1, 2).transpose(1, 2) for x in (keys, values))
    mask = seen_BL[:, None, None]
    return F.scaled_dot_product_attention(q[:, :, None], k, v, mask, scale=args.scaling, enable_gqa=True)[:, :, 0]


@cache
def paged_kernel_works(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], args: AttentionArgs
) -> bool:
    """Return whether a kernel computes `paged_attention` for layers with these numbers of query and key heads, and
    this head size; log why not if it fails.
    """
    queries, keys, size = heads
    if device.type != "cuda" or "block_table" not in (_varlen_parameters() or ()):
        return False
    q = torch.zeros(1, queries, size, device=device, dtype=dtype)
    if _obstacle(Backend.varlen, q[None], q[None], args) is not None:
        return False
    table, bounds = (x.to(device) for x in (torch.zeros(1, 1, dtype=torch.int32), torch.arange(2, dtype=torch.int32)))
    try:
        paged_attention(q, q.new_zeros(1, PAGE, 2 * keys, size), args, Pages(bounds, table, bounds[1:], 1))
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a build of torch without this kernel raises
        logger.warning("decode steps attend to padding, since the paged kernel fails: %s", _line(error))
        return False
    return True


def _varlen_parameters() -> frozenset[str] | None:
    """Return the keywords of `torch.nn.attention.varlen.varlen_attn`, or None if torch lacks this function."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return frozenset(inspect.signature(varlen_attn).parameters)
