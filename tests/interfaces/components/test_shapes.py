"""Test that public functions check the shape of every tensor. One element would broadcast without an error."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from realign.functional import kl, losses, normalization, packed, returns, selection
from realign.interfaces import dpo, ilql, kto, reward_model
from realign.interfaces.components import advantages, aggregation, objectives, pairs, truncation, value_loss
from tests.formulas import formulas

MODULES = (
    returns,
    kl,
    losses,
    normalization,
    objectives,
    packed,
    selection,
    value_loss,
    truncation,
    advantages,
    pairs,
    ilql,
    dpo,
    kto,
    reward_model,
)
SIZES = {"T": 4, "N": 4, "S": 2, "P": 1}
AGGREGATION = aggregation.SeqMeanTokenMean()  # reads the sequences
UNSHAPED = (
    "at_least_fp32",
    "check_shapes",
    "cu_seqlens_of",
    "identity",
    "overlong_penalty",
    "batch_moments",
    "group_moments",
)
"""Functions whose arguments determine no shape, or were checked by the caller."""
OPTIONS = {"gamma": 0.9, "lam": 0.9, "k": 1, "n": 2, "beta": 0.1, "n_groups": 2, "fill": 0.0, "tau": 0.7}
OPTIONS |= {"low": 0.2, "high": 0.2, "dual": None, "tau_pos": 1.0, "tau_neg": 1.05, "clip": None, "huber_delta": 10.0}
OPTIONS |= {"label_smoothing": 0.0, "target_margin": 0.0, "desirable_weight": 1.0, "undesirable_weight": 1.0}


def tensor(name: str) -> Tensor:
    """Return a valid argument. The end of its name determines its size, and the beginning its dtype."""
    size = SIZES[name[-1]]
    if name.startswith(("mask", "valid", "present", "desirable", "counted")):
        return torch.ones(size, dtype=torch.bool)
    return torch.zeros(size, dtype=torch.int64) if name.startswith(("group", "unit", "ids")) else torch.rand(size)


def arguments(function: Callable[..., Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return valid arguments of a function: tensors with a size, and all others."""
    tensors, others = dict[str, Tensor](), dict[str, Any]()
    hints = typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "cu_seqlens":
            others[name] = packed.cu_seqlens_of([3, 1])
        elif name == "pairs":
            others[name] = pairs.pairs_by_label(torch.tensor([1.0, 0.0]), torch.tensor([True, True]))
        elif name[-2:-1] == "_" and name[-1] in SIZES:
            tensors[name] = tensor(name)
        elif parameter.default is inspect.Parameter.empty:
            others[name] = OPTIONS[name] if name in OPTIONS else next(iter(hints[name]))
    return tensors, others


def checked() -> list[Callable[..., Any]]:
    """Return the public functions with two arguments that determine a shape, and some methods."""
    functions = []
    for module in MODULES:
        for function in formulas(module):
            if function.__name__ not in UNSHAPED:
                tensors, others = arguments(function)
                if len(tensors) + ("cu_seqlens" in others) > 1:
                    functions.append(function)
    return [*functions, AGGREGATION.total, AGGREGATION.weight, normalization.RunningMoments().update]


def named(value: Any) -> str:
    return value if isinstance(value, str) else value.__name__


CASES = [(function, name) for function in checked() for name in arguments(function)[0]]
CHECKED_BY_TORCH = ("last_true", "sequence_mean")
MASKS = [(function, name) for function, name in CASES if "mask" in name and named(function) not in CHECKED_BY_TORCH]


@pytest.mark.parametrize("function", checked(), ids=named)
def test_a_function_accepts_tensors_of_matching_shapes(function):
    tensors, others = arguments(function)
    function(**tensors, **others)


@pytest.mark.parametrize(("function", "name"), CASES, ids=named)
def test_a_function_rejects_a_tensor_of_another_shape(function, name):
    tensors, others = arguments(function)
    size = 3 if len(tensors[name]) == 1 else 1
    with pytest.raises(ValueError, match="shape"):
        function(**tensors | {name: tensors[name][:1].repeat(size)}, **others)


@pytest.mark.parametrize(("function", "name"), MASKS, ids=named)
def test_a_function_rejects_a_mask_that_is_not_bool(function, name):
    tensors, others = arguments(function)
    with pytest.raises(ValueError, match=r"mask_. has dtype torch\.int64, should be torch\.bool"):
        function(**tensors | {name: tensors[name].long()}, **others)
