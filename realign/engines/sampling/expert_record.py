"""`ExpertRecord`: the experts that the routers of a mixture of experts chose for the tokens of a rollout.

The choice for a token is recorded when the model reads the token for the first time. Later passes over it, such as
those that recompute the KV cache after a weight update, do not change the record.

Shapes: S sequences, N tokens of the longest response, P tokens of a prompt, W experts of all routers per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from realign.api.router_experts import UNKNOWN

DTYPE = torch.int16


class ExpertRecord:
    """The choices of all sequences of a rollout."""

    def __init__(self, width: int, tokens: int, device: torch.device) -> None:
        """Start without sequences.

        Args:
            width: number of experts of all routers per token.
            tokens: maximum number of tokens of a response.
            device: device of the rollout.
        """
        self._responses_SNW = torch.empty(0, tokens, width, dtype=DTYPE, device=device)
        self._prompts: dict[int, Tensor] = {}

    def grow(self, count: int) -> None:
        """Add rows for more sequences."""
        _, tokens, width = self._responses_SNW.shape
        self._responses_SNW = torch.cat([self._responses_SNW, self._responses_SNW.new_empty(count, tokens, width)])

    def begin(self, sequences: Iterable[int], prompt_PW: Tensor) -> None:
        """Set the choices for the prompt of sequences that start."""
        self._prompts |= dict.fromkeys(sequences, prompt_PW)

    def add(self, cells_B: Tensor, chosen_BW: Tensor) -> None:
        """Set the choices for one token in each of B rows; `cells_B` are indices into the flattened [S * N]."""
        self._responses_SNW.view(-1, chosen_BW.shape[1]).index_copy_(0, cells_B, chosen_BW)

    def of(self, sequences: Sequence[int], lengths: Sequence[int]) -> list[Tensor]:
        """Return the choices of ended sequences, [P + length, W] each. That for the last token is unknown."""
        found = []
        for sequence, length in zip(sequences, lengths, strict=True):
            response_NW = self._responses_SNW[sequence, :length].clone()
            response_NW[-1:] = UNKNOWN
            found.append(torch.cat([self._prompts[sequence], response_NW]))
        return found

    def forget(self, sequences: Iterable[int]) -> None:
        """Free the choices for the prompts of sequences whose rows are released."""
        for sequence in sequences:
            self._prompts.pop(sequence, None)


__all__ = ["DTYPE", "ExpertRecord"]
