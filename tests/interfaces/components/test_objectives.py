"""Compare each policy objective with its formula, computed one sequence and one token at a time in plain floats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realign.api import SequenceSample, stat_values
from realign.functional import PolicyLoss
from realign.functional.kl import LOG_RATIO_LIMIT
from realign.functional.losses import policy_loss
from realign.functional.packed import broadcast_to_tokens, cu_seqlens_of
from realign.interfaces.components import (
    Cispo,
    Clip,
    Dppo,
    Gmpo,
    Gspo,
    Objective,
    PolicyTokens,
    ProximalKL,
    Reinforce,
    Sapo,
    policy_loss_of,
    policy_stats,
)
from realign.interfaces.components.aggregation import SeqMeanTokenMean
from realign.interfaces.components.objectives import (
    BinaryDivergence,
    cispo_loss,
    dppo_loss,
    gmpo_loss,
    gspo_loss,
    proximal_kl_loss,
    reinforce_loss,
    sapo_loss,
)

LENGTHS = [4, 0, 1, 7, 3, 12, 2]
OBJECTIVES = ("clip", "gspo", "cispo", "sapo", "gmpo", "dppo", "reinforce", "proximal_kl")
CLIPPED = ("clip", "gspo", "cispo", "gmpo", "dppo")
EVERY = pytest.mark.parametrize("objective", OBJECTIVES)


def loss_of(
    logprobs_T,
    old_T,
    advantages_T,
    mask_T,
    cu_seqlens,
    *,
    objective,
    low=0.2,
    high=0.2,
    dual=None,
    tau_pos=1.0,
    tau_neg=1.05,
):
    """Compute the objective of this name. A bound of None is not applied."""
    args = (logprobs_T, old_T, advantages_T, mask_T)
    top = math.inf if high is None else high
    bottom = 1.0 if low is None else low
    calls = {
        "clip": lambda: policy_loss(*args, clip_low=bottom, clip_high=top, dual_clip=dual),
        "gspo": lambda: gspo_loss(*args, cu_seqlens, low=bottom, high=top, dual=dual),
        "cispo": lambda: cispo_loss(*args, low=low, high=top),
        "gmpo": lambda: gmpo_loss(*args, cu_seqlens, low=low, high=top),
        "dppo": lambda: dppo_loss(
            *args, low=math.inf if low is None else low, high=top, divergence=BinaryDivergence.tv
        ),
        "sapo": lambda: sapo_loss(*args, tau_pos=tau_pos, tau_neg=tau_neg),
        "reinforce": lambda: reinforce_loss(*args),
        "proximal_kl": lambda: proximal_kl_loss(*args, beta=1.0),
    }
    return calls[objective]()


def ones(n):
    return torch.ones(n, dtype=torch.bool)


def within(x, low, high):
    return min(max(x, low), high)


def reference(logp, old, adv, mask, weight, objective, low, high, dual, tau_pos, tau_neg):
    """Return the loss of each token of one sequence, and d (sum of cotangent * loss) / d logp as a function of
    cotangents.

    The derivatives are manual and use Python floats. `low` and `high` bound the ratio (in gmpo: its logarithm).
    """
    tokens = [t for t in range(len(logp)) if mask[t]]
    n = max(len(tokens), 1)
    loss, rows = [0.0] * len(logp), [[0.0] * len(logp) for _ in logp]  # rows[t][u] = d loss_t / d logp_u
    seq = math.exp(sum(logp[t] - old[t] for t in tokens) / n)
    free = dict.fromkeys(tokens, True)
    if objective == "gmpo":
        kept = {}
        for t in tokens:
            move = logp[t] - old[t]
            held = min(move, high) if adv[t] > 0 else max(move, low) if adv[t] < 0 else move
            kept[t], free[t] = held, held == move
        seq = math.exp(sum(kept.values()) / n)
    for t in tokens:
        r, a, w = math.exp(logp[t] - old[t]), adv[t], weight[t]
        if objective in ("clip", "gspo"):
            x = seq if objective == "gspo" else r
            value = max(-a * x, -a * within(x, low, high))
            slope = -a if (x <= high if a > 0 else x >= low) else 0.0
            if dual is not None and a < 0 and value > -a * dual:
                value, slope = -a * dual, 0.0
            if objective == "clip":
                rows[t][t] = w * slope * r
            else:
                for u in tokens:
                    rows[t][u] = w * slope * seq / n
        elif objective == "dppo":
            moved = math.exp(logp[t]) - math.exp(old[t])
            away = moved > high if a > 0 else moved < -low
            value = 0.0 if away else -a * r
            rows[t][t] = w * value
        elif objective == "reinforce":
            value = -a * logp[t]
            rows[t][t] = -a * w
        elif objective == "proximal_kl":  # beta is 1
            value = -a * r + (r - 1 - math.log(r))
            rows[t][t] = w * (-a * r + r - 1)
        elif objective == "cispo":
            value = -a * within(r, low, high) * logp[t]
            rows[t][t] = -a * w * within(r, low, high)
        elif objective == "sapo":
            tau = tau_pos if a > 0 else tau_neg
            p = 1 / (1 + math.exp(-tau * (r - 1)))
            value = -a * 4 / tau * p
            rows[t][t] = -a * w * 4 * p * (1 - p) * r
        else:
            value = -a * seq
            for u in tokens:
                rows[t][u] = -a * w * seq / n * free[u]
        loss[t] = value * w
    return np.array(loss), lambda cotangent: np.array(rows).reshape(len(logp), len(logp)).T @ cotangent


def batch(seed, spread=0.4):
    rng = np.random.default_rng(seed)
    rows = []
    for n in LENGTHS:
        old = -rng.random(n) * 3
        rows.append(
            (old + rng.normal(size=n) * spread, old, rng.normal(size=n), rng.random(n) < 0.7, rng.random(n) + 0.5)
        )
    return rows


def packed(rows):
    return [torch.tensor(np.concatenate(column)) for column in zip(*rows, strict=True)]


SETTINGS = [
    {"low": 0.2, "high": 0.3},
    {"low": 0.05, "high": 0.02, "dual": 1.02},
    {"low": None, "high": 0.1},
    {"low": 0.1, "high": None, "dual": 1.3},
    {"low": None, "high": None, "tau_pos": 2.5, "tau_neg": 0.7},
]


def of_formula(rows, objective, options, cotangent_T, *, weighted=False):
    """Return the loss of each token, and the gradient of its product with `cotangent_T`, from `reference`."""
    low, high = options["low"], options["high"]
    if objective == "dppo":
        bounds = tuple(math.inf if bound is None else bound for bound in (low, high))
    elif objective == "gmpo":
        bounds = (-math.inf if low is None else -low, math.inf if high is None else high)
    else:
        bounds = (0.0 if low is None else 1 - low, math.inf if high is None else 1 + high)
    taus = (options.get("tau_pos", 1.0), options.get("tau_neg", 1.05))
    losses, gradients, start = [], [], 0
    for row in rows:
        end = start + len(row[0])
        weight = row[4] if weighted else np.ones(len(row[0]))
        loss, pull = reference(*row[:4], weight, objective, *bounds, options.get("dual"), *taus)
        losses.append(loss)
        gradients.append(pull(cotangent_T.numpy()[start:end]))
        start = end
    return np.concatenate(losses), np.concatenate(gradients)


def at_ratio(objective, ratio, advantage, **options):
    """Return the loss of a one-token sequence with old log-prob 0, its derivative by the log-prob, and all outputs."""
    logprobs_T = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    options = {"low": 0.2, "high": 0.3, **options}
    advantages_T = torch.tensor([advantage], dtype=torch.float64)
    out = loss_of(
        logprobs_T, torch.zeros(1).double(), advantages_T, ones(1), cu_seqlens_of([1]), objective=objective, **options
    )
    out.loss_T.sum().backward()
    return out.loss_T.item(), float(logprobs_T.grad), out


# Columns: ratio, advantage, loss, d loss / d log-prob, clipped. Computed manually with clip 0.2 below and 0.3 above.
GOLDEN = {
    "clip": [(1.5, 2, -2.6, 0, True), (0.5, 2, -1, -1, False), (0.5, -2, 1.6, 0, True), (1.5, -2, 3, 3, False)],
    "gspo": [(1.5, 2, -2.6, 0, True), (0.5, 2, -1, -1, False), (0.5, -2, 1.6, 0, True), (1.5, -2, 3, 3, False)],
    "reinforce": [
        (1.5, 2, -2 * math.log(1.5), -2, False),
        (0.5, -2, 2 * math.log(0.5), 2, False),
        (1.5, 0, 0, 0, False),
    ],
    "cispo": [
        (1.5, 2, -2.6 * math.log(1.5), -2.6, True),
        (1.2, 2, -2.4 * math.log(1.2), -2.4, False),
        (1.5, -2, 2.6 * math.log(1.5), 2.6, True),
        (0.5, -2, 1.6 * math.log(0.5), 1.6, True),
        (0.5, 2, -1.6 * math.log(0.5), -1.6, True),
    ],
    "proximal_kl": [  # -A r + (r - 1 - log r), and its derivative -A r + (r - 1)
        (1, 2, -2, -2, False),
        (1.5, 2, -2.5 - math.log(1.5), -2.5, False),
        (0.5, -2, 0.5 + math.log(2), 0.5, False),
    ],
    "sapo": [  # at r = 1: half of 4 / tau, and the plain policy gradient
        (1, 2, -4, -2, False),
        (1, -2, 4 / 1.05, 2, False),
        (2, 2, -8 / (1 + math.exp(-1)), -16 * math.exp(-1) / (1 + math.exp(-1)) ** 2, False),
        (2, -2, 8 / 1.05 / (1 + math.exp(-1.05)), 16 * math.exp(-1.05) / (1 + math.exp(-1.05)) ** 2, False),
    ],
    "dppo": [  # the old probability is 1, so the ratio minus 1 is the difference of probabilities
        (1.5, 2, 0, 0, True),
        (0.5, 2, -1, -1, False),
        (0.5, -2, 0, 0, True),
        (0.9, -2, 1.8, 1.8, False),
        (1.5, -2, 3, 3, False),
    ],
    "gmpo": [  # the range is exp(-0.2) to exp(0.3)
        (1.5, 2, -2 * math.exp(0.3), 0, True),
        (1.32, 2, -2.64, -2.64, False),
        (0.5, 2, -1, -1, False),
        (0.5, -2, 2 * math.exp(-0.2), 0, True),
        (0.81, -2, 2 * math.exp(-0.2), 0, True),
        (1.5, -2, 3, 3, False),
    ],
}


@pytest.mark.parametrize(("objective", "row"), [(name, row) for name, rows in GOLDEN.items() for row in rows])
def test_trap_f9_sign_of_the_advantage_times_ratio(objective, row):
    ratio, advantage, loss, slope, clipped = row
    got, derivative, out = at_ratio(objective, ratio, advantage)
    assert got == pytest.approx(loss, abs=1e-12)
    assert derivative == pytest.approx(slope, abs=1e-12)
    assert out.clipped_T.item() is clipped
    assert out.ratio_T.item() == pytest.approx(ratio)


@pytest.mark.parametrize("objective", ["gspo", "gmpo"])
def test_trap_f6_sequence_ratios_equal_a_padded_reference(objective):
    rows = batch(seed=3)
    width = max(LENGTHS)
    moves, mask, advantages = np.zeros((len(rows), width)), np.zeros((len(rows), width)), np.zeros((len(rows), 1))
    for i, (logp, old, adv, kept, _) in enumerate(rows):
        moves[i, : len(logp)], mask[i, : len(logp)] = logp - old, kept
        advantages[i] = adv[0] if len(adv) else 0
    count = mask.sum(1)
    if objective == "gmpo":  # as in TRL and verl: one-sided, on logarithms
        moves = np.where(advantages >= 0, np.minimum(moves, 0.1), np.maximum(moves, -0.1))
    ratio = np.exp((moves * mask).sum(1) / np.maximum(count, 1))
    gain = ratio * advantages[:, 0]
    if objective == "gspo":
        gain = np.minimum(gain, np.clip(ratio, 0.9, 1.1) * advantages[:, 0])
    expected = -gain[count > 0].mean()
    logprobs_T, old_T, _, mask_T, _ = packed(rows)
    cu_seqlens = cu_seqlens_of(LENGTHS)
    args = (logprobs_T, old_T, broadcast_to_tokens(torch.tensor(advantages[:, 0]), cu_seqlens), mask_T, cu_seqlens)
    loss_T = loss_of(*args, objective=objective, low=0.1, high=0.1).loss_T
    mean = SeqMeanTokenMean()
    got = mean.total(loss_T, mask_T, cu_seqlens) / mean.weight(mask_T, cu_seqlens)
    assert got.item() == pytest.approx(expected, rel=1e-12)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.floats(-5, 5)), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_on_policy_every_objective_has_the_plain_policy_gradient(sequences, random):
    lengths = [n for n, _ in sequences]
    cu_seqlens, size = cu_seqlens_of(lengths), sum(lengths)
    mask_T = torch.tensor([random.random() < 0.7 for _ in range(size)], dtype=torch.bool)
    old_T = torch.tensor([-3 * random.random() for _ in range(size)], dtype=torch.float64)
    advantages_T = broadcast_to_tokens(torch.tensor([a for _, a in sequences], dtype=torch.float64), cu_seqlens)
    for objective in OBJECTIVES:
        leaf = old_T.clone().requires_grad_()
        args = (leaf, old_T, advantages_T, mask_T, cu_seqlens)
        loss_of(*args, objective=objective, low=0.2, high=0.2).loss_T.sum().backward()
        expected_T = torch.where(mask_T, -advantages_T, 0)
        torch.testing.assert_close(leaf.grad, expected_T, rtol=1e-12, atol=1e-12)


@EVERY
@pytest.mark.parametrize("difference", [100.0, -100.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_trap_b10_an_extreme_ratio_is_finite_and_counted(objective, difference, advantage):
    logprobs_T = torch.tensor([difference, 0.0, -1.0], requires_grad=True)
    args = (logprobs_T, torch.zeros(3), torch.full((3,), advantage), ones(3), cu_seqlens_of([2, 1]))
    out = loss_of(*args, objective=objective, low=0.2, high=0.2)
    out.loss_T.sum().backward()
    assert out.loss_T.isfinite().all()
    assert logprobs_T.grad.isfinite().all()
    assert out.ratio_T.max() <= math.exp(LOG_RATIO_LIMIT) * (1 + 1e-6)
    assert out.clamped_T.tolist() == [True, False, False]


@EVERY
def test_trap_f1_everything_but_the_log_probs_carries_no_gradient(objective):
    logprobs_T, old_T, advantages_T, mask_T, _ = packed(batch(seed=7))
    leaves = [x.requires_grad_() for x in (logprobs_T, old_T, advantages_T)]
    out = loss_of(*leaves, mask_T, cu_seqlens_of(LENGTHS), objective=objective)
    out.loss_T.sum().backward()
    assert leaves[0].grad is not None
    assert all(leaf.grad is None for leaf in leaves[1:])
    assert not any(x.requires_grad for x in out[1:])


@EVERY
def test_trap_a5_a_nan_on_the_mask_is_not_hidden(objective):
    nan_T = torch.tensor([math.nan])
    args = (nan_T, torch.zeros(1), torch.ones(1), ones(1), cu_seqlens_of([1]))
    assert loss_of(*args, objective=objective, low=0.2, high=0.2).loss_T.isnan().all()


def test_bad_input_is_named():
    def call(x=None, *, objective="clip", **options):
        x = torch.zeros(2) if x is None else x
        return loss_of(torch.zeros(2), torch.zeros(2), x, ones(2), cu_seqlens_of([2]), objective=objective, **options)

    with pytest.raises(ValueError, match=r"clip_low must be in \[0, 1\].* found 1.2"):
        call(low=1.2)
    with pytest.raises(ValueError, match=r"low must be from 0 to 1 .* found 1\.2"):
        call(low=1.2, objective="cispo")
    call(low=1.2, objective="gmpo")
    for objective in CLIPPED:
        with pytest.raises(ValueError, match=r"high (>= 0|at least 0), found .*-0\.1"):
            call(high=-0.1, objective=objective)
    with pytest.raises(ValueError, match="low must be from 0 to inf"):
        call(low=math.nan, objective="gmpo")
    with pytest.raises(ValueError, match=r"tau_pos and tau_neg must be positive, found 0 and 1\.05"):
        call(objective="sapo", tau_pos=0)
    with pytest.raises(ValueError, match="beta must be at least 0, found -1"):
        proximal_kl_loss(*torch.zeros(3, 2), ones(2), beta=-1)
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        call(dual=1.0)
    for objective in OBJECTIVES:
        with pytest.raises(ValueError, match="advantages_T has shape"):
            call(torch.zeros(1), objective=objective)


COMPONENTS = {"clip": Clip, "gspo": Gspo, "cispo": Cispo, "sapo": Sapo, "gmpo": Gmpo, "reinforce": Reinforce}
COMPONENTS |= {"proximal_kl": ProximalKL, "dppo": Dppo}
READS = {
    "clip": ("low", "high", "dual"),
    "gspo": ("low", "high", "dual"),
    "cispo": ("low", "high"),
    "gmpo": ("low", "high"),
    "dppo": ("low", "high"),
    "sapo": ("tau_pos", "tau_neg"),
    "reinforce": (),
    "proximal_kl": (),
}
OWN = [Clip(), Gspo(), Cispo(), Sapo(), Gmpo(), Dppo(), Reinforce(), ProximalKL()]


def tokens_of(rows, requires_grad: bool = False) -> tuple[PolicyTokens, torch.Tensor]:
    """Return the tokens of packed rows, and the leaf tensor of their log-probs."""
    logprobs_T, old_T, advantages_T, mask_T, _ = packed(rows)
    ids = [[1] * n for n in LENGTHS]
    data = SequenceSample.from_sequences(["q"], {"input_ids": [ids]})
    data = data.with_tokens(loss_mask=mask_T, advantages=advantages_T)
    leaf_T = logprobs_T.requires_grad_(requires_grad)
    return PolicyTokens.of(leaf_T, old_T, data), leaf_T


def made(name: str, options: dict) -> Objective | None:
    """Build the objective with the options that it reads. Return None if it requires a bound that is None."""
    chosen = {key: value for key, value in options.items() if key in READS[name]}
    if name in ("clip", "gspo", "dppo") and None in (chosen["low"], chosen["high"]):
        return None
    if name in ("cispo", "gmpo") and chosen["high"] is None:
        return None
    return COMPONENTS[name](**chosen)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("name", "options"), [(n, o) for n in COMPONENTS for o in SETTINGS if made(n, o) is not None], ids=str
)
def test_loss_and_gradient_are_the_weighted_ones_of_the_formula(name, options, weighted):
    objective, rows = made(name, options), batch(seed=2)
    tokens, leaf_T = tokens_of(rows, requires_grad=True)
    weight_T = packed(rows)[4] if weighted else None
    out = policy_loss_of(objective, tokens, weight_T)
    cotangent_T = torch.tensor(np.random.default_rng(2).normal(size=len(tokens.mask_T)))
    (gradient_T,) = torch.autograd.grad((out.loss_T * cotangent_T).sum(), leaf_T)
    used = {k: v for k, v in options.items() if k != "dual" or "dual" in READS[name]}
    loss, gradient = of_formula(rows, name, used, cotangent_T, weighted=weighted)
    np.testing.assert_allclose(out.loss_T.detach().numpy(), loss, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(gradient_T.numpy(), gradient, rtol=1e-12, atol=1e-14)


class Plain(Objective):
    """Objective that returns a tensor."""

    def loss(self, tokens):
        return -tokens.advantages_T * tokens.ratio_T + 3.0


class Full(Objective):
    """Objective that returns a `PolicyLoss`."""

    def loss(self, tokens):
        never_T = torch.zeros_like(tokens.mask_T)
        loss_T = -tokens.advantages_T * tokens.ratio_T + 3.0
        return PolicyLoss(loss_T, tokens.ratio_T.detach(), never_T, never_T, never_T)


def test_both_return_types_give_the_same_loss_and_metrics_and_are_0_off_the_mask():
    tokens, _ = tokens_of(batch(seed=5))
    weight_T = torch.full_like(tokens.advantages_T, 2.0).masked_fill(~tokens.mask_T, math.nan)
    plain, full = (policy_loss_of(objective, tokens, weight_T) for objective in (Plain(), Full()))
    assert torch.equal(plain.loss_T, full.loss_T)
    assert torch.equal(plain.ratio_T, full.ratio_T)
    assert not plain.loss_T[~tokens.mask_T].any()
    mask_T = tokens.mask_T
    want_T = 2 * (3.0 - tokens.advantages_T * tokens.ratio_T)
    torch.testing.assert_close(plain.loss_T[mask_T], want_T[mask_T])
    entropy_T = torch.ones_like(tokens.advantages_T)
    first, second = (stat_values(policy_stats(x, tokens, entropy_T)) for x in (plain, full))
    assert first == second
    assert first["entropy"] == 1


def test_the_fraction_of_dual_clipped_tokens_is_reported_where_there_is_a_dual_clip():
    tokens, _ = tokens_of(batch(seed=2))
    for objective in (Clip(dual=1.02), Gspo(dual=1.02)):
        loss = objective.loss(tokens)
        metrics = stat_values(objective.stats(loss, tokens))
        want = float(loss.dual_clipped_T[tokens.mask_T].double().mean())
        assert metrics == {"dual_clip_fraction": pytest.approx(want)}
    for objective in OWN:
        assert objective.stats(objective.loss(tokens), tokens) == {}


def test_the_divergence_of_dppo_can_be_the_kl_of_the_sampled_token_and_all_others():
    rows = batch(seed=2)
    logprobs_T, old_T, advantages_T, mask_T, _ = packed(rows)
    low, high = 0.01, 0.03
    found = dppo_loss(logprobs_T, old_T, advantages_T, mask_T, low=low, high=high, divergence=BinaryDivergence.kl)
    dropped = []
    for logp, old, advantage, mask in zip(
        *(x.tolist() for x in (logprobs_T, old_T, advantages_T, mask_T)), strict=True
    ):
        p, q = math.exp(logp), math.exp(old)
        if p >= 1:  # the random log-probs are not those of a model
            dropped.append(None)
            continue
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        away = (advantage > 0 and p > q and kl > high) or (advantage < 0 and p < q and kl > low)
        dropped.append(mask and away)
    known = [i for i, away in enumerate(dropped) if away is not None]
    assert [bool(found.clipped_T[i]) for i in known] == [dropped[i] for i in known]
    assert 0 < sum(dropped[i] for i in known) < int(mask_T.sum())
    assert not found.loss_T[found.clipped_T].any()
