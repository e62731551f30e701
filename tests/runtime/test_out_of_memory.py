from __future__ import annotations

import pytest
import torch

from realign.errors import RunError
from realign.runtime.out_of_memory import memory_limited

CPU = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nFurther lines."), "CUDA out of memory"),
        (RuntimeError(CPU), CPU[:-1]),
    ],
)
def test_an_out_of_memory_error_names_the_operation_and_the_setting(error, found):
    with pytest.raises(RunError) as raised, memory_limited("RPC 'train'", "Lower x."):
        raise error
    assert str(raised.value) == f"RPC 'train': out of memory ({found}). Lower x."
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("bad"), MemoryError()])
def test_other_errors_are_unchanged(error):
    with pytest.raises(type(error)) as raised, memory_limited("RPC 'train'", "Lower x."):
        raise error
    assert raised.value is error
