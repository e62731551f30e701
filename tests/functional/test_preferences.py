from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.functional import (
    DPOLoss,
    best_of_n_loss,
    comparison_loss,
    cu_seqlens_of,
    divergence_loss,
    dpo_loss,
    pairs_by_label,
    pairwise_loss,
    rating_loss,
)

NUMBERS = st.floats(-30, 30)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def test_pairs_are_neighbours_and_the_larger_label_is_chosen():
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 5.0, 2.0])
    pairs = pairs_by_label(labels, torch.tensor([True] * 7 + [False]))
    assert pairs.chosen_P.tolist() == [0, 3, 4, 6]
    assert pairs.rejected_P.tolist() == [1, 2, 5, 7]
    # equal labels do not count; neither does an absent response
    assert pairs.counts_P.tolist() == [True, True, False, False]
    with pytest.raises(ValueError, match="even number of sequences, found 3"):
        pairs_by_label(torch.zeros(3), torch.ones(3, dtype=torch.bool))


@settings(deadline=None)
@given(NUMBERS, NUMBERS, st.floats(0, 5))
def test_pairwise_loss_and_gradient_are_those_of_bradley_and_terry(chosen, rejected, margin):
    a, b = f64(chosen).requires_grad_(), f64(rejected).requires_grad_()
    loss = pairwise_loss(a, b, margin_P=f64(margin))
    x = chosen - rejected - margin
    assert loss.item() == pytest.approx(softplus(-x), rel=1e-12)
    loss.sum().backward()
    assert a.grad.item() == pytest.approx(-math.exp(-softplus(x)), rel=1e-9)
    assert b.grad.item() == -a.grad.item()


def test_pairwise_loss_by_hand():
    assert pairwise_loss(f64(2.0, 1.0), f64(2.0, 3.0)).tolist() == pytest.approx([math.log(2), math.log1p(math.e**2)])
    assert pairwise_loss(f64(2.0), f64(1.0), margin_P=f64(1.0)).item() == pytest.approx(math.log(2))
    assert pairwise_loss(torch.tensor([500.0]), torch.tensor([-500.0])).item() == 0.0
    with pytest.raises(ValueError, match=r"rejected_P has shape \(1,\), should be \(2,\)"):
        pairwise_loss(f64(1.0, 2.0), f64(1.0))


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


@settings(deadline=None, max_examples=60)
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


def test_divergence_loss_leaves_out_what_the_two_share_and_differentiates_the_rest():
    after = f64(9.0, 1.0, 2.0, -9.0, 0.0).requires_grad_()
    pairs = pairs_by_label(f64(1.0, 0.0), torch.tensor([True, True]))
    loss = divergence_loss(after, torch.tensor([5, 6, 7, 5, 8]), torch.tensor([0, 3, 5]), pairs)
    # 1 - 0, then 2 - 0 (last score repeated)
    assert loss.item() == pytest.approx((softplus(-1.0) + softplus(-2.0)) / 2)
    loss.sum().backward()
    down = [math.exp(-softplus(x)) / 2 for x in (1.0, 2.0)]
    assert after.grad.tolist() == pytest.approx([0, -down[0], -down[1], 0, sum(down)])


@settings(deadline=None)
@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_best_of_n_is_cross_entropy_per_ragged_group_in_any_order(groups, random):
    rows = [(g, x, i == 0) for g, group in enumerate(groups) for i, x in enumerate(group)]
    random.shuffle(rows)
    scores = f64(*(x for _, x, _ in rows)).requires_grad_()
    owner = torch.tensor([g for g, _, _ in rows])
    loss = best_of_n_loss(scores, f64(*(float(best) for *_, best in rows)), owner, len(groups) + 1)
    for g, group in enumerate(groups):
        top = max(group)
        total = sum(math.exp(x - top) for x in group)
        assert loss[g].item() == pytest.approx(top + math.log(total) - group[0], rel=1e-9, abs=1e-12)
    assert loss[-1].item() == 0.0
    loss.sum().backward()
    for (g, x, best), slope in zip(rows, scores.grad.tolist(), strict=True):
        top = max(groups[g])
        share = math.exp(x - top) / sum(math.exp(y - top) for y in groups[g])
        assert slope == pytest.approx(share - best, rel=1e-9, abs=1e-12)


def test_two_candidates_are_a_pair():
    scores, labels = f64(1.0, 3.0), f64(0.0, 1.0)
    of_group = best_of_n_loss(scores, labels, torch.zeros(2, dtype=torch.int64), 1)
    torch.testing.assert_close(of_group, pairwise_loss(scores[1:], scores[:1]))


def test_squared_errors_by_hand():
    scores = f64(1.0, -2.0).requires_grad_()
    loss = rating_loss(scores, f64(3.0, -2.0))
    assert loss.tolist() == [4.0, 0.0]
    loss.sum().backward()
    assert scores.grad.tolist() == [-4.0, 0.0]
    assert comparison_loss(f64(5.0), f64(2.0), f64(1.0)).tolist() == [4.0]


@settings(deadline=None)
@given(NUMBERS, NUMBERS, st.floats(0.01, 2), st.floats(0, 0.49))
def test_dpo_equals_its_formula_and_slope(chosen, rejected, beta, smoothing):
    a = f64(chosen).requires_grad_()
    loss = dpo_loss(a, f64(rejected), beta=beta, label_smoothing=smoothing)
    x = beta * (chosen - rejected)
    assert loss.item() == pytest.approx((1 - smoothing) * softplus(-x) + smoothing * softplus(x), rel=1e-12)
    loss.sum().backward()
    slope = beta * (smoothing * math.exp(-softplus(-x)) - (1 - smoothing) * math.exp(-softplus(x)))
    assert a.grad.item() == pytest.approx(slope, rel=1e-9, abs=1e-12)
    ipo = dpo_loss(f64(chosen), f64(rejected), beta=beta, kind=DPOLoss.ipo)
    assert ipo.item() == pytest.approx((chosen - rejected - 1 / (2 * beta)) ** 2, rel=1e-12)


def test_smoothed_labels_have_their_least_loss_where_the_model_is_as_sure_as_they_are():
    best = math.log(0.9 / 0.1) / 0.5
    at_best, more, less = (dpo_loss(f64(x), f64(0.0), beta=0.5, label_smoothing=0.1).item() for x in (best, 6.0, 3.0))
    assert at_best < min(more, less)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"beta": 0.0}, "beta must be positive"),
        ({"beta": 1.0, "label_smoothing": 0.5}, "label_smoothing in"),
        ({"beta": 1.0, "label_smoothing": 0.1, "kind": DPOLoss.ipo}, "has no effect on the ipo loss"),
    ],
)
def test_dpo_settings_out_of_range_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        dpo_loss(f64(1.0), f64(0.0), **setting)
