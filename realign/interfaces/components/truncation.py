"""`Truncation`: treatment of responses that reached the length limit. `end_tokens`: where the others end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from typing_extensions import override

from realign.api import Model
from realign.errors import ConfigError, SettingsError
from realign.settings import Finite, NonNegative, NonNegativeInt, Settings


def overlong_penalty(lengths_S: Tensor, max_tokens: int, buffer: int, penalty: float) -> Tensor:
    """Compute the soft overlong penalty: 0 up to `max_tokens - buffer`, then linear down to `-penalty`.

    Source: arXiv:2503.14476 (eq. 13, where `penalty` is 1).

    Args:
        lengths_S: [S] sampled tokens of each response.
        max_tokens: length limit of a response, in tokens.
        buffer: number of tokens before the limit over which the penalty grows; from 1 to `max_tokens`.
        penalty: penalty of a response of `max_tokens`, in units of reward, >= 0.

    Returns:
        [S] fp32, to add to the scores; never positive.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(f"buffer must be from 1 to max_tokens={max_tokens}, found {buffer}")
    if not penalty >= 0:
        raise ValueError(f"penalty must be at least 0 (it is subtracted), found {penalty}")
    room_S = (max_tokens - buffer - lengths_S).clamp(-buffer, 0)
    return room_S.float() * (penalty / buffer)


class TruncatedReward(StrEnum):
    """The score of a response that ended at the length limit, without a stop token."""

    keep = "keep"
    """The score does not change."""
    zero = "zero"
    """The score becomes 0 (realhf's mask_no_eos_with_zero)."""
    add = "add"
    """`penalty` is added to the score (TRL's missing_eos_penalty subtracts a positive number)."""
    set = "set"
    """The score becomes `penalty`."""


@dataclass
class Truncation(Settings):
    """What to do with responses that hit the length limit (`truncated`); applied to shaped scores."""

    reward: TruncatedReward = TruncatedReward.keep
    """Score of a truncated response: keep it, set it to zero, add `penalty`, or set it to `penalty`."""
    penalty: Finite | None = None
    """Number that reward=add adds to the score (negative punishes), or that reward=set makes the score."""
    mask: bool = False
    """Drop truncated responses from the loss and its divisor (overlong filtering, arXiv:2503.14476)."""
    overlong_buffer: NonNegativeInt = 0
    """Let a penalty grow linearly over this many tokens before the length limit; 0: off (arXiv:2503.14476, eq. 13)."""
    overlong_penalty: NonNegative = 1.0
    """What to subtract from the score at the limit, a positive number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._uses_penalty and self.penalty is None:
            raise SettingsError(f"penalty=null: not valid with reward={self.reward.value}. Set penalty to a number")

    @override
    def ineffective(self) -> dict[str, str]:
        reasons = {}
        if self.mask:
            reasons["reward"] = "with mask=true, which excludes truncated responses. Set reward=keep"
        if not self._uses_penalty:
            reasons["penalty"] = f"with reward={self.reward.value}. Set reward=add or reward=set"
        if not self.overlong_buffer:
            reasons["overlong_penalty"] = "with overlong_buffer=0. Set overlong_buffer"
        return reasons

    @property
    def _uses_penalty(self) -> bool:
        return self.reward in (TruncatedReward.add, TruncatedReward.set)

    @property
    def changes_scores(self) -> bool:
        """Whether the score of a response depends on its length."""
        return self.reward is not TruncatedReward.keep or self.overlong_buffer > 0

    @property
    def reads_truncated(self) -> bool:
        """Whether `truncated` is needed."""
        return self.mask or self.reward is not TruncatedReward.keep

    def check(self, *, longest: int, baseline: bool) -> None:
        """Reject settings that do not fit the actor's.

        Args:
            longest: length limit of a response in tokens.
            baseline: whether scores have the score of another response subtracted.

        Raises:
            SettingsError: names the setting.
        """
        if self.overlong_buffer > longest:
            raise SettingsError(
                f"truncation.overlong_buffer={self.overlong_buffer}: must be at most "
                f"generation.max_new_tokens={longest}"
            )
        if baseline and self.changes_scores:
            raise SettingsError(
                "reward.baseline=greedy: truncation.reward and truncation.overlong_buffer change the scores of "
                "samples but not of the greedy response. Remove them, or set truncation.mask=true"
            )

    def needs(self) -> dict[str, str]:
        """Return keys that must be in the batch, with the setting that asks for each."""
        return {"truncated": "truncation"} if self.reads_truncated else {}

    def scores(self, scores_S: Tensor, truncated_S: Tensor | None, tokens_S: Tensor, max_tokens: int) -> Tensor:
        """Return [S] scores after the treatment.

        Args:
            scores_S: [S] shaped scores; NaN (no score) stays NaN.
            truncated_S: [S] bool; None only if `reads_truncated` is False.
            tokens_S: [S] sampled tokens.
            max_tokens: length limit of a response.
        """
        if truncated_S is not None and self.reward is not TruncatedReward.keep:
            penalty = 0.0 if self.penalty is None else self.penalty
            new_S = scores_S + penalty if self.reward is TruncatedReward.add else torch.full_like(scores_S, penalty)
            scores_S = torch.where(truncated_S & scores_S.isfinite(), new_S, scores_S)
        if self.overlong_buffer:
            scores_S = scores_S + overlong_penalty(tokens_S, max_tokens, self.overlong_buffer, self.overlong_penalty)
        return scores_S

    def keep_in_loss(self, valid_S: Tensor, truncated_S: Tensor | None) -> Tensor:
        """Return [S] bool: the responses of `valid_S` that stay in the loss."""
        return valid_S if truncated_S is None or not self.mask else valid_S & ~truncated_S

    def describe(self) -> str:
        """Return the treatment for the launch table; empty if there is none."""
        new = {TruncatedReward.zero: "score set to 0"}
        if self.penalty is not None:
            change = f"score {'raised' if self.penalty > 0 else 'lowered'} by {abs(self.penalty):g}"
            new |= {TruncatedReward.add: change, TruncatedReward.set: f"score set to {self.penalty:g}"}
        steps = [new[self.reward]] if self.reward in new else []
        steps += ["not in the loss"] if self.mask else []
        if self.overlong_buffer:
            steps.append(f"up to {self.overlong_penalty:g} less over the last {self.overlong_buffer:,} tokens")
        return ", ".join(steps)


def end_tokens(model: Model, ids_T: Tensor, stop_token_ids: Sequence[int] | None, setting: str) -> Tensor:
    """Return [T] bool: whether a token is one at which a sampler stops.

    Args:
        model: the model, whose end tokens count if `stop_token_ids` is None.
        ids_T: [T] token ids.
        stop_token_ids: `generation.stop_token_ids` of the sampler.
        setting: the setting that needs end tokens, for messages.

    Raises:
        ConfigError: neither the model nor its tokenizer has an end token.
    """
    if stop_token_ids is None:
        stop_token_ids = model.engine.capabilities().eos_token_ids
        if not stop_token_ids and (end := getattr(model.tokenizer, "eos_token_id", None)) is not None:
            stop_token_ids = (end,)
        if not stop_token_ids:
            why = "neither the model nor its tokenizer has an end token"
            raise ConfigError(f"{setting}: {why}. Set stop_token_ids, or remove this setting")
    return torch.isin(ids_T, torch.tensor(stop_token_ids, dtype=ids_T.dtype, device=ids_T.device))
