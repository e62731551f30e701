from __future__ import annotations

import pytest
import torch

from realign.errors import RunError
from realign.ranks import Ranks
from realign.runtime import out_of_memory
from realign.runtime.out_of_memory import memory_limited

CPU = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nFurther lines."), "CUDA out of memory"),
        (RuntimeError(CPU), CPU[:-1]),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might"), "CUDA error: out of memory"),
        (RuntimeError(CUBLAS), CUBLAS),
        (RuntimeError("NCCL error\nCuda failure 2 'out of memory'"), "NCCL error"),
    ],
)
def test_an_out_of_memory_error_names_the_operation_and_the_setting(error, message):
    with pytest.raises(RunError) as raised, memory_limited("RPC 'train'", "Lower x."):
        raise error
    assert str(raised.value) == f"RPC 'train': out of memory ({message}). Lower x."
    assert raised.value.__cause__ is error


def test_the_message_names_the_rank_of_a_distributed_run(monkeypatch):
    monkeypatch.setattr(out_of_memory, "current", lambda: Ranks(1, 2))
    with pytest.raises(RunError, match=r"RPC 'train' on rank 1 of 2: out of memory"), memory_limited("RPC 'train'", ""):
        raise torch.OutOfMemoryError("CUDA out of memory")
