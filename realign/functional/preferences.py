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
    "comparison_loss",
    "divergence_loss",
    "dpo_loss",
    "pairs_by_label",
    "pairwise_loss",
    "rating_loss",
]


class DPOLoss(StrEnum):
    """The function that `dpo_loss` applies to the difference h of the two log-ratios."""

    sigmoid = "sigmoid"
    """-log sigmoid(beta h): the Bradley-Terry likelihood of the preference (arXiv:2305.18290)."""
    ipo = "ipo"
    """(h - 1 / (2 beta))^2: has a finite optimum even for deterministic preferences (arXiv:2310.12036)."""


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


def dpo_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    *,
    beta: float,
    kind: DPOLoss = DPOLoss.sigmoid,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the loss of direct preference optimization from log-ratios of the policy to the reference.

    Source: arXiv:2305.18290 (eq. 7); IPO: arXiv:2310.12036 (eq. 17); label smoothing: the conservative DPO of
    https://ericmitchell.ai/cdpo.pdf.

    Args:
        chosen_P: [P] log policy(y) - log reference(y) of the chosen response (nats), differentiable.
        rejected_P: [P] the same log-ratio of the rejected response.
        beta: coefficient of the implicit KL penalty towards the reference, > 0.
        kind: the loss function.
        label_smoothing: probability that a preference label is flipped, in [0, 0.5); sigmoid only.

    Raises:
        ValueError: an argument is out of range.
    """
    check_shapes(chosen_P, rejected_P=rejected_P)
    if not beta > 0 or not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"beta must be positive and label_smoothing in [0, 0.5), found {beta:g} and {label_smoothing:g}"
        )
    difference_P = at_least_fp32(chosen_P) - at_least_fp32(rejected_P)
    if DPOLoss(kind) is DPOLoss.ipo:
        if label_smoothing:
            raise ValueError(f"label_smoothing={label_smoothing:g} has no effect on the ipo loss. Use 0")
        return (difference_P - 1 / (2 * beta)).square()
    logits_P = beta * difference_P
    return -(1 - label_smoothing) * F.logsigmoid(logits_P) - label_smoothing * F.logsigmoid(-logits_P)
