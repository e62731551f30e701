"""Find the formulas of a module: its public functions of tensors, for tests that hold for each of them."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

from torch import Tensor


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
