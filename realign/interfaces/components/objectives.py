"""Policy objectives: the loss of one token, from its log-probs and its advantage. One class is one objective.

An objective of your own is a subclass of `Objective` with `loss`:

    class Topr(Objective):
        def loss(self, tokens):
            weight_T = torch.where(tokens.advantages_T > 0, 1.0, tokens.ratio_T.detach().clamp(max=1.0))
            return -weight_T * tokens.advantages_T * tokens.logprobs_T

Everything else of the actor (KL penalty, entropy bonus, correction, early stopping, metrics) applies to it unchanged.

Above each class is its formula, a pure function (`Clip` and `Gspo` share `realign.functional.policy_loss`). Notation:
l = logprobs - old (clamped at `LOG_RATIO_LIMIT`), r = exp(l), A the advantage, sg(x) the detached x. The mean over a
sequence is the mean over its tokens in the mask. Arguments of the functions:

- `logprobs_T`: [T] log-probs of the trained policy; only they are differentiable.
- `old_logprobs_T`: [T] log-probs of the policy in the denominator of the ratio.
- `advantages_T`: [T].
- `mask_T`: [T] bool.
- `cu_seqlens`: int32 [S+1]. `gspo_loss` and `gmpo_loss` need whole sequences, which micro-batches never split.

Each function returns a `PolicyLoss` that is 0 outside the mask, whose `ratio_T` is the ratio that the clip applies to
(the sequence's ratio in `gspo_loss`, else r). A wrong shape or an argument out of range raises `ValueError`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from realign.api import (
    Max,
    Mean,
    MicroBatchSpec,
    Min,
    Model,
    Panel,
    SequenceSample,
    Stats,
    masked_max,
    masked_mean,
    masked_variance,
)
from realign.errors import RunError, SettingsError
from realign.functional import (
    KLEstimator,
    PolicyLoss,
    Reduce,
    broadcast_to_tokens,
    kl_estimate,
    log_ratio,
    policy_loss,
    segment_sum,
)
from realign.functional.packed import at_least_fp32, check_shapes
from realign.interfaces.components.scoring import old_logprobs, score_logprobs
from realign.settings import Fraction, NonNegative, Positive, Range, Settings


@dataclass(frozen=True)
class PolicyTokens:
    """The tokens of a micro-batch, the input of an objective: whole sequences, all values exactly 0 off the mask."""

    logprobs_T: Tensor
    """[T] log-probs of the current policy; the only differentiable values."""
    old_logprobs_T: Tensor
    """[T] old log-probs of ratios: recomputed ones if the graph provides them, else the sampler's."""
    advantages_T: Tensor
    """[T]."""
    mask_T: Tensor
    """[T] bool: the tokens that are trained."""
    cu_seqlens: Tensor
    """int32 [S+1]."""
    data: SequenceSample
    """The micro-batch, with every key that the RPC reads and those that `Objective.prepare` added."""
    kl_coef: float | None = None
    """Current coefficient of an objective with a `control`; None: the objective has none."""

    @classmethod
    def of(
        cls, logprobs_T: Tensor, old_logprobs_T: Tensor, data: SequenceSample, kl_coef: float | None = None
    ) -> PolicyTokens:
        """Return the tokens of `data` (with `advantages` and `loss_mask`) under these log-probs [T]."""
        mask_T = data["loss_mask"]

        def zero_outside(x_T: Tensor) -> Tensor:
            return torch.where(mask_T, at_least_fp32(x_T), 0)

        old_T, advantages_T = zero_outside(old_logprobs_T.detach()), zero_outside(data["advantages"].detach())
        return cls(zero_outside(logprobs_T), old_T, advantages_T, mask_T, data.cu_seqlens(), data, kl_coef)

    @property
    def log_ratio_T(self) -> Tensor:
        """[T] logprobs - old, clamped at plus or minus 20 nats."""
        return log_ratio(self.logprobs_T, self.old_logprobs_T, self.mask_T)[0]

    @property
    def ratio_T(self) -> Tensor:
        """[T] probability ratio; 1 off the mask."""
        return self.log_ratio_T.exp()

    def sequence_mean(self, x_T: Tensor) -> Tensor:
        """Return [T] mean of `x_T` over the masked tokens of each sequence, at all of its positions."""
        return sequence_mean(x_T, self.mask_T, self.cu_seqlens)


@dataclass
class Objective(Settings, ABC):
    """Base class of policy objectives."""

    reads: ClassVar[frozenset[str]] = frozenset()
    """Keys of the batch that the objective reads from `tokens.data`; the dataflow must provide them."""
    has_kl: ClassVar[bool] = False
    """Whether a token has a gradient even if its advantage is 0. See `PolicyInterface.adds_to_objective`."""

    @abstractmethod
    def loss(self, tokens: PolicyTokens) -> Tensor | PolicyLoss:
        """Return the loss of every token, to be minimized.

        Called for several micro-batches at a time in threads, so it writes no shared state.

        Returns:
            [T], differentiable in `tokens.logprobs_T`; or a `PolicyLoss`, which also says where a clip is active.
        """

    def prepare(self, minibatch: SequenceSample, reduce: Reduce) -> SequenceSample:
        """Add keys with statistics of the whole mini-batch, before it is cut into micro-batches.

        Args:
            minibatch: all sequences of this rank's part of an optimizer step.
            reduce: sum over ranks.
        """
        return minibatch

    def control(self) -> ProximalKLControl | None:
        """Return a new controller of the coefficient that `tokens.kl_coef` contains; None: there is none.

        The actor adapts the coefficient after each rollout batch, and saves it in checkpoints.
        """
        return None

    def needs(self) -> dict[str, str]:
        """Return keys that must be in the batch, with the setting that asks for each."""
        return dict.fromkeys(self.reads, f"objective={type(self).__name__}")

    def stats(self, loss: PolicyLoss, tokens: PolicyTokens) -> Stats:
        """Return additional metrics, besides those of every objective; `loss` is weighted by the correction."""
        return {}

    def describe(self) -> str:
        """Return the objective for the launch table."""
        settings = ", ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self))
        return f"{type(self).__name__}" + (f" ({settings})" if settings else "")

    def _range(self, of: str, low: float | None, high: float, *, center: float = 1.0) -> str:
        start = {0.0: "-inf", 1.0: "0"}[center] if low is None else f"{center - low:g}"
        return f"{type(self).__name__.lower()}, {of} in [{start}, {center + high:g}]"


@dataclass
class _Clipped(Objective):
    """Base class of clipped objectives."""

    @override
    def stats(self, loss: PolicyLoss, tokens: PolicyTokens) -> Stats:
        return {"dual_clip_fraction": masked_mean(loss.dual_clipped_T, tokens.mask_T)} if self._dual is not None else {}

    @property
    @abstractmethod
    def _dual(self) -> float | None: ...


_DualClip = Annotated[float, Range(gt=1)] | None


@dataclass
class Clip(_Clipped):
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO, arXiv:1707.06347); high above low: DAPO (arXiv:2503.14476)."""

    low: Fraction = 0.2
    """The ratio is clipped below at 1 - low."""
    high: NonNegative = 0.2
    """The ratio is clipped above at 1 + high."""
    dual: _DualClip = None
    """Upper bound on the ratio for negative advantages, above 1 (dual clip, arXiv:1912.09729); null: off."""

    @override
    def loss(self, tokens: PolicyTokens) -> PolicyLoss:
        return policy_loss(*_basic(tokens), clip_low=self.low, clip_high=self.high, dual_clip=self.dual)

    @override
    def describe(self) -> str:
        return self._range("ratio", self.low, self.high) + _dual_text(self.dual)

    @property
    def _dual(self) -> float | None:
        return self.dual


def gspo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    *,
    low: float,
    high: float,
    dual: float | None,
) -> PolicyLoss:
    """Compute max(-A s, -A clip(s, 1 - low, 1 + high)) with s = exp(mean of l over the sequence) (GSPO).

    Source: arXiv:2507.18071, eq. 5 and 7. The gradient flows through s, so every token of a sequence receives the
    same fraction of it. To get the paper's loss, aggregate by `seq_mean_token_mean`, which verl enforces. In verl and
    SkyRL, each token's log-prob carries the gradient of s (the paper's GSPO-token). The result is the same if A is
    constant in a sequence.
    """
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    mean_T = sequence_mean(log_ratio_T, mask_T, cu_seqlens)
    # With an old log-prob of 0, the mean log-ratio is the ratio that the clip sees.
    clip = policy_loss(
        mean_T, torch.zeros_like(mean_T), advantages_T, mask_T, clip_low=low, clip_high=high, dual_clip=dual
    )
    # Log-ratios were clamped per token, before the mean, which cannot exceed the limit.
    return clip._replace(clamped_T=clamped_T)


@dataclass
class Gspo(_Clipped):
    """The clip on the ratio of a whole sequence, the geometric mean of its tokens' (arXiv:2507.18071).

    Aggregate by `seq_mean_token_mean`. The paper makes 4 optimizer steps per rollout batch.
    """

    low: Fraction = 3e-4
    """The sequence's ratio is clipped below at 1 - low."""
    high: NonNegative = 4e-4
    """The sequence's ratio is clipped above at 1 + high."""
    dual: _DualClip = None
    """Upper bound on the ratio for negative advantages, above 1; null: off."""

    @override
    def loss(self, tokens: PolicyTokens) -> PolicyLoss:
        return gspo_loss(*_basic(tokens), tokens.cu_seqlens, low=self.low, high=self.high, dual=self.dual)

    @override
    def describe(self) -> str:
        return self._range("sequence ratio", self.low, self.high) + _dual_text(self.dual)

    @property
    def _dual(self) -> float | None:
        return self.dual


def cispo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    low: float | None,
    high: float,
) -> PolicyLoss:
    """Compute -sg(clip(r, 1 - low, 1 + high)) A logprobs (CISPO, arXiv:2506.13585, eq. 4 and 5).

    Clipped tokens keep their gradient. The paper uses no lower bound (`low=None`). As in verl and SkyRL, both bounds
    are relative to 1. TRL's `epsilon_high` and Tinker's thresholds are absolute, so a cap of 5 there is `high=4`
    here. `clipped_T` marks tokens whose weight a bound changes.
    """
    _check_range(low, high, lowest=1)
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    ratio_T = log_ratio_T.exp().detach()
    bounded_T = ratio_T.clamp(1 - (1.0 if low is None else low), 1 + high)
    current_T = _current(logprobs_T, old_logprobs_T, log_ratio_T, clamped_T, mask_T)
    loss_T = -_advantages(advantages_T, mask_T) * bounded_T * current_T
    return _loss_without_clip(loss_T, ratio_T, clamped_T)._replace(clipped_T=bounded_T != ratio_T)


@dataclass
class Cispo(Objective):
    """-sg(clip(r, 1 - low, 1 + high)) A logprobs (arXiv:2506.13585): the clip bounds a weight, not the gradient."""

    low: Fraction | None = None
    """The weight is at least 1 - low; null: no lower bound (the paper's)."""
    high: NonNegative = 4.0
    """The weight is at most 1 + high (TRL recommends 5, arXiv:2510.13786)."""

    @override
    def loss(self, tokens: PolicyTokens) -> PolicyLoss:
        return cispo_loss(*_basic(tokens), low=self.low, high=self.high)

    @override
    def describe(self) -> str:
        return self._range("ratio", self.low, self.high)


def sapo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    tau_pos: float,
    tau_neg: float,
) -> PolicyLoss:
    """Compute -A (4 / tau) sigmoid(tau (r - 1)), with tau = tau_pos where A > 0, else tau_neg (SAPO).

    Source: arXiv:2511.20347, eq. 5 and 6. A smooth gate replaces the clip. Its gradient at r = 1 equals that of
    -A logprobs. With a larger tau, the gradient decays faster away from r = 1. verl, TRL, AReaL and Trinity implement
    the same loss. The paper averages over each sequence, then over sequences.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"tau_pos and tau_neg must be positive, found {tau_pos} and {tau_neg}")
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    advantages_T, ratio_T = _advantages(advantages_T, mask_T), log_ratio_T.exp()
    tau_T = torch.full_like(ratio_T, tau_neg).masked_fill(advantages_T > 0, tau_pos)
    loss_T = -advantages_T * torch.sigmoid(tau_T * (ratio_T - 1)) * (4 / tau_T)
    return _loss_without_clip(loss_T, ratio_T, clamped_T)


@dataclass
class Sapo(Objective):
    """-A (4 / tau) sigmoid(tau (r - 1)) (arXiv:2511.20347): a smooth gate instead of the clip."""

    tau_pos: Positive = 1.0
    """tau where the advantage is positive."""
    tau_neg: Positive = 1.05
    """tau where the advantage is negative or 0."""

    @override
    def loss(self, tokens: PolicyTokens) -> PolicyLoss:
        return sapo_loss(*_basic(tokens), tau_pos=self.tau_pos, tau_neg=self.tau_neg)

    @override
    def describe(self) -> str:
        return f"sapo, temperatures {self.tau_pos:g} and {self.tau_neg:g}"


def gmpo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    *,
    low: float | None,
    high: float,
) -> PolicyLoss:
    """Compute -A exp(mean of k over the sequence), k = min(l, high) where A > 0, max(l, -low) where A < 0 (GMPO).

    Source: arXiv:2507.20673. The loss uses the geometric mean of token ratios that are clipped individually. As in
    verl and TRL, the bounds apply to log-ratios: the paper's (exp(-0.4), exp(0.4)) is 0.4 and 0.4. `low=None` sets no
    lower bound. A clipped token is included in the mean and has no gradient. To get the paper's loss, aggregate by
    `seq_mean_token_mean`.
    """
    _check_range(low, high, lowest=math.inf)
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    advantages_T, lowest = _advantages(advantages_T, mask_T), -math.inf if low is None else -low
    clipped_T = ((advantages_T > 0) & (log_ratio_T > high)) | ((advantages_T < 0) & (log_ratio_T < lowest))
    held_T = torch.where(clipped_T, log_ratio_T.clamp(lowest, high), log_ratio_T)
    loss_T = -advantages_T * sequence_mean(held_T, mask_T, cu_seqlens).exp()
    return _loss_without_clip(loss_T, log_ratio_T.exp(), clamped_T)._replace(clipped_T=clipped_T.detach())


@dataclass
class Gmpo(Objective):
    """-A times the geometric mean of a sequence's ratios, each clipped first (arXiv:2507.20673).

    Aggregate by `seq_mean_token_mean`.
    """

    low: NonNegative | None = 0.4
    """Log-ratios are clipped below at -low; null: no lower bound."""
    high: NonNegative = 0.4
    """Log-ratios are clipped above at high."""

    @override
    def loss(self, tokens: PolicyTokens) -> PolicyLoss:
        return gmpo_loss(*_basic(tokens), tokens.cu_seqlens, low=self.low, high=self.high)

    @override
    def describe(self) -> str:
        return self._range("log-ratio", self.low, self.high, center=0.0)


def proximal_kl_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor, *, beta: float
) -> PolicyLoss:
    """Compute -(r A - beta k) with k = r - 1 - l: PPO with a KL penalty to the old policy instead of the clip.

    Source: arXiv:1707.06347, eq. 8. k is the k3 estimate of KL(old || current) from the sampled token. The paper sums
    over all actions. For tokens of the old policy, the expected value and gradient of k are those of the sum.
    """
    if not beta >= 0:
        raise ValueError(f"beta must be at least 0, found {beta}")
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    ratio_T, kl_T = log_ratio_T.exp(), torch.expm1(log_ratio_T) - log_ratio_T
    return _loss_without_clip(beta * kl_T - _advantages(advantages_T, mask_T) * ratio_T, ratio_T, clamped_T)


@dataclass
class ThresholdKLController:
    """A coefficient that doubles or halves when the KL leaves a range around its target (PPO, arXiv:1707.06347, 4)."""

    init: float
    """Initial coefficient, per nat."""
    target: float
    """Target KL in nats (0.003 to 0.03 in the source)."""
    tolerance: float = 1.5
    """Factor by which the KL may be above or below the target without a change (1.5 in the source)."""
    bound: float = 2.0**20
    """Factor by which the coefficient stays within its initial value. The source has no bound."""
    value: float = field(init=False)
    """The current coefficient."""

    def __post_init__(self) -> None:
        for name in ("init", "target"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, found {getattr(self, name)}")
        self.value = self.init

    def update(self, kl: float) -> None:
        """Double the coefficient if `kl` is above the range, and halve it if `kl` is below.

        Args:
            kl: KL after the update, in nats.

        Raises:
            ValueError: `kl` is not finite.
        """
        if not math.isfinite(kl):
            raise ValueError(f"kl must be finite, found {kl}")
        if kl > self.target * self.tolerance:
            self.value = min(self.value * 2, self.init * self.bound)
        elif kl < self.target / self.tolerance:
            self.value = max(self.value / 2, self.init / self.bound)

    def state_dict(self) -> dict[str, float]:
        """Return the current coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a saved coefficient; the state of a constant coefficient leaves the initial one."""
        self.value = float(state.get("value", self.init))


class ProximalKLControl:
    """The coefficient of a KL penalty to the old policy, adapted after the optimizer steps of a rollout batch."""

    def __init__(self, beta: float, target: float) -> None:
        self.controller = ThresholdKLController(beta, target)

    @property
    def coef(self) -> float:
        """The current coefficient."""
        return self.controller.value

    def update(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec, temperature: float) -> Stats:
        """Adapt the coefficient to the KL of the updated policy, which one forward pass over the batch measures.

        Args:
            model: the policy after the optimizer steps.
            data: the rollout batch of this rank.
            mb_spec: micro-batches of the forward pass.
            temperature: temperature of the policy.

        Returns:
            Metrics: the KL, and the coefficient before it changes.

        Raises:
            RunError: the KL is not finite.
        """
        mask_T, old_T = data["loss_mask"], old_logprobs(data)
        new_T = score_logprobs(model, data, mb_spec, temperature)["logprobs"]
        # The old policy sampled the tokens, so it comes first: KL(old || new).
        kl_mean = masked_mean(kl_estimate(old_T, new_T, mask_T, KLEstimator.k3), mask_T)
        stats: Stats = {"proximal_kl": kl_mean, "proximal_kl_coef": Max(torch.tensor(self.coef))}
        self._adapt(kl_mean, model)
        return stats

    def _adapt(self, kl_mean: Mean, model: Model) -> None:
        total, weight = model.engine.reduce(torch.stack([kl_mean.total.double(), kl_mean.weight.double()])).tolist()
        if not weight:
            return
        if not math.isfinite(kl := total / weight):
            raise RunError(
                f"The KL to the policy before the update is {kl} per token, so the coefficient cannot follow "
                "objective.target. Lower the learning rate, or set objective.target=null"
            )
        self.controller.update(kl)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the controller."""
        return dict(self.controller.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.controller.load_state_dict(state)


@dataclass
class ProximalKL(Objective):
    """-(r A - beta KL(old, current)): a KL penalty instead of the clip (PPO, arXiv:1707.06347, section 4).

    The KL is estimated from the sampled tokens by k3.
    """

    has_kl: ClassVar[bool] = True
    beta: NonNegative = 1.0
    """Coefficient of the KL, in advantage per nat; the initial value if `target` is set."""
    target: Positive | None = None
    """Target KL in nats per token (the paper: 0.003 to 0.03), measured after the optimizer steps of a rollout batch:
    above 1.5 times the target beta doubles, below the target divided by 1.5 it halves; null: beta is constant."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is not None and self.beta == 0:
            raise SettingsError("beta=0: target multiplies beta, which would stay 0. Set beta above 0")

    @override
    def loss(self, tokens: PolicyTokens) -> PolicyLoss:
        return proximal_kl_loss(*_basic(tokens), beta=self.beta if tokens.kl_coef is None else tokens.kl_coef)

    @override
    def control(self) -> ProximalKLControl | None:
        return None if self.target is None else ProximalKLControl(self.beta, self.target)

    @override
    def describe(self) -> str:
        adapted = "" if self.target is None else f" at first, adapted to {self.target:g} nats per token"
        return f"ratio without clip, KL to the old policy, coefficient {self.beta:g}{adapted}"


class BinaryDivergence(StrEnum):
    """Divergence of two distributions over "the sampled token" and "any other token"."""

    tv = "tv"
    """Total variation: the difference of the token's probabilities."""
    kl = "kl"
    """KL(old || current), in nats."""


def dppo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    low: float,
    high: float,
    divergence: BinaryDivergence,
) -> PolicyLoss:
    """Compute -r A, and 0 where the update leads away from the old policy and the divergence is beyond its bound.

    Source: arXiv:2602.04879, eq. 11 to 14. The token has probability p under the current policy, q under the old one.
    It has no loss if A > 0, p > q and D > high, or if A < 0, p < q and D > low. D is |p - q| (tv), or
    q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (kl).

    SkyRL has the same loss, prime-rl the same mask, and verl the same gradient with a loss of -r A logprobs, whose
    ratio it bounds (`clip_ratio_c`). Eq. 15 and 16, over the k most likely tokens of the sampler, are not available:
    they need k log-probs per token, and section G.2 finds no benefit.
    """
    _check_range(low, high, lowest=math.inf)
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    advantages_T, ratio_T = _advantages(advantages_T, mask_T), log_ratio_T.exp()
    old_T = torch.where(mask_T, at_least_fp32(old_logprobs_T.detach()), 0)
    p_T, q_T = torch.where(mask_T, at_least_fp32(logprobs_T.detach()), 0).exp(), old_T.exp()
    divergence_T = (p_T - q_T).abs()
    if divergence is BinaryDivergence.kl:
        # 1 - q and 1 - p round to 0 for a token that is nearly certain.
        tiny = torch.finfo(q_T.dtype).tiny
        rest_T = (1 - q_T) * ((1 - q_T).clamp(min=tiny) / (1 - p_T).clamp(min=tiny)).log()
        divergence_T = rest_T - q_T * log_ratio_T.detach()
    away_T = ((advantages_T > 0) & (p_T > q_T) & (divergence_T > high)) | (
        (advantages_T < 0) & (p_T < q_T) & (divergence_T > low)
    )
    loss_T = torch.where(away_T, 0, -advantages_T * ratio_T)
    return _loss_without_clip(loss_T, ratio_T, clamped_T)._replace(clipped_T=away_T)


@dataclass
class Dppo(Objective):
    """-r A without the tokens whose probability has left a trust region (arXiv:2602.04879), instead of the clip.

    A ratio says little about how far a policy moved: doubling 1e-6 changes nothing, and 0.9 can't double. The paper
    measures from the policy that sampled, so leave `recompute` off.
    """

    low: NonNegative = 0.15
    """Largest divergence of a token with a negative advantage (the paper: 0.15 for tv, 0.05 for kl)."""
    high: NonNegative = 0.15
    """Largest divergence of a token with a positive advantage."""
    divergence: BinaryDivergence = BinaryDivergence.tv
    """How to measure the divergence of a token: tv or kl."""

    @override
    def loss(self, tokens: PolicyTokens) -> PolicyLoss:
        return dppo_loss(*_basic(tokens), low=self.low, high=self.high, divergence=self.divergence)

    @override
    def describe(self) -> str:
        return f"dppo, {self.divergence.value} of a token at most {self.low:g} down and {self.high:g} up"


def reinforce_loss(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> PolicyLoss:
    """Compute -A logprobs, the policy gradient without a ratio (REINFORCE; GPG, arXiv:2504.02546).

    With A = 1 for the kept responses, this is RAFT. RAFT++ (arXiv:2504.11343) uses the clipped objective. The loss
    assumes that the current policy sampled the tokens: use one optimizer step per rollout, or an importance
    correction.
    """
    log_ratio_T, clamped_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    loss_T = -_advantages(advantages_T, mask_T) * _current(logprobs_T, old_logprobs_T, log_ratio_T, clamped_T, mask_T)
    return _loss_without_clip(loss_T, log_ratio_T.exp(), clamped_T)


@dataclass
class Reinforce(Objective):
    """-A logprobs: the policy gradient itself; right for one optimizer step per rollout batch, or with a correction."""

    @override
    def loss(self, tokens: PolicyTokens) -> PolicyLoss:
        return reinforce_loss(*_basic(tokens))

    @override
    def describe(self) -> str:
        return "reinforce, no ratio"


def policy_loss_of(objective: Objective, tokens: PolicyTokens, weight_T: Tensor | None = None) -> PolicyLoss:
    """Return the loss of an objective of either return type, as a `PolicyLoss` for the metrics.

    Args:
        objective: the objective.
        tokens: tokens of the micro-batch.
        weight_T: [T] factor of the loss of each token, without gradient, from a correction.

    Raises:
        ValueError: the objective returned another shape than [T].
    """
    policy = objective.loss(tokens)
    if not isinstance(policy, PolicyLoss):
        log_ratio_T, clamped_T = log_ratio(tokens.logprobs_T, tokens.old_logprobs_T, tokens.mask_T)
        never_T = torch.zeros_like(tokens.mask_T)
        policy = PolicyLoss(policy, log_ratio_T.exp().detach(), never_T, never_T, clamped_T)
    if policy.loss_T.shape != tokens.mask_T.shape:
        raise ValueError(
            f"{type(objective).__qualname__}.loss returned shape {list(policy.loss_T.shape)}. It must return one loss "
            f"per token, shape {list(tokens.mask_T.shape)}"
        )
    weighted_T = policy.loss_T if weight_T is None else policy.loss_T * torch.where(tokens.mask_T, weight_T, 0)
    return policy._replace(loss_T=torch.where(tokens.mask_T, weighted_T, 0))


def policy_stats(policy: PolicyLoss, tokens: PolicyTokens, entropy_T: Tensor) -> Stats:
    """Return metrics that every objective has; `entropy_T` [T] in nats."""
    mask_T, logprobs_T, old_T = tokens.mask_T, tokens.logprobs_T.detach(), tokens.old_logprobs_T
    return {
        "policy_loss": masked_mean(policy.loss_T, mask_T),
        "clip_fraction": masked_mean(policy.clipped_T, mask_T),
        "ratio_mean": masked_mean(policy.ratio_T, mask_T),
        "ratio_var": masked_variance(policy.ratio_T, mask_T),
        "ratio_max": masked_max(policy.ratio_T, mask_T),
        "ratio_min": Min(-masked_max(-policy.ratio_T, mask_T).value),
        "ratio_clamped_fraction": masked_mean(policy.clamped_T, mask_T),
        "logprob_diff_mean": masked_mean(logprobs_T - old_T, mask_T),
        "logprob_diff_var": masked_variance(logprobs_T - old_T, mask_T),
        "logprob_diff_min": Min(-masked_max(old_T - logprobs_T, mask_T).value),
        "logprob_diff_max": masked_max((logprobs_T - old_T).abs(), mask_T),
        # KL(old || current): the old policy sampled the tokens.
        "approx_kl": masked_mean(kl_estimate(old_T, logprobs_T, mask_T, KLEstimator.k3), mask_T),
        "entropy": masked_mean(entropy_T, mask_T),
    }


POLICY_PANELS = (
    Panel("entropy (nats per token)", {"entropy": "training batch"}),
    Panel(
        "KL (nats)",
        {
            "ref_kl_per_sequence": "to reference, per sequence",
            "teacher_kl": "to teacher, per token",
            "approx_kl": "to old policy, per token",
        },
    ),
    Panel("clip fraction", {"clip_fraction": "policy ratio"}),
)
"""Charts of the metrics of a policy."""


def _basic(tokens: PolicyTokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tokens.logprobs_T, tokens.old_logprobs_T, tokens.advantages_T, tokens.mask_T


def _dual_text(dual: float | None) -> str:
    return "" if dual is None else f", dual clip {dual:g}"


def sequence_mean(x_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Average over the tokens in the mask of each sequence, and broadcast to its tokens: [T].

    Values outside the mask are ignored.
    """
    check_shapes(mask_T, x_T=x_T)
    count_S = segment_sum(mask_T, cu_seqlens).clamp(min=1)
    return broadcast_to_tokens(segment_sum(torch.where(mask_T, x_T, 0), cu_seqlens) / count_S, cu_seqlens)


def _advantages(advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    check_shapes(mask_T, advantages_T=advantages_T)
    return torch.where(mask_T, at_least_fp32(advantages_T.detach()), 0)


def _current(
    logprobs_T: Tensor, old_logprobs_T: Tensor, log_ratio_T: Tensor, clamped_T: Tensor, mask_T: Tensor
) -> Tensor:
    """Return [T] log-probs of the policy, `LOG_RATIO_LIMIT` from the old ones and without gradient where clamped."""
    nearest_T = at_least_fp32(old_logprobs_T.detach()) + log_ratio_T.detach()
    return torch.where(mask_T, torch.where(clamped_T, nearest_T, at_least_fp32(logprobs_T)), 0)


def _loss_without_clip(loss_T: Tensor, ratio_T: Tensor, clamped_T: Tensor) -> PolicyLoss:
    never_T = torch.zeros_like(clamped_T)
    return PolicyLoss(loss_T, ratio_T.detach(), never_T, never_T, clamped_T)


def _check_range(low: float | None, high: float, *, lowest: float) -> None:
    if not (low is None or 0 <= low <= lowest) or not high >= 0:
        raise ValueError(f"low must be from 0 to {lowest:g} (None: no bound) and high at least 0, found {low}, {high}")
