"""`Stream`: a rollout whose sequences can be added and removed while it runs, and whose weights can change.

Shapes: S sequences, B of them being decoded, N tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from realign.api.generation import GenerationConfig
from realign.engines.network.images import PromptInput, followed_by
from realign.engines.sampling.decoder import Decoder
from realign.engines.sampling.resources import RolloutResources
from realign.engines.sampling.responses import Responses
from realign.engines.sampling.slots import Rollout
from realign.engines.sampling.stopping import Stopping
from realign.engines.sampling.waiting import PREFILL_TOKENS
from realign.functional.logprobs import LMHead


class Taken(NamedTuple):
    """Finished sequences, in the order of the call."""

    responses: Responses
    versions_SN: Tensor
    """Policy version of each sampled token."""
    experts: list[Tensor]
    """See `ExpertRecord.of`; empty if the rollout does not record experts."""


class Stream(Rollout):
    """A rollout that accepts and releases sequences at any time, and records the policy version of every token."""

    def __init__(
        self,
        decoder: Decoder,
        head: LMHead,
        config: GenerationConfig,
        stopping: Stopping,
        resources: RolloutResources,
        *,
        reach: int,
        version: int,
    ) -> None:
        """Start without sequences.

        Args:
            decoder: layers of the model, see `Rollout`.
            head: last layer of the model.
            config: sampling settings.
            stopping: stop conditions.
            resources: settings of the sampler, and the memory for the KV cache, see `Rollout`.
            reach: positions that the decoder supports.
            version: policy version of the weights.
        """
        super().__init__(decoder, head, config, stopping, resources)
        self.reach = reach
        """Positions that the decoder supports."""
        self.version = version
        """Policy version of the weights."""
        self.versions = torch.zeros(0, config.max_new_tokens, dtype=torch.int32, device=self.device)
        """[rows of `responses`, N] int32: policy version of each sampled token; other entries are undefined."""
        self._free: list[int] = []
        self._texts: dict[int, PromptInput] = {}
        self._freed = (0, 0)  # slots and length of the freed cache

    def add(self, prompts: Sequence[PromptInput], keys_S: Tensor) -> Tensor:
        """See `Rollout.add`."""
        sequences_S = super().add(prompts, keys_S)
        for i, sequence in enumerate(sequences_S.tolist()):
            self._texts[sequence] = prompts[i * len(prompts) // len(keys_S)]
        return sequences_S

    def _new_rows(self, count: int) -> Tensor:
        """Return free rows of `responses`, reusing released rows before adding new ones."""
        again, self._free = self._free[:count], self._free[count:]
        new = super()._new_rows(count - len(again))
        self.versions = torch.cat([self.versions, self.versions.new_zeros(len(new), self.versions.shape[1])])
        return torch.cat([torch.tensor(again, dtype=torch.int64, device=self.device), new])

    def _begun(self, sequences: Tensor) -> None:
        self.versions[sequences] = self.version

    def take(self, sequences_S: Tensor) -> Taken:
        """Return finished sequences, and release their rows."""
        responses = Responses(*(x[sequences_S] for x in self.responses))
        experts: list[Tensor] = []
        if self.experts is not None:
            experts = self.experts.of(sequences_S.tolist(), responses.lengths.tolist())
        taken = Taken(responses, self.versions[sequences_S], experts)
        self._forget(sequences_S.tolist())
        return taken

    def _forget(self, sequences: list[int]) -> None:
        """Release rows of `responses`."""
        self._free += sequences
        if self.experts is not None:
            self.experts.forget(sequences)
        for sequence in sequences:
            del self._texts[sequence]

    def so_far(self, sequence: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return copies of the tokens, log-probs and versions [N] of an unfinished sequence."""
        row = self._row(sequence)
        count = 0 if row is None else int(self.rows[3, row])
        parts = (self.responses.tokens, self.responses.logprobs, self.versions)
        tokens_N, logprobs_N, versions_N = (x[sequence, :count].clone() for x in parts)
        return tokens_N, logprobs_N, versions_N

    def remove(self, sequence: int) -> None:
        """Drop an unfinished sequence; release its slot and its row of `responses`."""
        row = self._row(sequence)
        if row is not None:
            self._retire(torch.tensor([row], device=self.device))
        else:
            self.waiting.remove(sequence)
        self._forget([sequence])

    def _row(self, sequence: int) -> int | None:
        """Return the slot of a sequence that is being decoded; None if it waits."""
        found = (self.rows[0, : self.active] == sequence).nonzero()
        return int(found[0]) if len(found) else None

    def free_cache(self) -> None:
        """Free the KV cache of all sequences. Decoding is not allowed until `fill_cache`."""
        self.waiting.forget_prefills()
        if self.cache is not None:
            self._freed = (self.cache.slots, self.cache.length)
            self.release()

    def fill_cache(self) -> None:
        """Allocate the KV cache that `free_cache` freed, and recompute its contents."""
        if self.active:
            self._read_again()

    def update(self, decoder: Decoder, head: LMHead, version: int, *, recompute: bool) -> None:
        """Continue with new weights, those of `decoder` and `head`.

        Args:
            decoder: new layers, for the same number of positions.
            head: new last layer, for the same vocabulary.
            version: policy version of the new weights.
            recompute: whether to recompute the KV cache under the new weights; if False, old keys and values are
                kept. Ignored while the cache is freed, since `fill_cache` recomputes everything.
        """
        self.decoder, self.head, self.version = decoder, head, version
        self.waiting.forget_prefills()
        if not self.active:
            return
        sequences_B, counts_B = self.rows[0, : self.active], self.rows[3, : self.active]
        later_BN = torch.arange(self.versions.shape[1], device=self.device) >= counts_B[:, None]
        self.versions[sequences_B] = self.versions[sequences_B].masked_fill(later_BN, version)
        if recompute and self.cache is not None:
            self._read_again()

    def _read_again(self) -> None:
        """Recompute the KV cache of all rows from prompts and responses.

        The newest token of each row is excluded, since the next decode step writes it.
        """
        sequences, counts = self.rows[0, : self.active].tolist(), self.rows[3, : self.active].tolist()
        texts = [
            followed_by(self._texts[sequence], self.responses.tokens[sequence, : count - 1])
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        first = 0
        while first < len(texts):
            last, total = first + 1, len(texts[first])
            while last < len(texts) and total + len(texts[last]) <= PREFILL_TOKENS:
                total += len(texts[last])
                last += 1
            _, states = self.decoder.prefill(texts[first:last])
            for row, state in enumerate(states, first):
                if self.cache is None:
                    self.cache = self.decoder.new_cache(state, *self._freed, self.resources.memory)
                self.cache.fill(row, row + 1, state)
            first = last
