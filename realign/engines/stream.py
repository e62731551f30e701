"""`Stream`: a rollout that sequences join and leave while it runs, and whose weights change.

Shapes: S sequences, B of them being decoded, N tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from realign.api.model import GenerationConfig
from realign.engines.decoding import PREFILL_TOKENS, Responses, Rollout
from realign.engines.stopping import Stopping
from realign.engines.trunk import Trunk
from realign.functional.logprobs import LMHead


class Stream(Rollout):
    """A rollout that sequences join and leave, and that remembers which weights sampled what."""

    def __init__(
        self, trunk: Trunk, head: LMHead, config: GenerationConfig, stopping: Stopping, *, reach: int, version: int
    ) -> None:
        super().__init__(trunk, head, config, stopping)
        self.reach = reach
        """Positions for which the trunk was made."""
        self.version = version
        """Of the weights."""
        self.versions = torch.zeros(0, config.max_new_tokens, dtype=torch.int32, device=self.device)
        """[rows of `responses`, N]: right for tokens that were sampled."""
        self._free: list[int] = []
        self._texts: dict[int, Tensor] = {}

    def add(self, prompts: Sequence[Tensor], keys_S: Tensor) -> Tensor:
        """See `Rollout.add`."""
        sequences_S = super().add(prompts, keys_S)
        for i, sequence in enumerate(sequences_S.tolist()):
            self._texts[sequence] = prompts[i // self.config.n]
        return sequences_S

    def _new_rows(self, count: int) -> Tensor:
        """Rows of responses that were taken, and further ones."""
        again, self._free = self._free[:count], self._free[count:]
        new = super()._new_rows(count - len(again))
        self.versions = torch.cat([self.versions, self.versions.new_zeros(len(new), self.versions.shape[1])])
        return torch.cat([torch.tensor(again, dtype=torch.int64, device=self.device), new])

    def _begun(self, sequences: Tensor) -> None:
        self.versions[sequences] = self.version

    def take(self, sequences_S: Tensor) -> tuple[Responses, Tensor]:
        """Responses and versions [S, N] of sequences that have ended; their rows are free."""
        taken = Responses(*(x[sequences_S] for x in self.responses)), self.versions[sequences_S]
        self._free += sequences_S.tolist()
        for sequence in sequences_S.tolist():
            del self._texts[sequence]
        return taken

    def update(self, trunk: Trunk, head: LMHead, version: int, *, recompute: bool) -> None:
        """Go on with other weights: those of `trunk` and `head`.

        Args:
            trunk: made for as many positions.
            head: of the same vocabulary.
            version: of the weights.
            recompute: read what was sampled so far anew; else its keys and values stay as they are.
        """
        self.trunk, self.head, self.version = trunk, head, version
        for prompt in self.waiting:
            prompt.read = None
        if not self.active:
            return
        sequences_B, counts_B = self.rows[0, : self.active], self.rows[3, : self.active]
        later_BN = torch.arange(self.versions.shape[1], device=self.device) >= counts_B[:, None]
        self.versions[sequences_B] = self.versions[sequences_B].masked_fill(later_BN, version)
        if recompute:
            self._read_again()

    def _read_again(self) -> None:
        """Fill the cache of all rows from prompts and responses, but for the newest token, which is not read yet."""
        assert self.cache is not None
        sequences, counts = self.rows[0, : self.active].tolist(), self.rows[3, : self.active].tolist()
        texts = [
            torch.cat([self._texts[sequence], self.responses.tokens[sequence, : count - 1]])
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        first = 0
        while first < len(texts):
            last, total = first + 1, len(texts[first])
            while last < len(texts) and total + len(texts[last]) <= PREFILL_TOKENS:
                total += len(texts[last])
                last += 1
            _, context, lengths = self._read(texts[first:last])
            for row, kv in enumerate(context.per_sequence(lengths), first):
                self.cache.fill(row, row + 1, kv)
            first = last
