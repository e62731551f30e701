"""Fakes of the packages of flash-attn that compute on the CPU, and of a CUDA device."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from realign.models.network import kernels
from realign.models.network.settings import NetworkSettings

Calls = list[dict[str, Any]]


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, window: tuple[int, int], softcap: float
) -> Tensor:
    """Compute causal attention of packed sequences, q [Tq, Hq, D] and k, v [Tk, Hk, D].

    If a sequence has more keys than queries, its queries are the last tokens, as in flash-attn 2.1 and above.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = [q.new_zeros(0, *q.shape[1:])]
    bounds_q, bounds_k = cu_q.tolist(), cu_k.tolist()
    for i in range(len(bounds_q) - 1):
        ours, keys = slice(*bounds_q[i : i + 2]), slice(*bounds_k[i : i + 2])
        n_q, n_k = ours.stop - ours.start, keys.stop - keys.start
        if not n_q:
            continue
        scores = torch.einsum("qhd,khd->hqk", q[ours], k[keys]).float() * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        last = torch.arange(n_q)[:, None] + n_k - n_q
        at = torch.arange(n_k)[None]
        hidden = at > last if window == (-1, -1) else (at > last) | (at < last - window[0])
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype)
        out.append(torch.einsum("hqk,khd->qhd", weights, v[keys]))
    return torch.cat(out)


def compute_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute bfloat16 by autocast, as on a GPU, and not with rounded weights."""
    monkeypatch.setattr(NetworkSettings, "rounds_weights", lambda *_: False)


def forget_kernels() -> None:
    """Let the next choice of a kernel try each one again."""
    kernels._failure.cache_clear()
    kernels._log_skipped.cache_clear()


def install_broken(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, code: str | None) -> None:
    """Install a package `name` that contains `code`; with None, one that has only the subpackage `cute`."""
    compute_as_on_a_gpu(monkeypatch)
    forget_kernels()
    package = folder / name / "cute" if code is None else folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code or "")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that the module is removed after the test
    del sys.modules[name]


def install_flash(monkeypatch: pytest.MonkeyPatch, name: str, *, with_sums: bool = False) -> Calls:
    """Install a module `name` with the signature of its package, and return the list of its calls."""
    compute_as_on_a_gpu(monkeypatch)
    calls: Calls = []

    def run(arguments: dict[str, Any]) -> Any:
        calls.append(arguments)
        a = arguments
        assert a["causal"]
        out = varlen(
            a["q"],
            a["k"],
            a["v"],
            a["cu_seqlens_q"],
            a["cu_seqlens_k"],
            a["softmax_scale"],
            a["window_size"],
            a["softcap"],
        )
        return (out, out.sum(-1)) if with_sums else out

    def second(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        return run(dict(locals()))

    def third(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        return run(dict(locals()))

    forget_kernels()
    module: Any = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.flash_attn_varlen_func = third if name == "flash_attn_interface" else second
    monkeypatch.setitem(sys.modules, name, module)
    return calls


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """Let the CPU pass for a CUDA device of this compute capability in the choice of kernels and of the precision."""
    forget_kernels()
    obstacle = kernels._device_obstacle
    monkeypatch.setattr(kernels, "capability", lambda device: capability)
    monkeypatch.setattr(
        kernels, "_device_obstacle", lambda backend, device, dtype: obstacle(backend, torch.device("cuda"), dtype)
    )
    monkeypatch.setattr("realign.models.device.supports_bfloat16", lambda device: capability >= (8, 0))
