"""Losses that compare responses to one prompt, for reward models and direct preference optimization.

P pairs, S sequences, G groups (the responses to one prompt). A loss has one value per pair, group or sequence. The
caller masks invalid ones, sums, and divides. Only scores and log-ratios of the trained model are differentiable.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .packed import at_least_fp32, check_shapes, sequence_lengths

__all__ = [
    "DPOLoss",
    "Pairs",
    "best_of_n_loss",
    "centering_loss",
    "comparison_loss",
    "divergence_loss",
    "dpo_loss",
    "kto_baseline",
    "kto_loss",
    "pairs_by_label",
    "pairwise_loss",
    "rating_loss",
]


LARGEST_LOGPROB = -1e-6
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


class Pairs(NamedTuple):
    """Indices of the two responses of each pair among S sequences."""

    chosen_P: Tensor
    """int64 index of the response with the larger label."""
    rejected_P: Tensor
    """int64 index of the other response."""
    counts_P: Tensor
    """bool: whether the pair is valid, that is, both responses are present and their labels differ."""


def pairs_by_label(labels_S: Tensor, present_S: Tensor) -> Pairs:
    """Pair sequences 0 and 1, 2 and 3, and so on. The response with the larger label is the chosen one.

    Args:
        labels_S: [S] labels; the sequences of a pair are adjacent.
        present_S: [S] bool, whether the sequence can be compared.

    Raises:
        ValueError: the number of sequences is odd, or the shapes differ.
    """
    check_shapes(labels_S, present_S=present_S)
    if len(labels_S) % 2:
        raise ValueError(f"pairs need an even number of sequences, found {len(labels_S)}")
    first_P = torch.arange(0, len(labels_S), 2, device=labels_S.device)
    swapped_P = labels_S[first_P] < labels_S[first_P + 1]
    differ_P = labels_S[first_P] != labels_S[first_P + 1]
    return Pairs(
        first_P + swapped_P.long(),
        first_P + (~swapped_P).long(),
        present_S[first_P] & present_S[first_P + 1] & differ_P,
    )


def pairwise_loss(chosen_P: Tensor, rejected_P: Tensor, *, margin_P: Tensor | None = None) -> Tensor:
    """Compute the Bradley-Terry loss, -log sigmoid(chosen - rejected - margin).

    Source: arXiv:2203.02155 (eq. 1); margin: arXiv:2307.09288 (eq. 2).

    Args:
        chosen_P: [P] scores, differentiable.
        rejected_P: [P] scores, differentiable.
        margin_P: [P] margin by which the chosen score should be larger; None means 0.

    Returns:
        [P] in nats.
    """
    check_shapes(chosen_P, rejected_P=rejected_P, margin_P=margin_P)
    difference_P = at_least_fp32(chosen_P) - at_least_fp32(rejected_P)
    if margin_P is not None:
        difference_P = difference_P - margin_P.detach()
    return -F.logsigmoid(difference_P)


def divergence_loss(
    after_T: Tensor, ids_T: Tensor, cu_seqlens: Tensor, pairs: Pairs, *, margin_P: Tensor | None = None
) -> Tensor:
    """Compute `pairwise_loss` per token, averaged from the first token where the two responses differ to the end.

    Source: DeepSpeed-Chat (reward model of step 2). Beyond its end, the shorter response keeps the score of its last
    token (DeepSpeed-Chat uses the scores of its padding there). Equal responses are compared at their last token.

    Args:
        after_T: [T] score after each token, differentiable.
        ids_T: [T] token ids.
        cu_seqlens: int32 [S+1].
        pairs: pairs of the S sequences.
        margin_P: [P], see `pairwise_loss`.

    Returns:
        [P] in nats; 0 if both sequences are empty.
    """
    check_shapes(ids_T, after_T=after_T)
    check_shapes(pairs.chosen_P, margin_P=margin_P)
    lengths_S = sequence_lengths(cu_seqlens)
    end_P = torch.maximum(lengths_S[pairs.chosen_P], lengths_S[pairs.rejected_P])
    place_L = torch.arange(int(end_P.max()) if len(end_P) else 0, device=ids_T.device)
    # One extra slot with score 0, for sequences without tokens.
    scores_T, tokens_T = F.pad(at_least_fp32(after_T), (0, 1)), F.pad(ids_T, (0, 1), value=-1)

    def aligned(chosen_P: Tensor) -> tuple[Tensor, Tensor]:
        length_P1 = lengths_S[chosen_P, None]
        held_PL = torch.minimum(place_L, length_P1 - 1) + cu_seqlens.long()[chosen_P, None]
        slots_PL = torch.where(length_P1 > 0, held_PL, len(ids_T))
        return scores_T[slots_PL], tokens_T[slots_PL].masked_fill(place_L >= length_P1, -1)

    (chosen_PL, chosen_ids_PL), (rejected_PL, rejected_ids_PL) = aligned(pairs.chosen_P), aligned(pairs.rejected_P)
    last_PL = place_L == end_P[:, None] - 1
    after_divergence_PL = ((chosen_ids_PL != rejected_ids_PL) | last_PL).cumsum(1) > 0
    where_PL = after_divergence_PL & (place_L < end_P[:, None])
    difference_PL = chosen_PL - rejected_PL
    if margin_P is not None:
        difference_PL = difference_PL - margin_P.detach()[:, None]
    return torch.where(where_PL, -F.logsigmoid(difference_PL), 0).sum(1) / where_PL.sum(1).clamp(min=1)


def best_of_n_loss(scores_S: Tensor, labels_S: Tensor, group_S: Tensor, n_groups: int) -> Tensor:
    """Compute the cross-entropy of a softmax over the scores of a group, with the preferred response as the target.

    Source: arXiv:1909.08593 (eq. 1).

    Args:
        scores_S: [S], differentiable.
        labels_S: [S]; 1 for one response of each group and 0 for the others.
        group_S: int64 [S], the group of each sequence; groups may be of any sizes and in any order.
        n_groups: G.

    Returns:
        [G] in nats; 0 for a group without sequences.
    """
    check_shapes(scores_S, labels_S=labels_S, group_S=group_S)
    scores_S = at_least_fp32(scores_S)
    largest_G = scores_S.detach().new_full((n_groups,), -torch.inf)
    largest_G = largest_G.scatter_reduce(0, group_S, scores_S.detach(), "amax")
    shifted_S = scores_S - largest_G[group_S]
    zeros_G = scores_S.new_zeros(n_groups)
    total_S = zeros_G.index_add(0, group_S, shifted_S.exp())[group_S]
    return zeros_G.index_add(0, group_S, labels_S.to(scores_S.dtype) * (total_S.log() - shifted_S))


def rating_loss(scores_S: Tensor, ratings_S: Tensor) -> Tensor:
    """Compute (score - rating)^2: [S]. Source: openai/lm-human-preferences (`ScalarRating`)."""
    check_shapes(scores_S, ratings_S=ratings_S)
    return (at_least_fp32(scores_S) - ratings_S.detach()).square()


def comparison_loss(first_P: Tensor, second_P: Tensor, difference_P: Tensor) -> Tensor:
    """Compute (first - second - difference)^2: [P]. Source: openai/lm-human-preferences (`ScalarComparison`).

    Args:
        first_P: [P] scores, differentiable.
        second_P: [P] scores, differentiable.
        difference_P: [P] human rating of the first response minus that of the second.
    """
    check_shapes(first_P, second_P=second_P, difference_P=difference_P)
    return (at_least_fp32(first_P) - at_least_fp32(second_P) - difference_P.detach()).square()


def centering_loss(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """Compute (chosen + rejected)^2: [P], which keeps the scores of a reward model around 0.

    Pairwise losses depend only on the difference of the scores. Source: arXiv:2312.09244 (section 2.2).
    """
    check_shapes(chosen_P, rejected_P=rejected_P)
    return (at_least_fp32(chosen_P) + at_least_fp32(rejected_P)).square()


def dpo_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    *,
    beta: float,
    kind: DPOLoss = DPOLoss.sigmoid,
    label_smoothing: float = 0.0,
    target_margin: float = 0.0,
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
    bounded_P = logprobs_P.clamp(max=LARGEST_LOGPROB)
    return bounded_P - torch.log(-torch.expm1(bounded_P))


def kto_baseline(policy_S: Tensor, reference_S: Tensor, valid_S: Tensor) -> Tensor:
    """Estimate the KL divergence from the reference that KTO compares rewards with: a 0-d tensor, at least 0.

    Source: arXiv:2402.01306 (section 4.1). The mean log-ratio of responses to other prompts; without gradient.

    Args:
        policy_S: [S] log-prob of the response to another prompt under the policy (nats).
        reference_S: [S] its log-prob under the reference.
        valid_S: [S] bool, the responses that count. The result is 0 if there are none.
    """
    check_shapes(policy_S, reference_S=reference_S, valid_S=valid_S)
    log_ratio_S = at_least_fp32(policy_S.detach()) - at_least_fp32(reference_S.detach())
    return (torch.where(valid_S, log_ratio_S, 0).sum() / valid_S.sum().clamp(min=1)).clamp(min=0)


def kto_loss(
    log_ratio_S: Tensor,
    desirable_S: Tensor,
    baseline_S: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Compute the loss of Kahneman-Tversky optimization: [S].

    Source: arXiv:2402.01306 (eq. 8). With log-ratio h and baseline z, the loss of a desirable response is
    w (1 - sigmoid(beta (h - z))). For an undesirable one, h and z are exchanged.

    Args:
        log_ratio_S: [S] log policy(y) - log reference(y) (nats), differentiable.
        desirable_S: [S] bool.
        baseline_S: [S] result of `kto_baseline`, the same for all responses of an optimizer step.
        beta: coefficient of the implicit KL penalty towards the reference, > 0.
        desirable_weight: weight of desirable responses.
        undesirable_weight: weight of undesirable responses.

    Raises:
        ValueError: `beta` is not positive, or the shapes differ.
    """
    check_shapes(log_ratio_S, desirable_S=desirable_S, baseline_S=baseline_S)
    if not beta > 0:
        raise ValueError(f"beta must be positive, found {beta:g}")
    above_S = beta * (at_least_fp32(log_ratio_S) - baseline_S.detach())
    desirable_S = desirable_S.bool()
    weights = above_S.new_tensor([undesirable_weight, desirable_weight])
    return weights[desirable_S.long()] * torch.sigmoid(torch.where(desirable_S, -above_S, above_S))
