from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from realign.api import SequenceSample, stat_values
from realign.errors import SettingsError
from realign.functional import PolicyLoss
from realign.interfaces.components import (
    Cispo,
    Clip,
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
from realign.testing import random_batch
from tests.functional.test_objectives import LENGTHS, SETTINGS, batch, loss_of, of_formula, packed

OBJECTIVES = {"clip": Clip, "gspo": Gspo, "cispo": Cispo, "sapo": Sapo, "gmpo": Gmpo, "reinforce": Reinforce}
OBJECTIVES |= {"proximal_kl": ProximalKL}
READS = {
    "clip": ("low", "high", "dual"),
    "gspo": ("low", "high", "dual"),
    "cispo": ("low", "high"),
    "gmpo": ("low", "high"),
    "sapo": ("tau_pos", "tau_neg"),
    "reinforce": (),
    "proximal_kl": (),
}
OWN = [Clip(), Gspo(), Cispo(), Sapo(), Gmpo(), Reinforce(), ProximalKL()]


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
    if name in ("clip", "gspo") and None in (chosen["low"], chosen["high"]):
        return None
    if name in ("cispo", "gmpo") and chosen["high"] is None:
        return None
    return OBJECTIVES[name](**chosen)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("name", "options"), [(n, o) for n in OBJECTIVES for o in SETTINGS if made(n, o) is not None], ids=str
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


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_its_function(name):
    tokens, _ = tokens_of(batch(seed=4))
    objective = OBJECTIVES[name]()
    options = {key: getattr(objective, key) for key in READS[name]}
    args = (tokens.logprobs_T, tokens.old_logprobs_T, tokens.advantages_T, tokens.mask_T, tokens.cu_seqlens)
    for found, want in zip(objective.loss(tokens), loss_of(*args, objective=name, **options), strict=True):
        assert torch.equal(found, want)


def test_every_value_of_the_tokens_is_0_off_the_mask_whatever_the_batch_holds_there():
    data = random_batch(1)
    off_T = ~data["loss_mask"]
    dirty = data.with_tokens(advantages=data["advantages"].masked_fill(off_T, math.nan))
    tokens = PolicyTokens.of(data["prox_logprobs"].masked_fill(off_T, math.inf), data["logprobs"], dirty)
    for x_T in (tokens.logprobs_T, tokens.old_logprobs_T, tokens.advantages_T, tokens.log_ratio_T):
        assert not x_T[off_T].any()
    assert (tokens.ratio_T[off_T] == 1).all()
    spoiled_T = torch.where(off_T, math.nan, tokens.ratio_T)
    assert tokens.sequence_mean(spoiled_T).isfinite().all()


def test_only_the_log_probs_of_the_policy_are_differentiable():
    data = random_batch(1)
    leaves = [data[key].clone().requires_grad_() for key in ("prox_logprobs", "logprobs", "advantages")]
    tokens = PolicyTokens.of(leaves[0], leaves[1], data.with_tokens(advantages=leaves[2]))
    assert tokens.logprobs_T.requires_grad
    assert not tokens.old_logprobs_T.requires_grad
    assert not tokens.advantages_T.requires_grad


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
        found = stat_values(objective.stats(loss, tokens.mask_T))
        want = float(loss.dual_clipped_T[tokens.mask_T].double().mean())
        assert found == {"dual_clip_fraction": pytest.approx(want)}
    for objective in OWN:
        assert objective.stats(objective.loss(tokens), tokens.mask_T) == {}


@pytest.mark.parametrize(
    ("kind", "setting", "text"),
    [
        (Clip, {"low": 1.5}, r"low=1\.5: must be at least 0 and at most 1"),
        (Clip, {"high": -0.1}, r"high=-0\.1: must be at least 0"),
        (Clip, {"dual": 1.0}, r"dual=1\.0: must be above 1, or null"),
        (Clip, {"low": None}, "low must not be null"),
        (Gspo, {"low": None}, "low must not be null"),
        (Gspo, {"dual": 0.5}, r"dual=0\.5: must be above 1"),
        (Cispo, {"low": 1.5}, r"low=1\.5: must be at least 0 and at most 1, or null"),
        (Gmpo, {"low": -0.1}, r"low=-0\.1: must be at least 0"),
        (Sapo, {"tau_pos": 0.0}, r"tau_pos=0\.0: must be above 0"),
        (Sapo, {"tau_neg": math.nan}, "tau_neg=nan: must be above 0"),
        (ProximalKL, {"beta": -1.0}, r"beta=-1\.0: must be at least 0"),
        (ProximalKL, {"target": 0.0}, r"target=0\.0: must be above 0"),
        (ProximalKL, {"beta": 0.0, "target": 0.01}, "beta=0: target multiplies beta"),
    ],
)
def test_wrong_settings_raise(kind, setting, text):
    with pytest.raises(SettingsError, match=text):
        kind(**setting)


@pytest.mark.parametrize(
    ("objective", "row"),
    [
        (Clip(high=0.28), "clip, ratio in [0.8, 1.28]"),
        (Clip(dual=3.0), "clip, ratio in [0.8, 1.2], dual clip 3"),
        (Reinforce(), "reinforce, no ratio"),
        (ProximalKL(3.0), "ratio without clip, KL to the old policy, coefficient 3"),
        (
            ProximalKL(target=0.01),
            "ratio without clip, KL to the old policy, coefficient 1 at first, adapted to 0.01 nats per token",
        ),
        (Cispo(), "cispo, ratio in [0, 5]"),
        (Gspo(), "gspo, sequence ratio in [0.9997, 1.0004]"),
        (Sapo(), "sapo, temperatures 1 and 1.05"),
        (Gmpo(1.5, 0.4), "gmpo, log-ratio in [-1.5, 0.4]"),
        (Gmpo(None, 0.2), "gmpo, log-ratio in [-inf, 0.2]"),
    ],
)
def test_the_launch_table_lists_the_objective_with_its_bounds(objective, row):
    assert objective.describe() == row


def test_the_kl_penalty_uses_the_coefficient_of_the_tokens_or_else_its_own():
    tokens, _ = tokens_of(batch(seed=4))
    own, given = ProximalKL(0.5), replace(tokens, kl_coef=2.0)
    assert torch.equal(own.loss(given).loss_T, ProximalKL(2.0).loss(tokens).loss_T)
    assert not torch.equal(own.loss(given).loss_T, own.loss(tokens).loss_T)


def test_only_a_target_makes_the_coefficient_adaptive():
    assert all(objective.control() is None for objective in OWN)
    control = ProximalKL(0.5, target=0.01).control()
    assert control is not None
    assert control.coef == 0.5
