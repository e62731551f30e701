"""Pure functions on packed tensors: the mathematics of every algorithm, with no model, device, process or config.

What belongs here takes tensors and plain values and returns tensors; it imports torch and nothing of realign.
Each file is one subject: `packed` (boundaries), `logprobs` (from hidden states), `kl`, `advantages` (credit),
`normalization`, `losses` (per token) and `aggregation` (to one number). Names end in the shape they carry:
T packed tokens, S sequences, N any elements, V vocabulary, H hidden, M masked elements, C a chunk of tokens, U units.
"""

from __future__ import annotations

from .advantages import (
    discounted_returns,
    gae,
    token_rewards,
)
from .aggregation import (
    Aggregation,
    aggregate,
    aggregation_weight,
)
from .kl import (
    LOG_RATIO_LIMIT,
    AdaptiveKLController,
    FixedKLController,
    KLController,
    KLEstimator,
    kl_estimate,
    log_ratio,
)
from .logprobs import (
    LMHead,
    exact_kl,
    token_logprobs,
)
from .losses import (
    CapMode,
    ImportanceLevel,
    PolicyLoss,
    ValueLoss,
    behaviour_weights,
    nll_loss,
    policy_loss,
    value_loss,
)
from .normalization import (
    Level,
    Normalization,
    Reduce,
    Scope,
    degenerate_groups,
    identity,
    normalize,
    whiten,
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

__all__ = [
    "LOG_RATIO_LIMIT",
    "AdaptiveKLController",
    "Aggregation",
    "CapMode",
    "FixedKLController",
    "ImportanceLevel",
    "KLController",
    "KLEstimator",
    "LMHead",
    "Level",
    "Normalization",
    "PolicyLoss",
    "Reduce",
    "Scope",
    "ValueLoss",
    "aggregate",
    "aggregation_weight",
    "behaviour_weights",
    "broadcast_to_tokens",
    "cu_seqlens_of",
    "degenerate_groups",
    "discounted_returns",
    "exact_kl",
    "gae",
    "identity",
    "kl_estimate",
    "last_true",
    "log_ratio",
    "nll_loss",
    "normalize",
    "policy_loss",
    "position_ids",
    "previous",
    "segment_sum",
    "sequence_index",
    "sequence_lengths",
    "token_logprobs",
    "token_rewards",
    "value_loss",
    "whiten",
]
