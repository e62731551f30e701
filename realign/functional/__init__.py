"""Pure functions on packed tensors that several algorithms share, independent of models, processes and config.

Functions take tensors and plain values and return tensors. The package imports torch and no other part of realign.

- `packed`: sequence boundaries.
- `logprobs`: log-probs, entropy and divergences from hidden states.
- `kl`: KL estimators.
- `returns`: rewards of tokens, returns and generalized advantages (GAE).
- `normalization`: statistics of a batch, and running statistics over batches.
- `losses`: the clipped policy loss, importance weights and the negative log-likelihood.
- `selection`: the best responses of each prompt.
- `pass_at_k`: pass@k.

A formula that only one component or algorithm uses is on its page: `realign.interfaces.components.objectives` has
`gspo_loss` and, below it, `Gspo`.

A tensor's name ends in its shape: T packed tokens, S sequences, N any elements, V vocabulary, H hidden size.
Further letters: M elements in the mask, C a chunk of tokens, U units (groups, or the batch).

Masks are bool. The tokens in a mask are the positions where it is True.
"""

from __future__ import annotations

from .kl import (
    LOG_RATIO_LIMIT,
    KLEstimator,
    kl_estimate,
    log_ratio,
)
from .logprobs import (
    LMHead,
    Support,
    token_logprobs,
    vocabulary_divergence,
)
from .losses import (
    BehaviorWeights,
    CapMode,
    ImportanceLevel,
    PolicyLoss,
    behavior_weights,
    nll_loss,
    policy_loss,
)
from .normalization import (
    MomentsKind,
    Reduce,
    RunningMoments,
    Scope,
    degenerate_groups,
    identity,
    normalize,
    score_moments,
    whiten,
)
from .packed import (
    broadcast_to_tokens,
    cu_seqlens_of,
    first_of_each,
    last_true,
    position_ids,
    previous,
    segment_sum,
    sequence_index,
    sequence_lengths,
)
from .returns import (
    discounted_returns,
    gae,
    n_step,
    token_rewards,
)
from .selection import (
    keep_best,
)

__all__ = [
    "LOG_RATIO_LIMIT",
    "BehaviorWeights",
    "CapMode",
    "ImportanceLevel",
    "KLEstimator",
    "LMHead",
    "MomentsKind",
    "PolicyLoss",
    "Reduce",
    "RunningMoments",
    "Scope",
    "Support",
    "behavior_weights",
    "broadcast_to_tokens",
    "cu_seqlens_of",
    "degenerate_groups",
    "discounted_returns",
    "first_of_each",
    "gae",
    "identity",
    "keep_best",
    "kl_estimate",
    "last_true",
    "log_ratio",
    "n_step",
    "nll_loss",
    "normalize",
    "policy_loss",
    "position_ids",
    "previous",
    "score_moments",
    "segment_sum",
    "sequence_index",
    "sequence_lengths",
    "token_logprobs",
    "token_rewards",
    "vocabulary_divergence",
    "whiten",
]
