"""Settings of PPO's loss and credit reach the weights: a step equals one in plain torch, with values from the test."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from realign.api import MicroBatchSpec, Model, SequenceSample
from realign.functional import KLEstimator, Scope
from realign.interfaces.components import (
    GAE,
    Clip,
    EntropyBonus,
    KLPenalty,
    KLPlace,
    Normalization,
    SeqMeanTokenMean,
    TokenMean,
    ValueObjective,
)
from realign.interfaces.ppo import PPOActorInterface
from realign.testing import BigramEngine, random_batch

KEYS = ["input_ids", "loss_mask", "logprobs", "ref_logprobs", "advantages", "values", "returns"]


@dataclass
class Settings:
    """Values of a step, and the same values as arguments of `PPOActorInterface`."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    entropy: float = 0.0
    kl: float = 0.0
    estimator: str = "k3"
    value: float | None = None
    value_clip: float | None = None
    by_sequence: bool = False

    def interface(self) -> PPOActorInterface:
        """Return an interface with these settings."""
        penalty = KLPenalty(KLPlace.loss, self.kl, KLEstimator(self.estimator)) if self.kl else KLPenalty()
        critic = {} if self.value is None else {"value": ValueObjective(clip=self.value_clip, coef=self.value)}
        return PPOActorInterface(
            objective=Clip(self.low, self.high, self.dual),
            entropy=EntropyBonus(self.entropy),
            kl=penalty,
            critic="none" if self.value is None else "shared",
            aggregation=SeqMeanTokenMean() if self.by_sequence else TokenMean(),
            **critic,
        )


def token_loss(s: Settings, logp_V: Tensor, value: Tensor, token: int, old: tuple[float, ...]) -> Tensor:
    """Compute the loss of one token from the definitions."""
    old_logp, ref, advantage, old_value, target = old
    ratio = (logp_V[token] - old_logp).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - s.low, 1 + s.high))
    if s.dual is not None and advantage < 0:
        loss = loss.clamp(max=-advantage * s.dual)
    difference = logp_V[token] - ref
    estimates = {"k2": difference**2 / 2, "k3": (-difference).exp() - 1 + difference}
    loss = loss + s.kl * estimates[s.estimator] + s.entropy * (logp_V.exp() * logp_V).sum()
    if s.value is not None:
        errors = [(value - target) ** 2 / 2]
        if s.value_clip is not None:
            held = value.clamp(old_value - s.value_clip, old_value + s.value_clip)
            errors.append((held - target) ** 2 / 2)
        loss = loss + s.value * torch.stack(errors).max()
    return loss


def plain_gradients(s: Settings, data: SequenceSample, engine: BigramEngine) -> tuple[Tensor, ...]:
    """Return the gradients of both tables in one step on a batch with advantages and returns."""
    tables = logits_VV, values_V = tuple(x.detach().clone().requires_grad_() for x in engine.parameters)
    per_sequence = []
    for ids, mask, *old in zip(*(data.sequences(key) for key in KEYS), strict=True):
        where = mask.nonzero().flatten().tolist()
        losses = []
        for t in where:
            before, known = int(ids[t - 1]), tuple(float(x[t]) for x in old)
            losses.append(token_loss(s, logits_VV[before].log_softmax(-1), values_V[before], int(ids[t]), known))
        if losses:
            per_sequence.append(torch.stack(losses))
    total = torch.stack([x.mean() for x in per_sequence]) if s.by_sequence else torch.cat(per_sequence)
    gradients = torch.autograd.grad(total.mean(), tables, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(gradients, tables, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        Settings(low=0.6),
        Settings(high=0.6),
        Settings(dual=1.5),
        Settings(entropy=0.7),
        Settings(kl=0.4),
        Settings(kl=0.4, estimator="k2"),
        Settings(value=0.7),
        Settings(value=0.7, value_clip=0.05),
        Settings(by_sequence=True),
        Settings(low=0.1, high=0.3, dual=2.0, entropy=0.2, kl=0.3, value=0.5, value_clip=0.1, by_sequence=True),
    ],
    ids=str,
)
def test_each_setting_of_the_loss_changes_the_step_as_its_definition_says(settings):
    data = random_batch(3).select(KEYS)
    engine = BigramEngine(seed=5, lr=1.0)
    start = [x.detach().clone() for x in engine.parameters]
    want = plain_gradients(settings, data, engine)
    default = plain_gradients(Settings(), data, engine)
    settings.interface().train_step(Model("actor", engine), data, MicroBatchSpec(n_microbatches=3))
    for before, after, gradient in zip(start, engine.parameters, want, strict=True):
        torch.testing.assert_close(before - after.detach(), gradient, rtol=0, atol=1e-6)
    assert any(float((a - b).abs().max()) > 1e-4 for a, b in zip(want, default, strict=True))


def kl_estimates(difference: Tensor) -> dict[str, Tensor]:
    """Return the KL estimates of tokens from log-prob minus reference log-prob."""
    return {"k1": difference, "k2": difference**2 / 2, "k3": (-difference).exp() - 1 + difference}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_penalty_in_the_reward_is_that_of_the_estimator(estimator):
    data = random_batch(3).select(["input_ids", "loss_mask", "logprobs", "ref_logprobs", "rewards"])
    kl = KLPenalty(KLPlace.reward, 0.3, KLEstimator(estimator))
    interface = PPOActorInterface(kl=kl, advantage=GAE(lam=1.0), adv_norm=Normalization(Scope.none, Scope.none))
    out = interface.credit(Model("actor", BigramEngine()), data, MicroBatchSpec())
    keys = ("returns", "loss_mask")
    rows = zip(*(out.sequences(key) for key in keys), *map(data.sequences, ("logprobs", "ref_logprobs")), strict=True)
    checked = 0
    for (returns, mask, logp, ref), score in zip(rows, data["rewards"].tolist(), strict=True):
        if mask.any():
            penalty = float(kl_estimates((logp - ref)[mask])[estimator].sum())
            assert float(returns[mask][0]) == pytest.approx(score - 0.3 * penalty, abs=1e-5)
            checked += 1
    assert checked > 3
