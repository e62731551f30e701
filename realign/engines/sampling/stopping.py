"""Stop conditions other than the length limit: stop tokens and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from realign.api.generation import GenerationConfig
from realign.errors import ConfigError

MARGIN = 8
"""Extra tokens decoded before a possible stop string, since the first tokens of a tail may decode differently."""


class Stopping:
    """Decides which rows have ended. Response lengths come only from here; masks are never inferred from token ids.

    With `fixed_length`, no response ends early, and stop tokens are ordinary tokens.
    """

    def __init__(
        self,
        config: GenerationConfig,
        eos_token_ids: Sequence[int],
        tokenizer: Any,
        words: int,
        device: torch.device,
    ) -> None:
        """Select the stop tokens, from `config` or else from `eos_token_ids`; `words` is the vocabulary size.

        Raises:
            ConfigError: a stop token is not in the vocabulary; stop strings have no tokenizer; or stop strings are
                combined with `fixed_length`.
        """
        chosen = eos_token_ids if config.stop_token_ids is None else config.stop_token_ids
        ids = [] if config.fixed_length else sorted(set(chosen))
        if outside := [i for i in ids if not 0 <= i < words]:
            raise ConfigError(
                f"stop token {outside[0]} is not in the vocabulary (0 to {words - 1}). Change "
                "generation.stop_token_ids, or the end tokens of the model folder."
            )
        if config.stop_strings and config.fixed_length:
            raise ConfigError(
                f"generation.stop_strings={config.stop_strings}: incompatible with fixed_length. Remove one of the two."
            )
        if config.stop_strings and tokenizer is None:
            raise ConfigError(f"generation.stop_strings={config.stop_strings}: no tokenizer. Use stop_token_ids.")
        self.is_stop_V = torch.zeros(words, dtype=torch.bool, device=device)
        self.is_stop_V[ids] = True
        self._min_new = config.min_new_tokens if ids else 0
        self.strings = tuple(config.stop_strings)
        self._tokenizer = tokenizer
        self._tail = MARGIN + max((len(s.encode()) for s in self.strings), default=0)

    def blocked(self, counts_B: Tensor) -> Tensor | None:
        """Return the tokens that rows with `counts_B` tokens must not sample, [B, V] bool; None if all are
        allowed.
        """
        if self._min_new == 0:
            return None
        return (counts_B < self._min_new)[:, None] & self.is_stop_V

    def has_stop_string(self, tokens_BN: Tensor, counts_B: Tensor) -> Tensor:
        """Return [B] bool: whether the first `counts_B` tokens of a row contain a stop string. Call it at every
        token.

        Only the tail of a response is decoded. A token has at least one byte, so a stop string spans at most as many
        tokens as it has bytes. A match is confirmed on the whole response, since a tail may decode differently by
        itself.
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
