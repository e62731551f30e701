"""The decoding loop: sequences enter slots of a static cache, get a token per step, and leave when they end.

Shapes: S sequences (responses, n to each prompt), B of them being decoded, N tokens of the longest response, T packed
prompt tokens, H hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from realign.api.model import GenerationConfig
from realign.engines.sampling.counter_rng import uniforms
from realign.engines.sampling.draw import sample
from realign.engines.sampling.kv_cache import DecodeContext, KeyValues, KVCache, PrefillContext, bytes_per_slot
from realign.engines.sampling.stopping import Stopping
from realign.engines.sampling.trunk import Trunk
from realign.functional.logprobs import LMHead
from realign.functional.packed import cu_seqlens_of, position_ids

CACHE_BYTES = 2**30
"""Memory for keys and values when the number of slots is not given."""

PREFILL_TOKENS = 2**13
"""Prompt tokens read in one forward pass (a longer prompt is read alone)."""

LOGIT_ELEMENTS = 2**26
"""Logits made at once while sampling: 256 MiB in fp32."""

AT_ONCE = 16
"""Random numbers made at once for each row."""

_NUMBERS = 6
"""Where they stand in `Rollout.rows`."""


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


@dataclass(eq=False)
class _Prompt:
    """A prompt of which not all responses have begun."""

    ids: Tensor
    sequences: Tensor
    """[n] the rows of `Rollout.responses` for its responses that have not begun."""
    keys: Tensor
    """[n] of their random numbers."""
    read: _Prefilled | None = None


class Rollout:
    """Sequences in slots, all sampled by one config. Rows 0 to `active` are being decoded, row b in slot b.

    Others wait in the order in which they were added, which may be at any time.
    """

    def __init__(
        self,
        trunk: Trunk,
        head: LMHead,
        config: GenerationConfig,
        stopping: Stopping,
        *,
        max_slots: int | None = None,
    ) -> None:
        """Start without sequences.

        Args:
            trunk: the layers.
            head: the last layer.
            config: how to sample.
            stopping: when a sequence ends.
            max_slots: sequences decoded at once; None: as many as fit `CACHE_BYTES`.
        """
        self.trunk = trunk
        self.head = head
        self.config = config
        self.stopping = stopping
        self.device = head.weight_VH.device
        self.responses = _no_responses(0, config.max_new_tokens, self.device)
        self.waiting: deque[_Prompt] = deque()
        self.n_waiting = 0
        self.active = 0
        self.slots = 0
        self.max_slots = max_slots
        self.most_slots = max_slots
        self.longest_prompt = 0
        self.finished: list[Tensor] = []
        """Sequences that ended: rows of `responses`."""
        self.cache: KVCache | None = None
        self.longest = 0
        # Of each row: its sequence, its newest token, that token's position, how many tokens were sampled, the cell of
        # `responses` (seen as one row) for the next one, the key of its random numbers, and some of them (fp64 bits).
        self.rows = torch.zeros(_NUMBERS + AT_ONCE, 0, dtype=torch.int64, device=self.device)
        self.numbers_used = AT_ONCE

    def add(self, prompts: Sequence[Tensor], keys_S: Tensor) -> Tensor:
        """Let responses to prompts wait for slots, equally many to each.

        Args:
            prompts: ids, on the device of the head.
            keys_S: see `noise.response_keys`; those of the first prompt come first.

        Returns:
            [S] the rows of `responses` in which they will stand.
        """
        n, keys_S = len(keys_S) // max(1, len(prompts)), keys_S.to(self.device)
        sequences_S = self._new_rows(len(keys_S))
        for i, ids in enumerate(prompts):
            part = slice(i * n, (i + 1) * n)
            self.waiting.append(_Prompt(ids, sequences_S[part], keys_S[part]))
        self.n_waiting += len(keys_S)
        self.longest_prompt = max(self.longest_prompt, *map(len, prompts), 0)
        self.slots = max(self.slots, min(self.active + self.n_waiting, self.most_slots or self.active + self.n_waiting))
        return sequences_S

    def _new_rows(self, count: int) -> Tensor:
        """Further rows of `responses`."""
        first = len(self.responses.lengths)
        more = _no_responses(count, self.config.max_new_tokens, self.device)
        self.responses = Responses(*(torch.cat(pair) for pair in zip(self.responses, more, strict=True)))
        return torch.arange(first, first + count, device=self.device)

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or is being decoded."""
        return self.n_waiting > 0 or self.active > 0

    def run(self) -> Responses:
        """Decode until no sequence waits and none is active."""
        while self.busy:
            self.advance()
        return self.responses

    def advance(self) -> None:
        """Let some waiting sequences begin, or draw a token for each that has begun."""
        if self._should_admit():
            self._admit()
        else:
            self._step()

    def _should_admit(self) -> bool:
        """Admit several sequences together, since reading one prompt costs about as much as a step for all rows."""
        return self.slots - self.active >= min(self.n_waiting, max(1, self.slots // 8)) and self.n_waiting > 0

    def _admit(self) -> None:
        """Give free slots to waiting sequences: copy their prompts' keys and values, draw their first tokens."""
        self._prefill(self.slots - self.active)
        cache = self._cache()
        start, hidden, sequences, keys = self.active, [], [], []
        while self.active < self.slots and self.waiting and (read := self.waiting[0].read) is not None:
            prompt = self.waiting[0]
            count, length = min(self.slots - self.active, len(prompt.keys)), len(prompt.ids)
            cache.fill(self.active, self.active + count, read.kv)
            self.rows[2, self.active : self.active + count] = length - 1
            self.longest = max(self.longest, length)
            hidden.append(read.hidden_H.expand(count, -1))
            sequences.append(prompt.sequences[:count])
            keys.append(prompt.keys[:count])
            prompt.sequences, prompt.keys = prompt.sequences[count:], prompt.keys[count:]
            if not len(prompt.keys):
                self.waiting.popleft()
            self.active += count
        self.n_waiting -= self.active - start
        rows = self.rows[:, start : self.active]
        rows[0] = torch.cat(sequences)
        rows[3] = 0
        rows[4] = rows[0] * self.config.max_new_tokens
        rows[5] = torch.cat(keys)
        self.numbers_used = AT_ONCE
        self._begun(rows[0])
        self._record(torch.cat(hidden), start)

    def _begun(self, sequences: Tensor) -> None:
        """These sequences have slots now."""

    def _prefill(self, wanted: int) -> None:
        """Read the prompts of the next `wanted` sequences, or the first of them that fit one pass."""
        new: list[_Prompt] = []
        total = 0
        for prompt in self.waiting:
            if wanted <= 0:
                break
            wanted -= len(prompt.keys)
            if prompt.read is not None:
                continue
            total += len(prompt.ids)
            if new and total > PREFILL_TOKENS:
                break
            new.append(prompt)
        if not new:
            return
        hidden_TH, context, lengths = self._read([prompt.ids for prompt in new])
        last_hidden = hidden_TH[context.cu_seqlens[1:].long() - 1]
        for prompt, kv, hidden_H in zip(new, context.per_sequence(lengths), last_hidden, strict=True):
            prompt.read = _Prefilled(kv, hidden_H)

    def _read(self, texts: list[Tensor]) -> tuple[Tensor, PrefillContext, list[int]]:
        """One packed pass over texts: hidden states [T, H], the context with keys and values, and the lengths."""
        lengths = [len(ids) for ids in texts]
        cu_seqlens = cu_seqlens_of(lengths).to(self.device)
        context = PrefillContext(cu_seqlens, lengths=lengths)
        return self.trunk(torch.cat(texts), position_ids(cu_seqlens), context), context, lengths

    def _cache(self) -> KVCache:
        """The cache, made once a prompt has shown what a layer keeps, and larger where that is needed.

        Unless slots are given, their number is limited by what fits `CACHE_BYTES`.
        """
        length = self.longest_prompt + self.config.max_new_tokens
        if self.cache is None:
            like = next(prompt.read.kv for prompt in self.waiting if prompt.read is not None)
            if self.max_slots is None:
                self.most_slots = max(1, CACHE_BYTES // bytes_per_slot(like, length))
                self.slots = min(self.slots, self.most_slots)
            self.cache = KVCache(like, self.slots, length)
        elif length > self.cache.length or self.slots > self.cache.slots:
            self.cache.resize(max(self.slots, self.cache.slots), max(length, self.cache.length))
        if self.slots > self.rows.shape[1]:
            self.rows = F.pad(self.rows, (0, self.slots - self.rows.shape[1]))
        return self.cache

    def _step(self) -> None:
        """Feed the newest token of every row, and draw the next one."""
        assert self.cache is not None
        tokens_B, positions_B = self.rows[1, : self.active], self.rows[2, : self.active]
        self.cache.reach(self.longest + 1, None if self.n_waiting else self.active)
        hidden_BH = self.trunk(tokens_B, positions_B, DecodeContext(self.cache, positions_B, self.longest))
        self.longest += 1
        self._record(hidden_BH, 0)

    def _record(self, hidden_BH: Tensor, first: int) -> None:
        """Draw a token for the rows from `first` on, write it down, and retire the rows that end with it."""
        rows = self.rows[:_NUMBERS, first : self.active]
        sequences_B, tokens_B, _, counts_B, cells_B, _ = rows
        drawn_B, logprobs_B = self._draw(hidden_BH, counts_B)
        self.responses.tokens.view(-1).index_copy_(0, cells_B, drawn_B)
        self.responses.logprobs.view(-1).index_copy_(0, cells_B, logprobs_B)
        tokens_B.copy_(drawn_B)
        rows[2:5].add_(1)
        ended_B = self.stopping.is_stop_V[drawn_B]
        if self.stopping.strings:
            ended_B = ended_B | self.stopping.has_stop_string(self.responses.tokens[sequences_B], counts_B)
        done = (ended_B | (counts_B >= self.config.max_new_tokens)).nonzero()[:, 0]
        if len(done):
            sequences = sequences_B[done]
            self.responses.lengths[sequences] = counts_B[done]
            if not self.config.fixed_length:
                self.responses.truncated[sequences] = ~ended_B[done]
            self.finished.append(sequences)
            self._retire(done + first)

    def _draw(self, hidden_BH: Tensor, counts_B: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs [B] for the last B active rows, which have sampled `counts_B`."""
        rows = max(1, LOGIT_ELEMENTS // len(self.head.weight_VH))
        parts = [
            sample(self.head.logits(h), self.config, u, blocked_NV=self.stopping.blocked(c))
            for h, c, u in zip(
                hidden_BH.split(rows), counts_B.split(rows), self._uniforms(counts_B).split(rows), strict=True
            )
        ]
        return parts[0] if len(parts) == 1 else (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))

    def _uniforms(self, counts_B: Tensor) -> Tensor:
        """[B] fp64: a number for the next token of each of the last B active rows.

        They are made `AT_ONCE` for all rows, since all go on by a token together.
        """
        if len(counts_B) < self.active:  # those that have just begun: the others are further on
            return uniforms(self.rows[5, self.active - len(counts_B) : self.active], counts_B, 1)[0]
        numbers = self.rows[_NUMBERS:, : self.active]
        if self.numbers_used == AT_ONCE:
            numbers.copy_(uniforms(self.rows[5, : self.active], counts_B, AT_ONCE).view(torch.int64))
            self.numbers_used = 0
        self.numbers_used += 1
        return numbers[self.numbers_used - 1].view(torch.float64)

    def _retire(self, done: Tensor) -> None:
        """Free the rows `done`: the last active rows move into the gaps that they leave."""
        left = self.active - len(done)
        stays = torch.ones(self.active, dtype=torch.bool, device=self.device)
        stays[done] = False
        gaps, movers = done[done < left], stays[left:].nonzero()[:, 0] + left
        if len(gaps):
            self.rows[:, gaps] = self.rows[:, movers]
            if self.cache is not None:  # else it is freed, and will be filled from these rows
                self.cache.move(movers, gaps, self.longest)
        self.active = left
        self.longest = int(self.rows[2, :left].max()) if left else 0


def _no_responses(count: int, tokens: int, device: torch.device) -> Responses:
    """Room for so many."""
    return Responses(
        torch.zeros(count, tokens, dtype=torch.int64, device=device),
        torch.zeros(count, tokens, device=device),
        torch.zeros(count, dtype=torch.int64, device=device),
        torch.zeros(count, dtype=torch.bool, device=device),
    )
