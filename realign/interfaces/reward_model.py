"""Reward models: a score of a whole response, learned from preference data.

Training reads `input_ids`, `loss_mask` (the responses), `labels` and `margins`. Inference reads `input_ids` and writes
`rewards` [S]: `gain * score + bias`, with the score at the token that `score_at` selects. With `dense` it also writes
`dense_rewards` [T], the score after each response token, and `rewards` is 0. With `dense` or `cut` it also reads
`prompt_mask`.

Losses: Bradley-Terry on pairs (arXiv:2203.02155, with margin arXiv:2307.09288), a softmax over n candidates
(arXiv:1909.08593), squared errors of ratings and of their differences (openai/lm-human-preferences). Losses use the
same `gain` and `bias` as inference. Responses without tokens and pairs with equal labels are excluded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from realign.api import (
    RPC,
    DataflowGraph,
    Keys,
    Mean,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Panel,
    Plan,
    SequenceSample,
    Stats,
    correlation,
    masked_mean,
)
from realign.errors import RunError, SettingsError
from realign.functional import (
    Reduce,
    identity,
    last_true,
    score_moments,
    sequence_lengths,
)
from realign.functional.packed import at_least_fp32, check_shapes
from realign.interfaces.components.pairs import Pairs, check_pairs, has_answer, pairs_of, train_on_groups
from realign.interfaces.components.response_cut import ResponseCut, cut_responses, reward_keys
from realign.interfaces.components.truncation import end_tokens
from realign.settings import Count, NonNegative, NonNegativeInt, Positive


class RewardLoss(StrEnum):
    """Loss of a reward model, which depends on the meaning of the labels."""

    pairwise = "pairwise"
    """Consecutive responses are pairs; the response with the larger label is preferred, by `margins`."""
    best_of_n = "best_of_n"
    """The response labeled 1 was chosen among the responses to a prompt."""
    scalar_rating = "scalar_rating"
    """A label is the target score of the response."""
    scalar_compare = "scalar_compare"
    """Consecutive responses are pairs; the difference of their labels is the target difference of their scores."""


class ScoreAt(StrEnum):
    """Token at which the score of a sequence is read."""

    last = "last"
    """The last token of the sequence."""
    before_end = "before_end"
    """The token before the end token, as in summarize-from-feedback and DeepSpeed-Chat. A sequence that does not end
    with an end token (a truncated response) is read at its last token. A response of the end token alone is read at the
    last token of its prompt. An end token without any token before it is read itself."""


ENDS = "score_before_end"
"""Key [S] bool: whether the score is read at the token before the last one."""


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

    def align(chosen_P: Tensor) -> tuple[Tensor, Tensor]:
        length_P1 = lengths_S[chosen_P, None]
        held_PL = torch.minimum(place_L, length_P1 - 1) + cu_seqlens.long()[chosen_P, None]
        slots_PL = torch.where(length_P1 > 0, held_PL, len(ids_T))
        # No token has id -1, so a response that continues differs where the other has ended.
        return scores_T[slots_PL], tokens_T[slots_PL].masked_fill(place_L >= length_P1, -1)

    (chosen_PL, chosen_ids_PL), (rejected_PL, rejected_ids_PL) = align(pairs.chosen_P), align(pairs.rejected_P)
    last_PL = place_L == end_P[:, None] - 1
    after_divergence_PL = ((chosen_ids_PL != rejected_ids_PL) | last_PL).cumsum(1) > 0
    where_PL = after_divergence_PL & (place_L < end_P[:, None])
    difference_PL = chosen_PL - rejected_PL
    if margin_P is not None:
        difference_PL = difference_PL - margin_P.detach()[:, None]
    return torch.where(where_PL, -F.logsigmoid(difference_PL), 0).sum(1) / where_PL.sum(1).clamp(min=1)


def _best_of_n_loss(scores_S: Tensor, labels_S: Tensor, group_S: Tensor, n_groups: int) -> Tensor:
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


@dataclass
class RewardModelInterface(ModelInterface):
    """A reward model, trained on preferences and then used to compute rewards. Needs a model with head=score."""

    OUTPUTS = frozenset({"scores"})

    kind: RewardLoss = RewardLoss.pairwise
    """Loss: pairwise, best_of_n, scalar_rating or scalar_compare."""
    n_minibatches: Count = 1
    """Optimizer steps per batch of prompts."""
    use_margin: bool = False
    """Require the chosen response to score higher by `margins` (kind=pairwise)."""
    per_prompt_weighting: bool = False
    """Give all prompts the same weight: each of a prompt's K pairs or rated responses has weight 1 / K (not with
    kind=best_of_n)."""
    from_divergence: bool = False
    """Average the loss over the scores of all tokens from the first difference of a pair to the end of the longer
    response (kind=pairwise). The shorter response keeps its last score. Inference still uses the last token."""
    center_coef: NonNegative = 0.0
    """Weight of (chosen score + rejected score)^2 in the loss, which keeps scores around 0 (kind=pairwise;
    arXiv:2312.09244)."""
    score_at: ScoreAt = ScoreAt.last
    """Token at which the score is read: last, or before_end, the token before the end token (the last token if a
    sequence doesn't end with one). Use the same value for the training of a reward model and for the rewards that it
    computes."""
    stop_token_ids: list[NonNegativeInt] | None = None
    """End tokens of score_at=before_end; null: those of the model and its tokenizer. If the sampler has other ones, set
    this to ${interfaces.actor.generation.stop_token_ids}."""
    clip: Positive | None = None
    """Bound on the absolute value of rewards, after gain and bias (inference only); null: off."""
    cut: ResponseCut | None = None
    """Settings to score a response only up to its first end mark (inference only); null: score the whole response."""
    dense: bool = False
    """Reward every response token with the score after it, instead of the last token only (inference only)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score_at is ScoreAt.before_end and (self.dense or self.from_divergence):
            other = "dense" if self.dense else "from_divergence"
            raise SettingsError(f"score_at=before_end: {other}=true uses the scores of all tokens. Set {other}=false")
        self.gain, self.bias = 1.0, 0.0

    @override
    def ineffective(self) -> dict[str, str]:
        reasons: dict[str, str] = {}
        if self.kind is not RewardLoss.pairwise:
            unpaired = f"with kind={self.kind.value}. Set kind=pairwise"
            reasons |= dict.fromkeys(("use_margin", "from_divergence", "center_coef"), unpaired)
        if self.kind is RewardLoss.best_of_n:
            reasons["per_prompt_weighting"] = "with kind=best_of_n, which has one choice per prompt. Set it to false"
        if self.score_at is ScoreAt.last:
            reasons["stop_token_ids"] = "with score_at=last. Set score_at=before_end"
        return reasons

    @override
    def keys(self, method: str) -> Keys:
        if method == "train_step":
            needs = dict.fromkeys(("input_ids", "loss_mask", "labels"), "")
            margins = {"margins": "use_margin=true"} if self.use_margin else {}
            return Keys(needs=needs | margins, uses=frozenset({"margins"}))
        if method != "inference":
            return Keys()
        mask = "cut" if self.cut is not None else "dense=true" if self.dense else None
        needs = {"input_ids": ""} | ({} if mask is None else {"prompt_mask": mask})
        return Keys(needs=needs, writes=reward_keys(self.dense))

    @override
    def plan(self) -> Plan:
        return Plan(n_minibatches=self.n_minibatches)

    @override
    def headline(self) -> tuple[str, ...]:
        if self.kind is RewardLoss.scalar_rating:
            return ("loss", "rating_error", "pearson")
        return ("loss", "accuracy", "margin")

    @override
    def panels(self) -> tuple[Panel, ...]:
        if self.kind is RewardLoss.scalar_rating:
            return (Panel("correlation with ratings", {"pearson": "reward model, training batch"}),)
        return (Panel("accuracy on preferences", {"accuracy": "reward model, training batch"}),)

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Compute `rewards` [S], the normalized, clipped score or the penalty of `cut`; and `dense_rewards` [T]."""
        cut = cut_responses(self.cut, data, model.tokenizer)
        scores_S, after_T = self._score(model, cut.data, mb_spec)
        if after_T is None:
            return data.with_sequences(rewards=cut.rewards(self._clip(scores_S))).select(["rewards"])
        dense_T = cut.dense_rewards(self._clip(after_T), data)
        written = data.with_sequences(rewards=cut.rewards(torch.zeros_like(scores_S))).with_tokens(
            dense_rewards=dense_T
        )
        return written.select(["rewards", "dense_rewards"])

    def scores(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Tensor:
        """Return [S] normalized scores at the end of each response, the input of `normalize`.

        `cut` is applied without its penalty, and scores are not clipped.
        """
        return self._score(model, cut_responses(self.cut, data, model.tokenizer).data, mb_spec)[0]

    def _score(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> tuple[Tensor, Tensor | None]:
        """Return [S] normalized scores, and with `dense` the [T] scores after each token."""

        def post_hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
            scored = mb.with_sequences(scores=self._scores(output, mb))
            return scored.with_tokens(after=self._scale(_scores_after(output, mb))) if self.dense else scored

        scored = model.engine.forward(self._mark_ends(model, data.select(["input_ids"])), mb_spec, post_hook)
        return scored["scores"], scored.get("after")

    def _mark_ends(self, model: Model, data: SequenceSample) -> SequenceSample:
        """Return the batch with the key `ENDS` if `score_at` is before_end."""
        if self.score_at is ScoreAt.last:
            return data
        ends_T = end_tokens(model, data["input_ids"], self.stop_token_ids, "score_at=before_end")
        lengths_S = sequence_lengths(data.cu_seqlens())
        last_S = data.cu_seqlens()[1:].long() - 1
        ends_S = torch.zeros_like(lengths_S, dtype=torch.bool)
        two_S = lengths_S > 1
        ends_S[two_S] = ends_T[last_S[two_S]]
        return data.with_sequences(**{ENDS: ends_S})

    def _scores(self, output: ModelOutput, data: SequenceSample) -> Tensor:
        """Return [S] normalized scores at the tokens that `score_at` selects."""
        scores_S = output.scores()
        if ENDS in data:
            last_S = (data.cu_seqlens()[1:].long() - 1).clamp(min=0)
            before_S = output.values()[last_S]  # values precede their tokens
            scores_S = torch.where(data[ENDS], before_S, scores_S)
        return self._scale(scores_S)

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        """Take `n_minibatches` optimizer steps over the batch, in a new random order; groups stay together.

        Raises:
            DataError: a prompt has an odd number of responses, and the loss is on pairs.
            ConfigError: score_at=before_end, and neither the model nor its tokenizer has an end token.
        """
        if self._on_pairs:
            check_pairs(data)
        data = self._mark_ends(model, data)
        return train_on_groups(model, data, mb_spec, self.n_minibatches, self.loss, self.loss_weight)

    def loss(self, output: ModelOutput, minibatch: SequenceSample) -> tuple[Tensor, Stats]:
        """Return the weighted sum of the losses of pairs, groups or responses, and metrics."""
        scores_S = self._scores(output, minibatch)
        weight_N = self._weights(minibatch)
        loss_N, stats = self._losses(output, minibatch, scores_S)
        return torch.where(weight_N > 0, loss_N * weight_N.to(loss_N.dtype), 0).sum(), stats

    def loss_weight(self, data: SequenceSample) -> Tensor:
        """Return the number of pairs, groups or responses in the loss; of prompts with `per_prompt_weighting`."""
        return self._weights(data).sum()

    def normalize(
        self, scores_S: Tensor, *, mean: float = 0.0, std: float = 1.0, reduce: Reduce = identity
    ) -> tuple[float, float]:
        """Set gain and bias to give these rewards this mean and standard deviation (arXiv:1909.08593, section 2.1).

        Args:
            scores_S: [S] result of `scores` for responses of the reference policy.
            mean: target mean.
            std: target population standard deviation.
            reduce: sum over ranks.

        Returns:
            The mean and the standard deviation of the scores before normalization.

        Raises:
            ValueError: `mean` is not finite, or `std` is not positive.
            RunError: there are fewer than two scores, some are not finite, or all are equal.
        """
        found_mean, found_std = score_moments(scores_S, reduce)
        if not std > 0 or not math.isfinite(mean):
            raise ValueError(f"mean must be finite and std positive, found {mean:g} and {std:g}")
        if not found_std > 1e-6 * math.hypot(found_mean, found_std):
            raise RunError(
                f"The scores of {len(scores_S)} responses have mean {found_mean:g} and standard deviation "
                f"{found_std:g}. Calibration needs at least two finite scores that differ"
            )
        # The scores already include the current gain and bias, so the new ones are composed with them.
        factor = std / found_std
        self.gain, self.bias = self.gain * factor, (self.bias - found_mean) * factor + mean
        return found_mean, found_std

    @property
    def labels_are_numbers(self) -> bool:
        """Return whether labels are ratings, and do not only rank responses."""
        return self.kind in (RewardLoss.scalar_rating, RewardLoss.scalar_compare)

    def label_scale(self, labels_S: Tensor) -> tuple[float, float]:
        """Return the target mean and standard deviation of rewards before training, derived from the labels.

        Source: openai/lm-human-preferences (`target_scales`). Ratings determine both. For differences of two ratings,
        the mean is 0 and the standard deviation is half the root mean square of the differences. For choices, the
        result is (0, 1).

        Args:
            labels_S: [S] labels of the training data.
        """
        if self.kind is RewardLoss.scalar_rating:
            return score_moments(labels_S)
        if self.kind is RewardLoss.scalar_compare:
            differences_P = (labels_S[::2] - labels_S[1::2]).double()
            return 0.0, float(differences_P.square().mean().sqrt()) / 2
        return 0.0, 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return gain and bias."""
        return {"gain": self.gain, "bias": self.bias}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore gain and bias."""
        self.gain, self.bias = float(state["gain"]), float(state["bias"])

    def load_saved_state(self, saved: Mapping[str, Any]) -> None:
        """Restore the gain and bias saved with the weights; weights of a policy or a critic have none."""
        if "gain" in saved:
            self.load_state_dict(saved)

    @override
    def describe(self, batch_prompts: int) -> dict[str, str]:
        options = ("use_margin", "per_prompt_weighting", "from_divergence")
        chosen = [name for name in options if getattr(self, name)]
        chosen += ["score before the end token"] if self.score_at is ScoreAt.before_end else []
        chosen += [f"center_coef {self.center_coef:g}"] if self.center_coef else []
        return {
            "loss": ", ".join([self.kind.value, *chosen]),
        }

    @property
    def _on_pairs(self) -> bool:
        return self.kind in (RewardLoss.pairwise, RewardLoss.scalar_compare)

    def _scale(self, scores_N: Tensor) -> Tensor:
        return self.gain * scores_N + self.bias

    def _clip(self, rewards_N: Tensor) -> Tensor:
        return rewards_N if self.clip is None else rewards_N.clamp(-self.clip, self.clip)

    def _weights(self, data: SequenceSample) -> Tensor:
        """Return [N] weight of each pair, group or response; 0 if it is excluded from the loss."""
        group_S, answered_S = data.group_index(), has_answer(data)
        if self.kind is RewardLoss.best_of_n:
            return self._chosen_groups(data).float()
        group_N, counts_N = group_S, answered_S
        if self._on_pairs:
            group_N, counts_N = group_S[::2], answered_S[::2] & answered_S[1::2]
        # A pair with equal labels is a rating for scalar_compare, but no preference.
        if self.kind is RewardLoss.pairwise:
            counts_N = pairs_of(data).counts_P
        if not self.per_prompt_weighting:
            return counts_N.float()
        per_group_G = counts_N.new_zeros(len(data), dtype=torch.float64).index_add(0, group_N, counts_N.double())
        return torch.where(counts_N, 1 / per_group_G[group_N], 0)

    def _chosen_groups(self, data: SequenceSample) -> Tensor:
        """Return [G] bool: whether the chosen response and at least one other have tokens."""
        group_S, answered_S = data.group_index(), has_answer(data)
        zeros_G = torch.zeros(len(data), device=group_S.device)
        present_G = zeros_G.index_add(0, group_S, answered_S.float())
        chosen_G = zeros_G.index_add(0, group_S, (answered_S & (data["labels"] > 0)).float())
        return (present_G > 1) & (chosen_G > 0)

    def _losses(self, output: ModelOutput, data: SequenceSample, scores_S: Tensor) -> tuple[Tensor, Stats]:
        """Return [N] loss of each pair, group or response, and metrics over those in the loss."""
        labels_S, answered_S = data["labels"].to(scores_S.dtype), has_answer(data)
        if self.kind is RewardLoss.scalar_rating:
            loss_S = rating_loss(scores_S, labels_S)
            return loss_S, {
                "rating_error": masked_mean(loss_S, answered_S),
                "score": masked_mean(scores_S, answered_S),
                "pearson": correlation(scores_S, labels_S, answered_S),
            }
        if self.kind is RewardLoss.best_of_n:
            return self._best_of_n(data, scores_S, labels_S)
        pairs = pairs_of(data)
        chosen_P, rejected_P = scores_S[pairs.chosen_P], scores_S[pairs.rejected_P]
        if self.kind is RewardLoss.scalar_compare:
            loss_P = comparison_loss(scores_S[::2], scores_S[1::2], labels_S[::2] - labels_S[1::2])
        else:
            margin_P = data["margins"][pairs.chosen_P] if self.use_margin else None
            if self.from_divergence:
                after_T = self._scale(_scores_after(output, data))
                loss_P = divergence_loss(after_T, data["input_ids"], data.cu_seqlens(), pairs, margin_P=margin_P)
            else:
                loss_P = pairwise_loss(chosen_P, rejected_P, margin_P=margin_P)
        counts_P, stats = pairs.counts_P, dict[str, Mean]()
        if self.center_coef:
            center_P = centering_loss(chosen_P, rejected_P)
            loss_P, stats["centering_loss"] = loss_P + self.center_coef * center_P, masked_mean(center_P, counts_P)
        return loss_P, {
            **stats,
            "accuracy": masked_mean(chosen_P > rejected_P, counts_P),
            "margin": masked_mean(chosen_P - rejected_P, counts_P),
            "score_chosen": masked_mean(chosen_P, counts_P),
            "score_rejected": masked_mean(rejected_P, counts_P),
        }

    def _best_of_n(self, data: SequenceSample, scores_S: Tensor, labels_S: Tensor) -> tuple[Tensor, Stats]:
        group_S, present_S, counts_G = data.group_index(), has_answer(data), self._chosen_groups(data)
        group_M, scores_M, labels_M = group_S[present_S], scores_S[present_S], labels_S[present_S]
        loss_G = _best_of_n_loss(scores_M, labels_M, group_M, len(data))
        lowest_G = scores_M.detach().new_full((len(data),), -torch.inf)
        best_G = lowest_G.scatter_reduce(0, group_M, scores_M.detach(), "amax")
        chosen_M, counts_M = labels_M > 0, counts_G[group_M]
        return loss_G, {
            "accuracy": masked_mean(scores_M >= best_G[group_M], chosen_M & counts_M),
            "score_chosen": masked_mean(scores_M, chosen_M & counts_M),
            "score_rejected": masked_mean(scores_M, ~chosen_M & counts_M),
        }


def dataflow() -> DataflowGraph:
    """Build the graph: one call that trains on labeled responses."""
    train = RPC("reward_train", "reward", "train_step", inputs=("input_ids", "loss_mask", "labels", "margins"))
    return DataflowGraph((train,), dataset_keys=("input_ids", "prompt_mask", "loss_mask", "labels", "margins"))


def _scores_after(output: ModelOutput, data: SequenceSample) -> Tensor:
    """Return [T] score after each token: the value before the next token, or at the last token the sequence's score."""
    cu_seqlens = data.cu_seqlens()
    after_T = output.values().roll(-1)
    last_S = last_true(torch.ones_like(data["input_ids"], dtype=torch.bool), cu_seqlens)
    filled_S = last_S >= 0
    return after_T.index_put((last_S[filled_S],), output.scores()[filled_S])
