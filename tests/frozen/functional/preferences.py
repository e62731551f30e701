"""Losses that compare responses to one prompt: for reward models and for direct preference optimisation.

P pairs, S sequences, G groups (the responses to one prompt). A loss has one value per pair, group or sequence; who
calls it leaves out what does not count, sums, and divides. Only scores and log-ratios of the trained model are
differentiated.
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
    """What `dpo_loss` does with the difference h of the two log-ratios."""

    sigmoid = "sigmoid"
    """-log sigmoid(beta h): the Bradley-Terry likelihood of the preference (arXiv:2305.18290)."""
    ipo = "ipo"
    """(h - 1 / (2 beta))^2: bounded, so a preference without noise does not push forever (arXiv:2310.12036)."""


class Pairs(NamedTuple):
    """Where the two responses of each pair stand among S sequences."""

    chosen_P: Tensor
    """int64: the one with the larger label."""
    rejected_P: Tensor
    """int64: the other."""
    counts_P: Tensor
    """bool: both are present, and their labels differ."""


def pairs_by_label(labels_S: Tensor, present_S: Tensor) -> Pairs:
    """Pair sequences 0 and 1, 2 and 3, and so on; the larger label of a pair is the chosen one.

    Args:
        labels_S: [S]; sequences of a pair stand next to each other.
        present_S: [S] bool: the sequence has something to compare.

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
    """-log sigmoid(chosen - rejected - margin): the Bradley-Terry likelihood of a preference.

    Source: arXiv:2203.02155 (eq. 1); margin: arXiv:2307.09288 (eq. 2).

    Args:
        chosen_P: [P] scores, differentiable.
        rejected_P: [P] scores, differentiable.
        margin_P: [P], how much better the chosen one should score; None: 0.

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
    """`pairwise_loss` token by token, averaged from the first token where the two responses differ to the end.

    Source: DeepSpeed-Chat (reward model of step 2). Where one response is longer, the shorter one keeps the score of
    its last token to the end of the longer (DeepSpeed-Chat scores its padding there). Two equal responses are compared
    at their last token.

    Args:
        after_T: [T] score after reading each token, differentiable.
        ids_T: [T] tokens.
        cu_seqlens: int32 [S+1].
        pairs: of the S sequences.
        margin_P: as in `pairwise_loss`.

    Returns:
        [P] in nats; 0 if both sequences are empty.
    """
    check_shapes(ids_T, after_T=after_T)
    check_shapes(pairs.chosen_P, margin_P=margin_P)
    lengths_S = sequence_lengths(cu_seqlens)
    end_P = torch.maximum(lengths_S[pairs.chosen_P], lengths_S[pairs.rejected_P])
    place_L = torch.arange(int(end_P.max()) if len(end_P) else 0, device=ids_T.device)
    # A slot more, for sequences without any token: they score 0.
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
    """Cross-entropy of a softmax over the scores of a group: the likelihood that people choose what they chose.

    Source: arXiv:1909.08593 (eq. 1).

    Args:
        scores_S: [S], differentiable.
        labels_S: [S], of each group one is 1 and the others are 0.
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
    """(score - rating)^2: [S]. Source: openai/lm-human-preferences (`ScalarRating`)."""
    check_shapes(scores_S, ratings_S=ratings_S)
    return (at_least_fp32(scores_S) - ratings_S.detach()).square()


def comparison_loss(first_P: Tensor, second_P: Tensor, difference_P: Tensor) -> Tensor:
    """(first - second - difference)^2: [P]. Source: openai/lm-human-preferences (`ScalarComparison`).

    Args:
        first_P: [P] scores, differentiable.
        second_P: [P] scores, differentiable.
        difference_P: [P], by how much people rated the first higher.
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
    """The loss of direct preference optimisation, on log-ratios of the policy to the reference.

    Source: arXiv:2305.18290 (eq. 7); IPO: arXiv:2310.12036 (eq. 17); label smoothing: the conservative DPO of
    https://ericmitchell.ai/cdpo.pdf.

    Args:
        chosen_P: [P] log policy(y) - log reference(y) of the chosen response (nats), differentiable.
        rejected_P: [P] of the rejected one.
        beta: strength of the pull to the reference, > 0.
        kind: the loss.
        label_smoothing: probability that a preference is the wrong way round, in [0, 0.5); sigmoid only.

    Raises:
        ValueError: a setting is out of its range.
    """
    check_shapes(chosen_P, rejected_P=rejected_P)
    if not beta > 0 or not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"beta must be positive and label_smoothing in [0, 0.5), found {beta:g} and {label_smoothing:g}"
        )
    difference_P = at_least_fp32(chosen_P) - at_least_fp32(rejected_P)
    if DPOLoss(kind) is DPOLoss.ipo:
        if label_smoothing:
            raise ValueError(f"label_smoothing={label_smoothing:g} belongs to the sigmoid loss, but the loss is ipo")
        return (difference_P - 1 / (2 * beta)).square()
    logits_P = beta * difference_P
    return -(1 - label_smoothing) * F.logsigmoid(logits_P) - label_smoothing * F.logsigmoid(-logits_P)
