"""Policy objectives: the loss of one token, from its log-probs and its advantage. One class is one objective.

The formulas are in `realign.functional.objectives`. An objective of your own is a subclass of `Objective` with `loss`:

    class Topr(Objective):
        def loss(self, tokens):
            weight_T = torch.where(tokens.advantages_T > 0, 1.0, tokens.ratio_T.detach().clamp(max=1.0))
            return -weight_T * tokens.advantages_T * tokens.logprobs_T

Everything else of the actor (KL penalty, entropy bonus, correction, early stopping, metrics) applies to it unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from realign.api import Min, Panel, SequenceSample, Stats, masked_max, masked_mean, masked_variance
from realign.errors import SettingsError
from realign.functional import (
    KLEstimator,
    PolicyLoss,
    Reduce,
    cispo_loss,
    gmpo_loss,
    gspo_loss,
    kl_estimate,
    log_ratio,
    policy_loss,
    proximal_kl_loss,
    reinforce_loss,
    sapo_loss,
    sequence_mean,
)
from realign.functional.packed import at_least_fp32
from realign.interfaces.components.proximal_kl import ProximalKLControl
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

        def masked(x_T: Tensor) -> Tensor:
            return torch.where(mask_T, at_least_fp32(x_T), 0)

        old_T, advantages_T = masked(old_logprobs_T.detach()), masked(data["advantages"].detach())
        return cls(masked(logprobs_T), old_T, advantages_T, mask_T, data.cu_seqlens(), data, kl_coef)

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

    def stats(self, loss: PolicyLoss, mask_T: Tensor) -> Stats:
        """Return additional metrics, besides those of every objective."""
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

    def stats(self, loss: PolicyLoss, mask_T: Tensor) -> Stats:
        """See `Objective`."""
        return {"dual_clip_fraction": masked_mean(loss.dual_clipped_T, mask_T)} if self._dual is not None else {}

    @property
    @abstractmethod
    def _dual(self) -> float | None: ...


DualClip = Annotated[float, Range(gt=1)] | None


@dataclass
class Clip(_Clipped):
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO, arXiv:1707.06347); high above low: DAPO (arXiv:2503.14476)."""

    low: Fraction = 0.2
    """The ratio is clipped below at 1 - low."""
    high: NonNegative = 0.2
    """The ratio is clipped above at 1 + high."""
    dual: DualClip = None
    """Upper bound on the ratio for negative advantages, above 1 (dual clip, arXiv:1912.09729); null: off."""

    def loss(self, tokens: PolicyTokens) -> PolicyLoss:
        """See `realign.functional.policy_loss`."""
        return policy_loss(*_basic(tokens), clip_low=self.low, clip_high=self.high, dual_clip=self.dual)

    def describe(self) -> str:
        """See `Objective`."""
        return self._range("ratio", self.low, self.high) + _dual_text(self.dual)

    @property
    def _dual(self) -> float | None:
        return self.dual


@dataclass
class Gspo(_Clipped):
    """The clip on the ratio of a whole sequence, the geometric mean of its tokens' (arXiv:2507.18071).

    Aggregate by `seq_mean_token_mean`. The paper makes 4 optimizer steps per rollout batch.
    """

    low: Fraction = 3e-4
    """The sequence's ratio is clipped below at 1 - low."""
    high: NonNegative = 4e-4
    """The sequence's ratio is clipped above at 1 + high."""
    dual: DualClip = None
    """Upper bound on the ratio for negative advantages, above 1; null: off."""

    def loss(self, tokens: PolicyTokens) -> PolicyLoss:
        """See `realign.functional.gspo_loss`."""
        return gspo_loss(*_basic(tokens), tokens.cu_seqlens, low=self.low, high=self.high, dual=self.dual)

    def describe(self) -> str:
        """See `Objective`."""
        return self._range("sequence ratio", self.low, self.high) + _dual_text(self.dual)

    @property
    def _dual(self) -> float | None:
        return self.dual


@dataclass
class Cispo(Objective):
    """-sg(clip(r, 1 - low, 1 + high)) A logprobs (arXiv:2506.13585): the clip bounds a weight, not the gradient."""

    low: Fraction | None = None
    """The weight is at least 1 - low; null: no lower bound (the paper's)."""
    high: NonNegative = 4.0
    """The weight is at most 1 + high (TRL recommends 5, arXiv:2510.13786)."""

    def loss(self, tokens: PolicyTokens) -> PolicyLoss:
        """See `realign.functional.cispo_loss`."""
        return cispo_loss(*_basic(tokens), low=self.low, high=self.high)

    def describe(self) -> str:
        """See `Objective`."""
        return self._range("ratio", self.low, self.high)


@dataclass
class Sapo(Objective):
    """-A (4 / tau) sigmoid(tau (r - 1)) (arXiv:2511.20347): a smooth gate instead of the clip."""

    tau_pos: Positive = 1.0
    """tau where the advantage is positive."""
    tau_neg: Positive = 1.05
    """tau where the advantage is negative or 0."""

    def loss(self, tokens: PolicyTokens) -> PolicyLoss:
        """See `realign.functional.sapo_loss`."""
        return sapo_loss(*_basic(tokens), tau_pos=self.tau_pos, tau_neg=self.tau_neg)

    def describe(self) -> str:
        """See `Objective`."""
        return f"sapo, temperatures {self.tau_pos:g} and {self.tau_neg:g}"


@dataclass
class Gmpo(Objective):
    """-A times the geometric mean of a sequence's ratios, each clipped first (arXiv:2507.20673).

    Aggregate by `seq_mean_token_mean`.
    """

    low: NonNegative | None = 0.4
    """Log-ratios are clipped below at -low; null: no lower bound."""
    high: NonNegative = 0.4
    """Log-ratios are clipped above at high."""

    def loss(self, tokens: PolicyTokens) -> PolicyLoss:
        """See `realign.functional.gmpo_loss`."""
        return gmpo_loss(*_basic(tokens), tokens.cu_seqlens, low=self.low, high=self.high)

    def describe(self) -> str:
        """See `Objective`."""
        return self._range("log-ratio", self.low, self.high, center=0.0)


@dataclass
class ProximalKL(Objective):
    """-(r A - beta KL(old, current)): a KL penalty instead of the clip (PPO, arXiv:1707.06347, section 4).

    The KL is estimated from the sampled tokens by k3.
    """

    beta: NonNegative = 1.0
    """Coefficient of the KL, in advantage per nat; the initial value if `target` is set."""
    target: Positive | None = None
    """Target KL in nats per token (the paper: 0.003 to 0.03), measured after the optimizer steps of a rollout batch:
    above 1.5 times the target beta doubles, below the target divided by 1.5 it halves; null: beta is constant."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is not None and self.beta == 0:
            raise SettingsError("beta=0: target multiplies beta, which would stay 0. Set beta above 0")

    def loss(self, tokens: PolicyTokens) -> PolicyLoss:
        """See `realign.functional.proximal_kl_loss`."""
        return proximal_kl_loss(*_basic(tokens), beta=self.beta if tokens.kl_coef is None else tokens.kl_coef)

    def control(self) -> ProximalKLControl | None:
        """See `Objective`."""
        return None if self.target is None else ProximalKLControl(self.beta, self.target)

    def describe(self) -> str:
        """See `Objective`."""
        adapted = "" if self.target is None else f" at first, adapted to {self.target:g} nats per token"
        return f"ratio without clip, KL to the old policy, coefficient {self.beta:g}{adapted}"


@dataclass
class Reinforce(Objective):
    """-A logprobs: the policy gradient itself; right for one optimizer step per rollout batch, or with a correction."""

    def loss(self, tokens: PolicyTokens) -> PolicyLoss:
        """See `realign.functional.reinforce_loss`."""
        return reinforce_loss(*_basic(tokens))

    def describe(self) -> str:
        """See `Objective`."""
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
    found = objective.loss(tokens)
    if not isinstance(found, PolicyLoss):
        log_ratio_T, clamped_T = log_ratio(tokens.logprobs_T, tokens.old_logprobs_T, tokens.mask_T)
        never_T = torch.zeros_like(tokens.mask_T)
        found = PolicyLoss(found, log_ratio_T.exp().detach(), never_T, never_T, clamped_T)
    if found.loss_T.shape != tokens.mask_T.shape:
        raise ValueError(
            f"{type(objective).__qualname__}.loss returned shape {list(found.loss_T.shape)}. It must return one loss "
            f"per token, shape {list(tokens.mask_T.shape)}"
        )
    weighted_T = found.loss_T if weight_T is None else found.loss_T * torch.where(tokens.mask_T, weight_T, 0)
    return found._replace(loss_T=torch.where(tokens.mask_T, weighted_T, 0))


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


__all__ = [
    "POLICY_PANELS",
    "Cispo",
    "Clip",
    "Gmpo",
    "Gspo",
    "Objective",
    "PolicyTokens",
    "ProximalKL",
    "Reinforce",
    "Sapo",
    "policy_loss_of",
    "policy_stats",
]
