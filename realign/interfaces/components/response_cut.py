"""`ResponseCut`: rewards that judge a response only up to its first end mark, such as the end of a sentence.

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
from realign.errors import SettingsError
from realign.functional import broadcast_to_tokens, segment_sum, sequence_index
from realign.settings import Finite, NonNegativeInt, Settings


class Cut(NamedTuple):
    """What remains of a batch."""

    data: SequenceSample
    """`input_ids` and `prompt_mask` of what remains, and the metadata."""
    kept_T: Tensor
    """bool: the token of the whole batch remains."""
    judged_S: Tensor
    """bool: the text of the response counts; where not, `penalty` does."""
    penalty: float = 0.0

    def rewards(self, rewards_S: Tensor) -> Tensor:
        """[S] these rewards, or the penalty."""
        return torch.where(self.judged_S, rewards_S, self.penalty)

    def dense_rewards(self, rewards_T: Tensor, whole: SequenceSample) -> Tensor:
        """[T] these rewards of the tokens that remain, in their places; 0 off judged responses and at given tokens."""
        response_T = ~whole["prompt_mask"] & broadcast_to_tokens(self.judged_S, whole.cu_seqlens())
        spread_T = rewards_T.new_zeros(len(response_T)).masked_scatter(self.kept_T, rewards_T)
        return torch.where(response_T, spread_T, 0)


@dataclass
class ResponseCut(Settings):
    """Cut a response after the first of some tokens; the token itself stays."""

    token_ids: list[int] = field(default_factory=list)
    """Ids of the tokens that end a response."""
    texts: list[str] = field(default_factory=list)
    """The same as text; each must be exactly one token of the tokenizer."""
    after: NonNegativeInt = 0
    """Place in the response (tokens, the first is 0) from which on such a token counts."""
    penalty: Finite | None = None
    """Reward of a response without such a token, in place of its own, not added to it; null: judge it as a whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.token_ids and not self.texts:
            raise SettingsError("token_ids and texts are both empty; give at least one end mark")
        if min(self.token_ids, default=0) < 0:
            raise SettingsError(f"token_ids={self.token_ids}: token ids must be at least 0")
        if "" in self.texts:
            raise SettingsError(f"texts={self.texts}: contains an empty text")

    def ids(self, tokenizer: Any) -> list[int]:
        """The tokens that end a response.

        Raises:
            ValueError: one of `texts` is not exactly one token.
        """
        found = list(self.token_ids)
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) != 1:
                raise ValueError(f"cut.texts: {text!r} must be one token, found {len(ids)}: {list(ids)}")
            found += ids
        return found


def cut_responses(cut: ResponseCut | None, data: SequenceSample, tokenizer: Any) -> Cut:
    """Cut each response (the tokens that were not given) after its first end mark.

    Args:
        cut: how; None keeps everything, and `prompt_mask` is not asked for.
        data: with `input_ids` and `prompt_mask`.
        tokenizer: for `cut.texts`.
    """
    ids_T, cu_seqlens = data["input_ids"], data.cu_seqlens()
    if cut is None:
        return Cut(data, torch.ones_like(ids_T, dtype=torch.bool), torch.ones_like(cu_seqlens[1:], dtype=torch.bool))
    response_T = ~data["prompt_mask"]
    place_T = _count_before(response_T, cu_seqlens)
    ends_T = response_T & (place_T >= cut.after) & torch.isin(ids_T, torch.tensor(cut.ids(tokenizer)).to(ids_T.device))
    kept_T = _count_before(ends_T, cu_seqlens) == 0
    lengths = Lengths(data.lengths["input_ids"].counts, segment_sum(kept_T, cu_seqlens).long().cpu().numpy())
    keys = {name: data[name][kept_T] for name in ("input_ids", "prompt_mask")}
    remaining = SequenceSample(data.ids, keys, dict.fromkeys(keys, lengths), data.metadata)
    if cut.penalty is None:
        return Cut(remaining, kept_T, torch.ones_like(cu_seqlens[1:], dtype=torch.bool))
    return Cut(remaining, kept_T, segment_sum(ends_T, cu_seqlens) > 0, cut.penalty)


def reward_keys(dense: bool) -> frozenset[str]:
    """The keys that a reward writes."""
    return frozenset({"rewards", "dense_rewards"} if dense else {"rewards"})


def _count_before(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] int64: how many of the tokens before this one, in its sequence, the mask holds."""
    running_T = F.pad(mask_T.long().cumsum(0), (1, 0))
    return running_T[:-1] - running_T[cu_seqlens[:-1].long()][sequence_index(cu_seqlens)]
