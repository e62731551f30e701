"""Find the formulas of a module: its public functions of tensors, for tests that hold for each of them."""

from __future__ import annotations

import inspect
import threading
import types
import typing
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from realign.functional.normalization import Scope


def formulas(module: types.ModuleType) -> list[Callable[..., Any]]:
    """Return the public functions that a module defines and whose first argument is a tensor."""
    return [function for function in public_functions(module) if _takes_a_tensor(function)]


def public_functions(module: types.ModuleType) -> list[Callable[..., Any]]:
    """Return the public functions that a module defines."""
    return [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def _takes_a_tensor(function: Callable[..., Any]) -> bool:
    first = next(iter(inspect.signature(function).parameters), "")
    return typing.get_type_hints(function).get(first) is Tensor


def by_enumeration(n: int, c: int, k: int) -> float:
    """Return the fraction of the subsets of k responses that contain one of the c correct ones."""
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    return sum(map(any, subsets)) / len(subsets)


def flags(
    mean=Scope.batch, std=Scope.batch, *, leave_one_out=False, unbiased=False, eps=1e-8, eps_inside_sqrt=False
) -> dict:
    """Return all keyword arguments of `normalize` except `reduce`."""
    return dict(locals())


def over_ranks(parts, call):
    """Run `call(part, reduce)` in one thread per part. `reduce` sums over the threads."""
    barrier, slots, results = threading.Barrier(len(parts), timeout=20), [None] * len(parts), [None] * len(parts)

    def worker(rank):
        def reduce(x):
            slots[rank] = x
            barrier.wait()
            total = torch.stack(slots).sum(0)
            barrier.wait()
            return total

        results[rank] = call(parts[rank], reduce)

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat(results)
