"""`Stream`: a rollout that sequences join and leave while it runs, and whose weights change.

Shapes: S sequences, B of them being decoded, N tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from realign.api.model import GenerationConfig
from realign.engines.sampling.kv_cache import KVCache
from realign.engines.sampling.slots import PREFILL_TOKENS, Responses, Rollout
from realign.engines.sampling.stopping import Stopping
from realign.engines.sampling.trunk import Trunk
from realign.functional.logprobs import LMHead


class Stream(Rollout):
    """A rollout that sequences join and leave, and that remembers which weights sampled what."""

    def __init__(
        self,
        trunk: Trunk,
        head: LMHead,
        config: GenerationConfig,
        stopping: Stopping,
        *,
        reach: int,
        version: int,
        max_slots: int | None = None,
    ) -> None:
        """Start without sequences.

        Args:
            trunk: see `Rollout`, also for the others.
            head: the last layer.
            config: how to sample.
            stopping: when a sequence ends.
            reach: positions for which the trunk was made.
            version: of the weights.
            max_slots: sequences decoded at once.
        """
        super().__init__(trunk, head, config, stopping, max_slots=max_slots)
        self.reach = reach
        """Positions for which the trunk was made."""
        self.version = version
        """Of the weights."""
        self.versions = torch.zeros(0, config.max_new_tokens, dtype=torch.int32, device=self.device)
        """[rows of `responses`, N]: right for tokens that were sampled."""
        self._free: list[int] = []
        self._texts: dict[int, Tensor] = {}
        self._freed = (0, 0)  # slots and length of the cache that `free_cache` freed

    def add(self, prompts: Sequence[Tensor], keys_S: Tensor) -> Tensor:
        """See `Rollout.add`."""
        sequences_S = super().add(prompts, keys_S)
        for i, sequence in enumerate(sequences_S.tolist()):
            self._texts[sequence] = prompts[i * len(prompts) // len(keys_S)]
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
        self._forget(sequences_S.tolist())
        return taken

    def _forget(self, sequences: list[int]) -> None:
        """Free their rows of `responses`."""
        self._free += sequences
        for sequence in sequences:
            del self._texts[sequence]

    def so_far(self, sequence: int) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of the tokens, log-probs and versions [N] of a sequence that has not ended."""
        row = self._row(sequence)
        count = 0 if row is None else int(self.rows[3, row])
        parts = (self.responses.tokens, self.responses.logprobs, self.versions)
        tokens_N, logprobs_N, versions_N = (x[sequence, :count].clone() for x in parts)
        return tokens_N, logprobs_N, versions_N

    def remove(self, sequence: int) -> None:
        """Drop a sequence that has not ended; its slot and its row of `responses` are free."""
        row = self._row(sequence)
        if row is not None:
            self._retire(torch.tensor([row], device=self.device))
        else:
            self._remove_waiting(sequence)
        self._forget([sequence])

    def _remove_waiting(self, sequence: int) -> None:
        prompt = next(p for p in self.waiting if sequence in p.sequences.tolist())
        stays = prompt.sequences != sequence
        prompt.sequences, prompt.keys = prompt.sequences[stays], prompt.keys[stays]
        self.n_waiting -= 1
        if not len(prompt.keys):
            self.waiting.remove(prompt)

    def _row(self, sequence: int) -> int | None:
        """Its row among those that are being decoded; None: it waits."""
        found = (self.rows[0, : self.active] == sequence).nonzero()
        return int(found[0]) if len(found) else None

    def free_cache(self) -> None:
        """Free the KV cache of all sequences; nothing may be decoded until `fill_cache`."""
        for prompt in self.waiting:
            prompt.read = None
        if self.cache is not None:
            self._freed = (self.cache.slots, self.cache.length)
            self.cache = None

    def fill_cache(self) -> None:
        """Allocate the KV cache that `free_cache` freed, and recompute what was in it."""
        if self.active:
            self._read_again()

    def update(self, trunk: Trunk, head: LMHead, version: int, *, recompute: bool) -> None:
        """Go on with other weights: those of `trunk` and `head`.

        Args:
            trunk: made for as many positions.
            head: of the same vocabulary.
            version: of the weights.
            recompute: read what was sampled so far anew; else its keys and values stay as they are. Ignored while the
                cache is freed: `fill_cache` reads everything.
        """
        self.trunk, self.head, self.version = trunk, head, version
        for prompt in self.waiting:
            prompt.read = None
        if not self.active:
            return
        sequences_B, counts_B = self.rows[0, : self.active], self.rows[3, : self.active]
        later_BN = torch.arange(self.versions.shape[1], device=self.device) >= counts_B[:, None]
        self.versions[sequences_B] = self.versions[sequences_B].masked_fill(later_BN, version)
        if recompute and self.cache is not None:
            self._read_again()

    def _read_again(self) -> None:
        """Fill the cache of all rows from prompts and responses, but for the newest token, which is not read yet."""
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
                if self.cache is None:
                    self.cache = KVCache(kv, *self._freed)
                self.cache.fill(row, row + 1, kv)
            first = last
