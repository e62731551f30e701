"""Test the fixture of the distributed tests: how it reports a rank that is killed."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch.distributed as dist

from realign.ranks import current
from tests.engines.distributed.run_ranks import run_ranks


def reads_invalid_memory() -> None:
    if current().leader:
        dist.barrier(), time.sleep(1000)  # one line, in which the other rank finds this one
    dist.barrier()
    ctypes.string_at(0)


def test_a_rank_that_crashes_is_reported_with_its_signal_and_the_stacks_of_all_ranks() -> None:
    with pytest.raises(AssertionError) as raised:
        run_ranks(2, reads_invalid_memory)
    said = str(raised.value)
    assert said.startswith("rank 1 ended with signal SIGSEGV\n")
    first, second = said.split("--- 1.stacks")
    assert f"line {reads_invalid_memory.__code__.co_firstlineno + 2} in reads_invalid_memory" in first
    assert "Fatal Python error: Segmentation fault" in second
    assert f"line {reads_invalid_memory.__code__.co_firstlineno + 4} in reads_invalid_memory" in second
