"""The decoding loop: sequences enter slots of a static cache, get a token per step, and leave when they end.

Shapes: S sequences (responses), B of them being decoded, N tokens of the longest response, T packed prompt tokens,
H hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from realign.api.model import GenerationConfig
from realign.engines.kv_cache import DecodeContext, KeyValues, KVCache, PrefillContext, bytes_per_slot
from realign.engines.sampling import sample
from realign.engines.stopping import Stopping
from realign.engines.trunk import Trunk
from realign.functional.logprobs import LMHead
from realign.functional.packed import cu_seqlens_of, position_ids

CACHE_BYTES = 2**30
"""Memory for keys and values when the number of slots is not given."""

PREFILL_TOKENS = 2**13
"""Prompt tokens read in one forward pass (a longer prompt is read alone)."""

LOGIT_ELEMENTS = 2**26
"""Logits made at once while sampling: 256 MiB in fp32."""


class Responses(NamedTuple):
    """Response s in row s, from column 0; S = n for each prompt, prompt after prompt."""

    tokens: Tensor
    """[S, N] int64."""
    logprobs: Tensor
    """[S, N] fp32, 0 behind the end."""
    lengths: Tensor
    """[S] int64."""
    truncated: Tensor
    """[S] bool."""


class _Prefilled(NamedTuple):
    """A prompt that was read."""

    kv: KeyValues
    hidden_H: Tensor
    """Hidden state at its last token, from which the first response tokens are drawn."""


class Rollout:
    """The state of one call. Rows 0 to `active` are being decoded, row b in slot b; sequences wait in their order."""

    def __init__(
        self,
        trunk: Trunk,
        head: LMHead,
        prompts: list[Tensor],
        config: GenerationConfig,
        seed: int,
        stopping: Stopping,
    ) -> None:
        self.trunk = trunk
        self.head = head
        self.prompts = prompts
        self.config = config
        self.stopping = stopping
        self.device = head.weight_VH.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        n_sequences = len(prompts) * config.n
        self.responses = Responses(
            torch.zeros(n_sequences, config.max_new_tokens, dtype=torch.int64, device=self.device),
            torch.zeros(n_sequences, config.max_new_tokens, device=self.device),
            torch.zeros(n_sequences, dtype=torch.int64, device=self.device),
            torch.zeros(n_sequences, dtype=torch.bool, device=self.device),
        )
        self.slots = min(n_sequences, config.max_slots or n_sequences)
        self.cache: KVCache | None = None
        self.prefilled: dict[int, _Prefilled] = {}
        self.next_sequence = 0
        self.active = 0
        self.longest = 0
        # Of each row: its sequence, its newest token, that token's position, how many tokens were sampled, and the cell
        # of `responses` (seen as one row) for the next one.
        self.rows = torch.zeros(5, self.slots, dtype=torch.int64, device=self.device)

    def run(self) -> Responses:
        """Decode until no sequence waits and none is active."""
        while self.next_sequence < len(self.responses.lengths) or self.active:
            if self._should_admit():
                self._admit()
            else:
                self._step()
        return self.responses

    def _should_admit(self) -> bool:
        """Admit several sequences together, since reading one prompt costs about as much as a step for all rows."""
        waiting = len(self.responses.lengths) - self.next_sequence
        return self.slots - self.active >= min(waiting, max(1, self.slots // 8)) and waiting > 0

    def _admit(self) -> None:
        """Give free slots to waiting sequences: copy their prompts' keys and values, draw their first tokens."""
        n, first, start = self.config.n, self.next_sequence, self.active
        self._prefill(first, first + self.slots - start)
        cache = self._cache()
        last = min(first + self.slots - start, (max(self.prefilled) + 1) * n)
        hidden = []
        for prompt in range(first // n, (last - 1) // n + 1):
            read, length = self.prefilled[prompt], len(self.prompts[prompt])
            begin = start + max(first, prompt * n) - first
            end = start + min(last, (prompt + 1) * n) - first
            cache.fill(begin, end, read.kv)
            self.rows[2, begin:end] = length - 1
            self.longest = max(self.longest, length)
            hidden.append(read.hidden_H.expand(end - begin, -1))
            if last >= (prompt + 1) * n:
                del self.prefilled[prompt]
        self.next_sequence, self.active = last, start + last - first
        sequences = torch.arange(first, last, device=self.device)
        self.rows[0, start : self.active] = sequences
        self.rows[3, start : self.active] = 0
        self.rows[4, start : self.active] = sequences * self.config.max_new_tokens
        self._record(torch.cat(hidden), start)

    def _prefill(self, first: int, last: int) -> None:
        """Read the prompts of the sequences from `first` to before `last`, or the first of them that fit one pass."""
        new: list[int] = []
        total = 0
        end = min((last - 1) // self.config.n + 1, len(self.prompts))
        for prompt in range(first // self.config.n, end):
            if prompt in self.prefilled:
                continue
            total += len(self.prompts[prompt])
            if new and total > PREFILL_TOKENS:
                break
            new.append(prompt)
        if not new:
            return
        lengths = [len(self.prompts[p]) for p in new]
        cu_seqlens = cu_seqlens_of(lengths).to(self.device)
        context = PrefillContext(cu_seqlens, lengths=lengths)
        ids_T = torch.cat([self.prompts[p] for p in new])
        hidden_TH = self.trunk(ids_T, position_ids(cu_seqlens), context)
        last_hidden = hidden_TH[cu_seqlens[1:].long() - 1]
        for prompt, kv, hidden_H in zip(new, context.per_sequence(lengths), last_hidden, strict=True):
            self.prefilled[prompt] = _Prefilled(kv, hidden_H)

    def _cache(self) -> KVCache:
        """The cache, made once a prompt has shown what a layer keeps; unless they are given, that sets the slots."""
        if self.cache is None:
            like = next(iter(self.prefilled.values())).kv
            length = max(map(len, self.prompts)) + self.config.max_new_tokens
            if self.config.max_slots is None:
                self.slots = max(1, min(self.slots, CACHE_BYTES // bytes_per_slot(like, length)))
            self.cache = KVCache(like, self.slots, length)
        return self.cache

    def _step(self) -> None:
        """Feed the newest token of every row, and draw the next one."""
        assert self.cache is not None
        tokens_B, positions_B = self.rows[1, : self.active], self.rows[2, : self.active]
        waiting = self.next_sequence < len(self.responses.lengths)
        self.cache.reach(self.longest + 1, None if waiting else self.active)
        hidden_BH = self.trunk(tokens_B, positions_B, DecodeContext(self.cache, positions_B, self.longest))
        self.longest += 1
        self._record(hidden_BH, 0)

    def _record(self, hidden_BH: Tensor, first: int) -> None:
        """Draw a token for the rows from `first` on, write it down, and retire the rows that end with it."""
        rows = self.rows[:, first : self.active]
        sequences_B, tokens_B, _, counts_B, cells_B = rows
        drawn_B, logprobs_B = self._draw(hidden_BH, counts_B)
        self.responses.tokens.view(-1).index_copy_(0, cells_B, drawn_B)
        self.responses.logprobs.view(-1).index_copy_(0, cells_B, logprobs_B)
        tokens_B.copy_(drawn_B)
        rows[2:].add_(1)
        ended_B = self.stopping.is_stop_V[drawn_B]
        if self.stopping.strings:
            ended_B = ended_B | self.stopping.has_stop_string(self.responses.tokens[sequences_B], counts_B)
        done = (ended_B | (counts_B >= self.config.max_new_tokens)).nonzero()[:, 0]
        if len(done):
            sequences = sequences_B[done]
            self.responses.lengths[sequences] = counts_B[done]
            if not self.config.fixed_length:
                self.responses.truncated[sequences] = ~ended_B[done]
            self._retire(done + first)

    def _draw(self, hidden_BH: Tensor, counts_B: Tensor) -> tuple[Tensor, Tensor]:
        rows = max(1, LOGIT_ELEMENTS // len(self.head.weight_VH))
        parts = [
            sample(self.head.logits(h), self.config, self.generator, blocked_NV=self.stopping.blocked(c))
            for h, c in zip(hidden_BH.split(rows), counts_B.split(rows), strict=True)
        ]
        return parts[0] if len(parts) == 1 else (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))

    def _retire(self, done: Tensor) -> None:
        """Free the rows `done`: the last active rows move into the gaps that they leave."""
        assert self.cache is not None
        left = self.active - len(done)
        stays = torch.ones(self.active, dtype=torch.bool, device=self.device)
        stays[done] = False
        gaps, movers = done[done < left], stays[left:].nonzero()[:, 0] + left
        if len(gaps):
            self.rows[:, gaps] = self.rows[:, movers]
            self.cache.move(movers, gaps, self.longest)
        self.active = left
        self.longest = int(self.rows[2, :left].max()) if left else 0
