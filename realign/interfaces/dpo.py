"""DPO and its variants: learning from preference pairs without a reward model.

Direct preference optimization (arXiv:2305.18290) is the default. Settings turn it into a variant:

- with a reference: IPO (arXiv:2310.12036), conservative and robust DPO (arXiv:2403.00409), and length-normalized DPO
  (arXiv:2411.15124);
- without a reference: SimPO (arXiv:2405.14734), CPO (arXiv:2401.08417) and ORPO (arXiv:2403.07691).

Reads `input_ids`, `loss_mask` (the responses), `labels`, and `ref_logprobs` unless `reference_free`. Writes nothing.
Consecutive responses are pairs; the response with the larger label is preferred. The loss is the mean over the pairs
of the whole batch. Pairs with an empty response or equal labels are excluded. A prompt may have several pairs, and all
pairs have the same weight. The log-probs of a response are summed, or averaged with `length_normalized`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from realign.api import (
    RPC,
    DataflowGraph,
    Keys,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Panel,
    Plan,
    Role,
    SequenceSample,
    Stats,
    masked_mean,
)
from realign.errors import SettingsError
from realign.functional import nll_loss, segment_sum
from realign.functional.packed import at_least_fp32, check_shapes
from realign.interfaces.components.pairs import check_pairs, pairs_of, train_on_groups
from realign.interfaces.reference import ReferenceInterface
from realign.settings import Count, NonNegative, Positive, Range

_LARGEST_LOGPROB = -1e-6
"""Bound on log-probs in odds p / (1 - p), which are infinite at p = 1."""


class DPOLoss(StrEnum):
    """The function that `dpo_loss` applies to the difference h of the two log-ratios."""

    sigmoid = "sigmoid"
    """-log sigmoid(beta h): the Bradley-Terry likelihood of the preference (arXiv:2305.18290)."""
    ipo = "ipo"
    """(h - 1 / (2 beta))^2: has a finite optimum even for deterministic preferences (arXiv:2310.12036)."""
    robust = "robust"
    """The sigmoid loss, corrected so that its mean over randomly flipped labels is the loss without flips
    (arXiv:2403.00409)."""
    odds_ratio = "odds_ratio"
    """-beta log sigmoid of the log-odds ratio of two log-probs (ORPO, arXiv:2403.07691)."""


def dpo_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    *,
    beta: float,
    kind: DPOLoss,
    label_smoothing: float,
    target_margin: float,
) -> Tensor:
    """Compute the loss of direct preference optimization from log-ratios of the policy to the reference.

    The log-ratios may be log-probs of the policy, as in SimPO, CPO and ORPO, and averages over tokens.

    Source: arXiv:2305.18290 (eq. 7); IPO: arXiv:2310.12036 (eq. 17); label smoothing: the conservative DPO of
    https://ericmitchell.ai/cdpo.pdf; robust DPO: arXiv:2403.00409 (eq. 12); target margin: SimPO, arXiv:2405.14734
    (eq. 6); odds ratio: ORPO, arXiv:2403.07691 (eq. 7).

    Args:
        chosen_P: [P] log policy(y) - log reference(y) of the chosen response (nats), differentiable. With
            kind=odds_ratio: the log-prob, at most 0.
        rejected_P: [P] the same of the rejected response.
        beta: coefficient of the implicit KL penalty towards the reference, > 0; weight of the odds-ratio loss.
        kind: the loss function.
        label_smoothing: probability that a preference label is flipped, in [0, 0.5); sigmoid and robust only.
        target_margin: margin of the rewards (beta times the log-ratio) at which the sigmoid is 1/2; sigmoid and robust
            only.

    Raises:
        ValueError: an argument is out of range, or has no effect on this kind of loss.
    """
    check_shapes(chosen_P, rejected_P=rejected_P)
    if not beta > 0 or not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"beta must be positive and label_smoothing in [0, 0.5), found {beta:g} and {label_smoothing:g}"
        )
    kind, chosen_P, rejected_P = DPOLoss(kind), at_least_fp32(chosen_P), at_least_fp32(rejected_P)
    if kind in (DPOLoss.ipo, DPOLoss.odds_ratio):
        for name, value in (("label_smoothing", label_smoothing), ("target_margin", target_margin)):
            if value:
                raise ValueError(f"{name}={value:g} has no effect on the {kind.value} loss. Use 0")
    if kind is DPOLoss.ipo:
        return (chosen_P - rejected_P - 1 / (2 * beta)).square()
    if kind is DPOLoss.odds_ratio:
        return -beta * F.logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))
    logits_P = beta * (chosen_P - rejected_P) - target_margin
    right_P, wrong_P = -F.logsigmoid(logits_P), -F.logsigmoid(-logits_P)
    if kind is DPOLoss.robust:
        return ((1 - label_smoothing) * right_P - label_smoothing * wrong_P) / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * right_P + label_smoothing * wrong_P


def _log_odds(logprobs_P: Tensor) -> Tensor:
    """Compute log(p / (1 - p)) from log p; p is bounded below 1."""
    bounded_P = logprobs_P.clamp(max=_LARGEST_LOGPROB)
    # 1 - p as -expm1(log p), which keeps its digits where p is near 1.
    return bounded_P - torch.log(-torch.expm1(bounded_P))


@dataclass
class DPOInterface(ModelInterface):
    """The policy of DPO and its variants, trained on pairs of responses."""

    OUTPUTS = frozenset({"logprobs"})
    HEADLINE: ClassVar[tuple[str, ...]] = ("loss", "rewards/accuracy", "rewards/margin")
    PANELS: ClassVar[tuple[Panel, ...]] = (
        Panel("accuracy on preferences", {"rewards/accuracy": "training batch"}),
        Panel("margin of implicit rewards", {"rewards/margin": "training batch"}),
    )
    ALGORITHM_SETTINGS: ClassVar[tuple[str, ...]] = (
        "kind",
        "beta",
        "reference_free",
        "length_normalized",
        "target_margin",
        "label_smoothing",
        "sft_coef",
    )

    n_minibatches: Count = 1
    """Optimizer steps per batch of prompts."""
    kind: DPOLoss = DPOLoss.sigmoid
    """Which loss: sigmoid (DPO), ipo, robust (DPO that expects some wrong labels) or odds_ratio (ORPO)."""
    beta: Positive = 0.1
    """How strongly the policy is held to the reference: smaller lets it move farther. With kind=odds_ratio: the weight
    of the loss (ORPO's lambda)."""
    reference_free: bool = False
    """Train without a reference model, on the policy's own log-probs (SimPO, CPO, ORPO)."""
    length_normalized: bool = False
    """Divide the log-ratio of each response by its length in tokens, so that long responses don't count more."""
    target_margin: NonNegative = 0.0
    """By how much the chosen response's reward should exceed the rejected one's (SimPO's gamma; kind=sigmoid or
    robust)."""
    label_smoothing: Annotated[float, Range(ge=0, lt=0.5)] = 0.0
    """Probability that a pair is labeled the wrong way round, below 0.5 (conservative DPO with kind=sigmoid, or
    kind=robust)."""
    temperature: Annotated[float, Range(ge=0.01, lt=math.inf)] = 1.0
    """Divide all logits by this temperature. Must equal the reference's, which the launch checks."""
    sft_coef: NonNegative = 0.0
    """Also maximize the likelihood of the chosen response, with this weight on its mean negative log-likelihood per
    token (arXiv:2404.19733, CPO, ORPO)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind is DPOLoss.robust and not self.label_smoothing:
            raise SettingsError(
                "label_smoothing=0: kind=robust corrects for wrong labels. Set label_smoothing to their fraction"
            )
        if self.kind is DPOLoss.odds_ratio and not self.reference_free:
            raise SettingsError(
                "reference_free=false: the odds of kind=odds_ratio are those of the policy. Set reference_free=true"
            )

    @override
    def ineffective(self) -> dict[str, str]:
        unused = f"with kind={self.kind.value}. Set kind=sigmoid"
        without = self.kind in (DPOLoss.ipo, DPOLoss.odds_ratio)
        return dict.fromkeys(("label_smoothing", "target_margin"), unused) if without else {}

    @override
    def keys(self, method: str) -> Keys:
        if method != "train_step":
            return Keys()
        return Keys(needs=dict.fromkeys(("input_ids", "loss_mask", "labels"), "") | self.reference_keys())

    def reference_keys(self) -> dict[str, str]:
        """Return the keys that the loss reads from the reference, with the setting that requires them."""
        return {} if self.reference_free else {"ref_logprobs": "reference_free=false"}

    @override
    def roles(self) -> Mapping[str, Role]:
        """Return the reference policy, unless `reference_free`."""
        return {} if self.reference_free else {"ref": Role(ReferenceInterface(temperature=self.temperature))}

    @override
    def plan(self) -> Plan:
        return Plan(n_minibatches=self.n_minibatches, temperature=self.temperature, temperature_setting="temperature")

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Take `n_minibatches` optimizer steps over the batch, in a new random order; pairs stay together.

        Raises:
            ValueError: a prompt has an odd number of responses.
        """
        check_pairs(data)
        return train_on_groups(model, data, mb_spec, self.n_minibatches, self.loss, self.loss_weight)

    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """Sum the preference loss over pairs, plus the weighted SFT loss of the chosen responses if `sft_coef` > 0."""
        mask_T, cu_seqlens = minibatch["loss_mask"], minibatch.cu_seqlens()
        pairs = pairs_of(minibatch)
        logprobs_T = output.logprobs(temperature=self.temperature, where_T=mask_T)
        tokens_S = segment_sum(mask_T, cu_seqlens).clamp(min=1)
        policy_S = segment_sum(torch.where(mask_T, logprobs_T, 0), cu_seqlens)
        log_ratio_S = policy_S
        if not self.reference_free:
            log_ratio_S = policy_S - segment_sum(torch.where(mask_T, minibatch["ref_logprobs"], 0), cu_seqlens)
        if self.length_normalized:
            log_ratio_S = log_ratio_S / tokens_S
        chosen_P, rejected_P = log_ratio_S[pairs.chosen_P], log_ratio_S[pairs.rejected_P]
        loss_P = dpo_loss(
            chosen_P,
            rejected_P,
            beta=self.beta,
            kind=self.kind,
            label_smoothing=self.label_smoothing,
            target_margin=self.target_margin,
        )
        counts_P = pairs.counts_P
        stats: Stats = {
            "preference_loss": masked_mean(loss_P, counts_P),
            "rewards/chosen": masked_mean(self.beta * chosen_P, counts_P),
            "rewards/rejected": masked_mean(self.beta * rejected_P, counts_P),
            "rewards/margin": masked_mean(self.beta * (chosen_P - rejected_P), counts_P),
            "rewards/accuracy": masked_mean(chosen_P > rejected_P, counts_P),
            "logprobs/chosen": masked_mean(policy_S[pairs.chosen_P], counts_P),
            "logprobs/rejected": masked_mean(policy_S[pairs.rejected_P], counts_P),
        }
        if self.sft_coef:
            nll_P = (segment_sum(nll_loss(logprobs_T, mask_T), cu_seqlens) / tokens_S)[pairs.chosen_P]
            loss_P = loss_P + self.sft_coef * nll_P
            stats["nll"] = masked_mean(nll_P, counts_P)
        return torch.where(counts_P, loss_P, 0).sum(), stats

    def loss_weight(self, data: SequenceSample) -> Tensor:
        """Return the number of pairs in the loss."""
        return pairs_of(data).counts_P.sum()

    @override
    def describe(self, batch_prompts: int) -> dict[str, str]:
        compared = "log-prob without reference" if self.reference_free else "log-ratio"
        over = "mean over tokens" if self.length_normalized else "sum over tokens"
        parts = [f"{self.kind.value}, beta {self.beta:g}"]
        parts += [f"target margin {self.target_margin:g}"] if self.target_margin else []
        parts += [f"labels smoothed by {self.label_smoothing:g}"] if self.label_smoothing else []
        sft = f" + {self.sft_coef:g} x likelihood of the chosen" if self.sft_coef else ""
        return {"loss": f"{', '.join(parts)}, {compared}: {over}{sft}; mean over pairs"}


def dataflow(interfaces: Mapping[str, ModelInterface] | None = None) -> DataflowGraph:
    """Build the graph: the frozen reference scores the responses, unless it is unused; the actor trains on pairs."""
    scored = ("input_ids", "loss_mask")
    actor = (interfaces or {}).get("actor")
    calls, keys = list[RPC](), [*scored, "labels"]
    if actor is None or "ref_logprobs" in actor.keys("train_step").needs:
        rename = {"logprobs": "ref_logprobs"}
        calls.append(RPC("ref_inf", "ref", "inference", scored, outputs=("ref_logprobs",), rename=rename))
        keys.append("ref_logprobs")
    calls.append(RPC("actor_train", "actor", "train_step", inputs=tuple(keys)))
    return DataflowGraph(tuple(calls), dataset_keys=("input_ids", "prompt_mask", "loss_mask", "labels", "margins"))
