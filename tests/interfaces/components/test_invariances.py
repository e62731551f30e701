"""Test invariances of all losses, estimators and aggregations, including new ones (traps A5, A6, A14, D1, D13).

The tests find functions by introspection and pass arguments by name. They include each new public function of `MODULES`
whose first argument is a tensor, and each aggregation. If a function has an unknown argument, the tests fail and the
message says what to add.
"""

from __future__ import annotations

import inspect
import itertools
import math
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor

from realign.functional import kl, losses, returns
from realign.functional.packed import cu_seqlens_of, sequence_index
from realign.interfaces import ilql
from realign.interfaces.components import aggregation, objectives, value_loss
from tests.formulas import formulas, public_functions
from tests.grids import rotating

LOSSES = (losses, objectives, value_loss, ilql)
MODULES = (*LOSSES, kl, returns)
LENGTHS = [0, 1, 5, 3, 8, 2, 1, 6]


def logprob(generator: torch.Generator, size: int) -> Tensor:
    return -torch.rand(size, generator=generator, dtype=torch.float64)


def number(generator: torch.Generator, size: int) -> Tensor:
    return torch.randn(size, generator=generator, dtype=torch.float64)


# Functions that create tensor arguments. Names with _T have one value per token, names with _S one per sequence.
TENSORS: dict[str, Callable[[torch.Generator, int], Tensor]] = {
    "logprobs_T": logprob,
    "old_logprobs_T": logprob,
    "ref_logprobs_T": logprob,
    "proximal_logprobs_T": logprob,
    "behavior_logprobs_T": logprob,
    "advantages_T": number,
    "values_T": number,
    "old_values_T": number,
    "returns_T": number,
    "rewards_T": number,
    "kl_T": number,
    "x_T": number,
    "loss_T": number,
    "scores_S": number,
    "bootstrap_S": number,
}
# Values of plain arguments. All combinations are tested. Enum values come from the annotations.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "clip_low": (0.2,),
    "clip_high": (0.3,),
    "dual_clip": (None, 1.5),
    "floor": (None, 0.7),
    "cap": (None, 1.2),
    "clip": (None, 0.2),
    "huber_delta": (0.5,),
    "gamma": (0.9,),
    "lam": (0.8,),
    "n": (1, 3),
    "beta": (0.5,),
    "kl_coef": (0.0, 0.1),
    "low": (None, 0.2),
    "high": (0.3,),
    "dual": (None, 1.5),
    "tau": (0.7,),
    "tau_pos": (1.0,),
    "tau_neg": (1.05,),
}
HOW_TO_TEACH = (
    "{function} has an argument {name!r} that the invariance tests do not know: add it to TENSORS (a tensor; its name "
    "ends in _T or _S) or to OPTIONS (a plain value) in tests/interfaces/components/test_invariances.py"
)


@dataclass(frozen=True)
class Case:
    """Public function with one choice of its plain arguments, and of the optional tensors to pass."""

    function: Callable[..., Any]
    tensors: tuple[str, ...]
    options: dict[str, Any]
    whole: bool  # whether the function needs cu_seqlens

    def __str__(self) -> str:
        chosen = [f"{k}={v.value if isinstance(v, Enum) else v}" for k, v in self.options.items()]
        return "-".join([self.function.__qualname__, *chosen, *self.tensors[-1:]])


def cases_of(function: Callable[..., Any]) -> Iterator[Case]:
    hints = typing.get_type_hints(function)
    choices: dict[str, list[Any]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = hints[name]
        if name in ("mask_T", "cu_seqlens"):
            continue
        if inspect.isclass(annotation) and issubclass(annotation, Enum):
            choices[name] = list(annotation)
        elif name in OPTIONS:
            optional = type(None) in typing.get_args(annotation)
            choices[name] = [value for value in OPTIONS[name] if value is not None or optional]
        elif name in TENSORS:
            choices[name] = [True, False] if parameter.default is None else [True]
        else:
            pytest.fail(HOW_TO_TEACH.format(function=f"{function.__module__}.{function.__name__}", name=name))
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        tensors = tuple(name for name in chosen if name in TENSORS and chosen[name])
        options = {name: value for name, value in chosen.items() if name not in TENSORS}
        if combination_is_valid(tensors, options):
            yield Case(function, tensors, options, "cu_seqlens" in hints)


def combination_is_valid(tensors: tuple[str, ...], options: dict[str, Any]) -> bool:
    """Exclude combinations that the functions reject. Other tests cover these errors."""
    return "kl_T" in tensors or not options.get("kl_coef")


AGGREGATIONS = [
    kind(7.0) if kind is aggregation.Constant else kind()
    for kind in vars(aggregation).values()
    if inspect.isclass(kind) and issubclass(kind, aggregation.Aggregation) and not inspect.isabstract(kind)
]
METHODS = [method for each in AGGREGATIONS for method in (each.total, each.weight)]
FUNCTIONS = [*(function for module in MODULES for function in formulas(module)), *METHODS]
CASES = [case for function in FUNCTIONS for case in cases_of(function)]
LOSS_CASES = [case for case in CASES if case.function.__module__ in {module.__name__ for module in LOSSES}]


@dataclass(frozen=True)
class Batch:
    lengths: list[int]
    mask_T: Tensor
    tensors: dict[str, Tensor]
    cotangent_T: Tensor

    @staticmethod
    def make(lengths: list[int] = LENGTHS, seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        size = {"T": sum(lengths), "S": len(lengths)}
        tensors = {name: make(generator, size[name[-1]]).to(dtype) for name, make in TENSORS.items()}
        mask_T = torch.rand(size["T"], generator=generator) < 0.6
        return Batch(lengths, mask_T, tensors, number(generator, size["T"]).to(dtype))

    def take(self, rows: list[int]) -> Batch:
        """Return the sequences `rows`, packed in that order."""
        slots_T = self.slots(rows)
        tensors = {name: x[slots_T if name.endswith("_T") else rows] for name, x in self.tensors.items()}
        lengths = [self.lengths[row] for row in rows]
        return Batch(lengths, self.mask_T[slots_T], tensors, self.cotangent_T[slots_T])

    def slots(self, rows: list[int]) -> Tensor:
        starts = cu_seqlens_of(self.lengths).tolist()
        return torch.tensor([t for row in rows for t in range(starts[row], starts[row + 1])], dtype=torch.int64)

    def spoil(self, garbage: float | None) -> Batch:
        """Overwrite token-level inputs off the mask, and sequence-level inputs of sequences without trained tokens."""
        generator = torch.Generator().manual_seed(9)
        index_T = sequence_index(cu_seqlens_of(self.lengths))
        trained_S = torch.zeros(len(self.lengths), dtype=torch.bool)
        trained_S[index_T[self.mask_T]] = True
        tensors = {}
        for name, x in self.tensors.items():
            rubbish = 1e3 * number(generator, len(x)) if garbage is None else torch.full_like(x, garbage)
            tensors[name] = torch.where(self.mask_T if name.endswith("_T") else trained_S, x, rubbish.to(x.dtype))
        return Batch(self.lengths, self.mask_T, tensors, self.cotangent_T)


@dataclass(frozen=True)
class Outcome:
    outputs: list[Tensor]
    gradients: dict[str, Tensor]


def run(case: Case, batch: Batch) -> Outcome:
    """Return outputs, and the gradient of their weighted sum with respect to each tensor (fixed weights per token)."""
    leaves = {name: batch.tensors[name].clone().requires_grad_() for name in case.tensors}
    arguments = {**leaves, **case.options, "mask_T": batch.mask_T}
    if case.whole:
        arguments["cu_seqlens"] = cu_seqlens_of(batch.lengths)
    result = case.function(**arguments)
    outputs = list(result) if isinstance(result, tuple) else [result]
    total = sum((x * batch.cotangent_T if x.ndim else x).sum() for x in outputs if x.requires_grad)
    if not isinstance(total, Tensor):
        return Outcome(outputs, {})
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    named = {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    return Outcome([x.detach() for x in outputs], named)


def partitions() -> Iterator[list[list[int]]]:
    generator = torch.Generator().manual_seed(5)
    everyone = list(range(len(LENGTHS)))
    yield [[row] for row in everyone]
    yield [everyone[::-1]]
    for pieces in (2, 3, 5):
        order = torch.randperm(len(LENGTHS), generator=generator).tolist()
        cuts = sorted((torch.randperm(len(LENGTHS) - 1, generator=generator)[: pieces - 1] + 1).tolist())
        yield [order[a:b] for a, b in itertools.pairwise([0, *cuts, len(LENGTHS)])]


def put_together(batch: Batch, parts: list[list[int]], outcomes: list[Outcome]) -> Outcome:
    """Combine the outcomes of micro-batches: put tokens back in their slots, and sum scalars."""
    slots_T = torch.cat([batch.slots(rows) for rows in parts])

    def join(pieces: list[Tensor]) -> Tensor:
        if pieces[0].ndim == 0:
            return torch.stack(pieces).sum(0)
        out_T = torch.empty_like(torch.cat(pieces))
        out_T[slots_T] = torch.cat(pieces)
        return out_T

    outputs = [join(list(pieces)) for pieces in zip(*(outcome.outputs for outcome in outcomes), strict=True)]
    gradients = {name: join([outcome.gradients[name] for outcome in outcomes]) for name in outcomes[0].gradients}
    return Outcome(outputs, gradients)


def assert_same(got: Outcome, expected: Outcome, tolerance: float) -> None:
    assert got.gradients.keys() == expected.gradients.keys()
    for a, b in zip(got.outputs, expected.outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(got.gradients[name], gradient, rtol=tolerance, atol=tolerance)


def ids(value: Any) -> str:
    return type(value).__name__ if isinstance(value, aggregation.Aggregation) else str(value)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_trap_d1_any_partition_in_any_order_gives_the_same(case):
    batch = Batch.make()
    whole = run(case, batch)
    for parts in partitions():
        pieces = [run(case, batch.take(rows)) for rows in parts]
        assert_same(put_together(batch, parts, pieces), whole, 1e-12)


@pytest.mark.parametrize(("case", "garbage"), rotating(CASES, [None, math.nan, math.inf, -math.inf]), ids=ids)
def test_trap_a6_nothing_off_the_mask_has_an_effect(case, garbage):
    batch = Batch.make()
    clean, spoilt = run(case, batch), run(case, batch.spoil(garbage))
    assert clean.gradients.keys() == spoilt.gradients.keys()
    for a, b in zip(clean.outputs, spoilt.outputs, strict=True):
        assert torch.equal(a, b)
    for name, gradient in clean.gradients.items():
        assert torch.equal(gradient, spoilt.gradients[name])
        assert not gradient[~batch.mask_T].any()


@pytest.mark.parametrize(("case", "lengths"), rotating(CASES, [[], [0], [1, 0, 1], [0, 4, 1, 0]]), ids=ids)
def test_trap_a14_empty_short_and_fully_masked_sequences_weigh_nothing(case, lengths):
    batch = Batch.make(lengths)
    masked = Batch(lengths, torch.zeros_like(batch.mask_T), batch.tensors, batch.cotangent_T).spoil(math.nan)
    outcome = run(case, masked)
    assert all(x.isfinite().all() for x in outcome.outputs)
    assert not outcome.outputs[0].any()
    assert not any(gradient.any() for gradient in outcome.gradients.values())
    trained = run(case, Batch(lengths, torch.ones_like(batch.mask_T), batch.tensors, batch.cotangent_T))
    assert all(x.isfinite().all() for x in (*trained.outputs, *trained.gradients.values()))


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_trap_f1_only_the_first_argument_is_differentiated(case):
    assert set(run(case, Batch.make()).gradients) <= {next(iter(inspect.signature(case.function).parameters))}


@pytest.mark.parametrize(("case", "mode"), rotating(LOSS_CASES, AGGREGATIONS), ids=ids)
def test_trap_d13_every_loss_under_every_aggregation_is_blind_to_the_partition(case, mode):
    batch = Batch.make()
    leaf = "logprobs_T" if "logprobs_T" in case.tensors else case.tensors[0]

    def parts_of_loss(parts):
        shared = torch.ones((), dtype=torch.float64, requires_grad=True)  # represents a parameter of the network
        total, weight = torch.zeros((), dtype=torch.float64), torch.zeros(())
        for rows in parts:
            part = batch.take(rows)
            arguments = {**{name: part.tensors[name] for name in case.tensors}, **case.options, "mask_T": part.mask_T}
            arguments[leaf] = arguments[leaf] * shared
            cu_seqlens = cu_seqlens_of(part.lengths)
            if case.whole:
                arguments["cu_seqlens"] = cu_seqlens
            result = case.function(**arguments)
            loss_T = result[0] if isinstance(result, tuple) else result
            total = total + mode.total(loss_T, part.mask_T, cu_seqlens)
            weight = weight + mode.weight(part.mask_T, cu_seqlens)
        loss = total / weight
        gradient = torch.autograd.grad(loss, shared)[0] if loss.requires_grad else torch.zeros(())
        return loss.item(), gradient.item()

    whole = parts_of_loss([list(range(len(LENGTHS)))])
    for parts in partitions():
        assert parts_of_loss(parts) == pytest.approx(whole, rel=1e-12)


def test_trap_d13_every_public_function_is_in_the_tests():
    tested = {case.function.__name__ for case in CASES}
    for module in MODULES:
        assert {function.__name__ for function in formulas(module)} <= tested
    for module in (losses, kl, returns):  # have nothing but formulas
        assert {function.__name__ for function in public_functions(module)} <= tested


def test_trap_d13_every_policy_loss_is_in_the_tests():
    returning = {case.function.__name__ for case in LOSS_CASES if isinstance(run(case, Batch.make()), Outcome)}
    assert returning == {
        "policy_loss",
        "gspo_loss",
        "cispo_loss",
        "sapo_loss",
        "gmpo_loss",
        "reinforce_loss",
        "dppo_loss",
        "proximal_kl_loss",
        "sequence_mean",
        "behavior_weights",
        "nll_loss",
        "value_loss",
        "expectile_loss",
    }


def test_trap_d13_an_unknown_argument_fails_and_says_what_to_do():
    def novel_loss(logprobs_T: Tensor, mystery_T: Tensor, mask_T: Tensor) -> Tensor:
        return logprobs_T * mystery_T

    with pytest.raises(pytest.fail.Exception, match=r"novel_loss has an argument 'mystery_T'.*add it to TENSORS"):
        list(cases_of(novel_loss))


def leaky_mean(logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return a common error: a mean per micro-batch that includes the padding."""
    return -logprobs_T * mask_T / len(logprobs_T)


def test_the_tests_catch_a_loss_that_breaks_the_rules():
    (case,) = cases_of(leaky_mean)
    with pytest.raises(AssertionError):
        test_trap_d1_any_partition_in_any_order_gives_the_same(case)
    with pytest.raises(AssertionError):
        test_trap_a6_nothing_off_the_mask_has_an_effect(case, math.nan)
