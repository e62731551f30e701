"""`ResponseCut`: score a response only up to its first end mark, such as the end of a sentence.

Source: arXiv:1909.08593, section 2.2 and openai/lm-human-preferences (`truncate_token`, `truncate_after`,
`penalty_reward_value`). Only rewards see the cut text: the policy trains on the whole response.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from realign.api import Lengths, SequenceSample
from realign.errors import ConfigError, SettingsError
from realign.functional import broadcast_to_tokens, segment_sum, sequence_index
from realign.settings import Finite, NonNegativeInt, Settings
from realign.tokenization import Tokens


class Cut(NamedTuple):
    """A batch after cutting its responses."""

    data: SequenceSample
    """`input_ids` and `prompt_mask` of the remaining tokens, and the metadata."""
    kept_T: Tensor
    """[T] bool: whether a token of the whole batch remains."""
    judged_S: Tensor
    """[S] bool: whether the response is scored; otherwise its reward is `penalty`."""
    penalty: float = 0.0

    def rewards(self, rewards_S: Tensor) -> Tensor:
        """Return [S] these rewards, or the penalty for responses that are not scored."""
        return torch.where(self.judged_S, rewards_S, self.penalty)

    def dense_rewards(self, rewards_T: Tensor, whole: SequenceSample) -> Tensor:
        """Return [T] these rewards at the positions of the remaining tokens; 0 at all other tokens.

        Prompt tokens and responses that are not scored also get 0.
        """
        response_T = ~whole["prompt_mask"] & broadcast_to_tokens(self.judged_S, whole.cu_seqlens())
        spread_T = rewards_T.new_zeros(len(response_T)).masked_scatter(self.kept_T, rewards_T)
        return torch.where(response_T, spread_T, 0)


@dataclass
class ResponseCut(Settings):
    """Cut a response after its first end token; the end token remains."""

    token_ids: list[NonNegativeInt] = field(default_factory=list)
    """Ids of the end tokens."""
    texts: list[str] = field(default_factory=list)
    """Texts of further end tokens; each must be exactly one token of the tokenizer."""
    after: NonNegativeInt = 0
    """Position in the response, in tokens from 0, before which end tokens are ignored."""
    penalty: Finite | None = None
    """Reward of a response without an end token, which replaces its score; null: score the whole response."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.token_ids and not self.texts:
            raise SettingsError("token_ids=[]: token_ids and texts are both empty. Set at least one end token")
        if "" in self.texts:
            raise SettingsError(f"texts={self.texts}: texts must not be empty")

    def ids(self, tokenizer: Any) -> list[int]:
        """Return the ids of all end tokens.

        Raises:
            ConfigError: one of `texts` is not exactly one token.
        """
        end_ids = list(self.token_ids)
        for text in self.texts:
            ids = Tokens(tokenizer).encode_following(text)  # within a response
            if len(ids) != 1:
                raise ConfigError(
                    f"cut.texts={self.texts}: {text!r} must be one token, but the tokenizer encodes it as {ids}. "
                    "Choose another text, or set cut.token_ids"
                )
            end_ids += ids
        return end_ids


def cut_responses(cut: ResponseCut | None, data: SequenceSample, tokenizer: Any) -> Cut:
    """Cut each response after its first end mark.

    Args:
        cut: the settings; None keeps all tokens and needs no `prompt_mask`.
        data: batch with `input_ids` and `prompt_mask`.
        tokenizer: tokenizer that encodes `cut.texts`.
    """
    ids_T, cu_seqlens = data["input_ids"], data.cu_seqlens()
    if cut is None:
        return Cut(data, torch.ones_like(ids_T, dtype=torch.bool), torch.ones_like(cu_seqlens[1:], dtype=torch.bool))
    response_T = ~data["prompt_mask"]
    place_T = _count_before(response_T, cu_seqlens)
    ends_T = response_T & (place_T >= cut.after) & torch.isin(ids_T, torch.tensor(cut.ids(tokenizer)).to(ids_T.device))
    # Strictly before, so the end token itself remains.
    kept_T = _count_before(ends_T, cu_seqlens) == 0
    lengths = Lengths(data.lengths["input_ids"].counts, segment_sum(kept_T, cu_seqlens).long().cpu().numpy())
    keys = {name: data[name][kept_T] for name in ("input_ids", "prompt_mask")}
    remaining = SequenceSample(data.ids, keys, dict.fromkeys(keys, lengths), data.metadata)
    if cut.penalty is None:
        return Cut(remaining, kept_T, torch.ones_like(cu_seqlens[1:], dtype=torch.bool))
    return Cut(remaining, kept_T, segment_sum(ends_T, cu_seqlens) > 0, cut.penalty)


def reward_keys(dense: bool) -> frozenset[str]:
    """Return the keys that a reward interface writes."""
    return frozenset({"rewards", "dense_rewards"} if dense else {"rewards"})


def _count_before(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return [T] int64: how many earlier tokens of the same sequence are True in `mask_T`."""
    running_T = F.pad(mask_T.long().cumsum(0), (1, 0))
    return running_T[:-1] - running_T[cu_seqlens[:-1].long()][sequence_index(cu_seqlens)]
