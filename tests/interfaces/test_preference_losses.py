"""Compare the losses on pairs and on responses of DPO, KTO and reward models with their formulas in plain floats."""

from __future__ import annotations

import inspect
import itertools
import math
import typing
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.functional import cu_seqlens_of
from realign.interfaces import dpo, kto, reward_model
from realign.interfaces.components.pairs import pairs_by_label
from realign.interfaces.dpo import DPOLoss, dpo_loss
from realign.interfaces.kto import kto_baseline
from realign.interfaces.reward_model import (
    divergence_loss,
)
from tests.formulas import formulas

NUMBERS = st.floats(-30, 30)
plain_dpo = partial(dpo_loss, kind=DPOLoss.sigmoid, label_smoothing=0.0, target_margin=0.0)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def test_pairs_are_neighbors_and_the_larger_label_is_chosen():
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 5.0, 2.0])
    pairs = pairs_by_label(labels, torch.tensor([True] * 7 + [False]))
    assert pairs.chosen_P.tolist() == [0, 3, 4, 6]
    assert pairs.rejected_P.tolist() == [1, 2, 5, 7]
    # equal labels do not count; neither does an absent response
    assert pairs.counts_P.tolist() == [True, True, False, False]
    with pytest.raises(ValueError, match="even number of sequences, found 3"):
        pairs_by_label(torch.zeros(3), torch.ones(3, dtype=torch.bool))


def divergence_reference(values, ids, chosen, rejected, margin):
    """Compute the loss in plain Python, from the first difference to the end of the longer response."""
    a, b = ids[chosen], ids[rejected]
    end = max(len(a), len(b))
    if not end:
        return 0.0
    differ = [i for i in range(end) if (a[i] if i < len(a) else None) != (b[i] if i < len(b) else None)]

    def held(s, i):
        return values[s][min(i, len(values[s]) - 1)] if values[s] else 0.0

    places = range(differ[0] if differ else end - 1, end)
    terms = [softplus(-(held(chosen, i) - held(rejected, i) - margin)) for i in places]
    return sum(terms) / len(terms)


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_divergence_loss_equals_a_walk_over_the_tokens(ids, random):
    ids = ids[: len(ids) // 2 * 2]
    values = [[random.uniform(-3, 3) for _ in row] for row in ids]
    labels = [random.choice([0.0, 1.0]) for _ in ids]
    margins = [random.uniform(0, 1) for _ in ids[::2]]
    pairs = pairs_by_label(f64(*labels), torch.ones(len(ids), dtype=torch.bool))
    flat = torch.tensor([i for row in ids for i in row], dtype=torch.int64)
    got = divergence_loss(
        f64(*(v for row in values for v in row)),
        flat,
        cu_seqlens_of(list(map(len, ids))),
        pairs,
        margin_P=f64(*margins),
    )
    order = zip(pairs.chosen_P.tolist(), pairs.rejected_P.tolist(), margins, strict=True)
    assert got.tolist() == pytest.approx([divergence_reference(values, ids, c, r, m) for c, r, m in order], rel=1e-12)


@settings(deadline=None)
@given(NUMBERS, NUMBERS, st.floats(0.01, 2), st.floats(0.01, 0.45))
def test_robust_dpo_is_unbiased_under_flipped_labels(chosen, rejected, beta, rate):
    """The mean over labels that are flipped with probability `rate` is the loss of the true labels
    (arXiv:2403.00409, lemma 3.1)."""
    right, wrong = (
        plain_dpo(f64(a), f64(b), beta=beta, kind=DPOLoss.robust, label_smoothing=rate).item()
        for a, b in ((chosen, rejected), (rejected, chosen))
    )
    clean = plain_dpo(f64(chosen), f64(rejected), beta=beta).item()
    assert (1 - rate) * right + rate * wrong == pytest.approx(clean, rel=1e-6, abs=1e-6)


def test_the_baseline_of_kto_is_the_mean_log_ratio_and_never_negative():
    policy, reference = f64(-1.0, -2.0, -9.0).requires_grad_(), f64(-3.0, -3.0, 0.0)
    first, all_of_them, none = (torch.tensor(x) for x in ([True, True, False], [True] * 3, [False] * 3))
    assert kto_baseline(policy, reference, first).item() == 1.5
    assert not kto_baseline(policy, reference, first).requires_grad
    assert kto_baseline(policy, reference, all_of_them).item() == 0  # the mean is -2
    assert kto_baseline(policy, reference, none).item() == 0
    spoilt = torch.where(first, policy.detach(), math.nan)
    assert kto_baseline(spoilt, reference, first).item() == 1.5


def elementwise() -> list[tuple[typing.Callable, dict]]:
    """Return every loss of the modules whose tensors have one value per pair or per sequence, with its choices."""
    plain = {"beta": [0.3], "label_smoothing": [0.0, 0.2], "target_margin": [0.0, 0.5], "desirable_weight": [1.5]}
    plain |= {"undesirable_weight": [0.5], "margin_P": [None, "tensor"]}
    functions = []
    for function in (function for module in (reward_model, dpo, kto) for function in formulas(module)):
        names = inspect.signature(function).parameters
        if not function.__name__.endswith("_loss") or {"cu_seqlens", "n_groups"} & set(names):
            continue
        choices = {n: list(DPOLoss) if n == "kind" else plain.get(n, ["tensor"]) for n in names}
        for values in itertools.product(*choices.values()):
            chosen = dict(zip(choices, values, strict=True))
            zero = chosen.get("kind") in (DPOLoss.ipo, DPOLoss.odds_ratio)
            if not (zero and (chosen["label_smoothing"] or chosen["target_margin"])):
                functions.append((function, chosen))
    return functions


@pytest.mark.parametrize(("function", "chosen"), elementwise(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_loss_does_not_depend_on_the_other_pairs_or_responses_of_a_micro_batch(function, chosen):
    """New losses of the modules are found by introspection."""
    generator = torch.Generator().manual_seed(0)
    tensors = {n: -3 * torch.rand(7, generator=generator).double() for n, x in chosen.items() if isinstance(x, str)}
    tensors = {n: x < -1.5 if n.startswith("desirable") else x for n, x in tensors.items() if chosen[n] == "tensor"}
    options = {n: x for n, x in chosen.items() if n not in tensors}
    first = next(iter(tensors))

    def run(rows):
        leaf = tensors[first][rows].requires_grad_()
        loss = function(**{**options, **{n: x[rows] for n, x in tensors.items()}, first: leaf})
        assert not loss[0].isnan()
        return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]

    whole, order = run(torch.arange(7)), torch.randperm(7, generator=generator)
    for size in (1, 2, 7):
        pieces = [run(rows) for rows in order.split(size)]
        for k in (0, 1):
            torch.testing.assert_close(torch.cat([p[k] for p in pieces]), whole[k][order], rtol=1e-12, atol=0)


def test_every_loss_on_pairs_and_responses_is_found():
    assert {f.__name__ for f, _ in elementwise()} == {
        "pairwise_loss",
        "rating_loss",
        "comparison_loss",
        "centering_loss",
        "dpo_loss",
        "kto_loss",
    }
