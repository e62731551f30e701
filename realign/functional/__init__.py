"""Pure functions on packed tensors: the mathematics of the algorithms, independent of models, processes and config.

Functions take tensors and plain values and return tensors. The package imports torch and no other part of realign.

- `packed`: sequence boundaries.
- `logprobs`: log-probs and entropy from hidden states.
- `kl`: KL estimators and KL controllers.
- `advantages`: rewards, returns and advantages per token.
- `normalization`, `moments`: statistics of a batch, and running statistics over batches.
- `shaping`: reward shaping.
- `losses`, `objectives`, `preferences`: losses per token, policy objectives, and losses per preference pair.
- `aggregation`: reduction of token losses to a scalar.

A tensor's name ends in its shape: T packed tokens, S sequences, N any elements, V vocabulary, H hidden size.
Further letters: M elements in the mask, C a chunk of tokens, U units (groups, or the batch).

Masks are bool. The tokens in a mask are the positions where it is True.
"""

from __future__ import annotations

from .advantages import (
    discounted_returns,
    gae,
    n_step,
    token_rewards,
)
from .aggregation import (
    AggregationMode,
    aggregate,
    aggregation_weight,
)
from .divergence import vocabulary_divergence
from .kl import (
    LOG_RATIO_LIMIT,
    AdaptiveKLController,
    FixedKLController,
    KLController,
    KLEstimator,
    ThresholdKLController,
    kl_estimate,
    log_ratio,
)
from .logprobs import (
    LMHead,
    token_logprobs,
)
from .losses import (
    BehaviorWeights,
    CapMode,
    ImportanceLevel,
    PolicyLoss,
    ValueLoss,
    behavior_weights,
    expectile_loss,
    nll_loss,
    policy_loss,
    value_loss,
)
from .moments import MomentsKind, RunningMoments, score_moments
from .normalization import (
    Reduce,
    Scope,
    degenerate_groups,
    degenerate_rescale,
    identity,
    normalize,
    whiten,
)
from .objectives import (
    cispo_loss,
    gmpo_loss,
    gspo_loss,
    proximal_kl_loss,
    reinforce_loss,
    sapo_loss,
    sequence_mean,
)
from .packed import (
    broadcast_to_tokens,
    cu_seqlens_of,
    last_true,
    position_ids,
    previous,
    segment_sum,
    sequence_index,
    sequence_lengths,
)
from .preferences import (
    DPOLoss,
    Pairs,
    best_of_n_loss,
    centering_loss,
    comparison_loss,
    divergence_loss,
    dpo_loss,
    kto_baseline,
    kto_loss,
    pairs_by_label,
    pairwise_loss,
    rating_loss,
)
from .shaping import keep_best, overlong_penalty

__all__ = [
    "LOG_RATIO_LIMIT",
    "AdaptiveKLController",
    "AggregationMode",
    "BehaviorWeights",
    "CapMode",
    "DPOLoss",
    "FixedKLController",
    "ImportanceLevel",
    "KLController",
    "KLEstimator",
    "LMHead",
    "MomentsKind",
    "Pairs",
    "PolicyLoss",
    "Reduce",
    "RunningMoments",
    "Scope",
    "ThresholdKLController",
    "ValueLoss",
    "aggregate",
    "aggregation_weight",
    "behavior_weights",
    "best_of_n_loss",
    "broadcast_to_tokens",
    "centering_loss",
    "cispo_loss",
    "comparison_loss",
    "cu_seqlens_of",
    "degenerate_groups",
    "degenerate_rescale",
    "discounted_returns",
    "divergence_loss",
    "dpo_loss",
    "expectile_loss",
    "gae",
    "gmpo_loss",
    "gspo_loss",
    "identity",
    "keep_best",
    "kl_estimate",
    "kto_baseline",
    "kto_loss",
    "last_true",
    "log_ratio",
    "n_step",
    "nll_loss",
    "normalize",
    "overlong_penalty",
    "pairs_by_label",
    "pairwise_loss",
    "policy_loss",
    "position_ids",
    "previous",
    "proximal_kl_loss",
    "rating_loss",
    "reinforce_loss",
    "sapo_loss",
    "score_moments",
    "segment_sum",
    "sequence_index",
    "sequence_lengths",
    "sequence_mean",
    "token_logprobs",
    "token_rewards",
    "value_loss",
    "vocabulary_divergence",
    "whiten",
]
