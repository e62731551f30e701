"""When a response ends before its length limit: stop tokens and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from realign.api.model import GenerationConfig

MARGIN = 8
"""Tokens decoded before the longest stop string could start: the first ones of a tail may decode to other text."""


class Stopping:
    """Decides which rows have ended. Lengths come from here alone; no mask is ever read off the tokens later.

    Under `fixed_length` nothing ends a response early: stop tokens are ordinary tokens.
    """

    def __init__(
        self,
        config: GenerationConfig,
        eos_token_ids: Sequence[int],
        tokenizer: Any,
        words: int,
        device: torch.device,
    ) -> None:
        """Choose the stop tokens: those of `config`, else `eos_token_ids`, among `words` tokens.

        Raises:
            ValueError: a stop token is not in the vocabulary, or stop strings come without a tokenizer or together
                with `fixed_length`.
        """
        chosen = eos_token_ids if config.stop_token_ids is None else config.stop_token_ids
        ids = [] if config.fixed_length else sorted(set(chosen))
        if outside := [i for i in ids if not 0 <= i < words]:
            raise ValueError(f"stop token {outside[0]} is not in the vocabulary, which has ids 0 to {words - 1}")
        if config.stop_strings and config.fixed_length:
            raise ValueError(
                f"generation.stop_strings {config.stop_strings} cannot end responses of fixed_length; remove one"
            )
        if config.stop_strings and tokenizer is None:
            raise ValueError(f"generation.stop_strings {config.stop_strings} need a tokenizer, and there is none")
        self.is_stop_V = torch.zeros(words, dtype=torch.bool, device=device)
        self.is_stop_V[ids] = True
        self._min_new = config.min_new_tokens if ids else 0
        self.strings = tuple(config.stop_strings)
        self._tokenizer = tokenizer
        self._tail = MARGIN + max((len(s.encode()) for s in self.strings), default=0)

    def blocked(self, counts_B: Tensor) -> Tensor | None:
        """[B, V] bool: tokens that may not be sampled by rows that have sampled `counts_B` so far; None if all may."""
        if self._min_new == 0:
            return None
        return (counts_B < self._min_new)[:, None] & self.is_stop_V

    def has_stop_string(self, tokens_BN: Tensor, counts_B: Tensor) -> Tensor:
        """[B] bool: whose response, the first `counts_B` of its tokens, holds a stop string; call it at every token.

        Only the ends are decoded: a token has at least one byte, so a stop string spans no more tokens than it has
        bytes. A hit is confirmed on the whole response, since an end that is decoded alone may read differently.
        """
        columns = counts_B[:, None] - torch.arange(self._tail, 0, -1, device=counts_B.device)
        tails = tokens_BN.gather(1, columns.clamp_(min=0)).tolist()
        hits = [
            self._contains(tail[-count:]) and (count <= self._tail or self._contains(tokens_BN[row, :count].tolist()))
            for row, (tail, count) in enumerate(zip(tails, counts_B.tolist(), strict=True))
        ]
        return torch.tensor(hits, device=counts_B.device)

    def _contains(self, tokens: list[int]) -> bool:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(s in text for s in self.strings)
