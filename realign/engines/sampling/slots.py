"""Decoding loop: sequences enter slots of a static cache, get one token per step, and leave when they end.

Shapes: S sequences (responses, n to each prompt), B of them being decoded, N tokens of the longest response, T packed
prompt tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from realign.api.generation import GenerationConfig
from realign.engines.device import free_bytes
from realign.engines.network.images import PromptInput
from realign.engines.sampling.counter_rng import uniforms
from realign.engines.sampling.decoder import Decoder, SlotCache
from realign.engines.sampling.draw import sample
from realign.engines.sampling.expert_record import ExpertRecord
from realign.engines.sampling.resources import RolloutResources
from realign.engines.sampling.responses import Responses, empty_responses
from realign.engines.sampling.stopping import Stopping
from realign.engines.sampling.waiting import WaitingQueue
from realign.functional.logprobs import LMHead

CACHE_BYTES = 2**30
"""Memory for the KV cache on a CPU, in bytes, if the number of slots is not given."""

LOGIT_ELEMENTS = 2**26
"""Maximum number of logits computed at a time; 256 MiB in fp32."""

SYNC_EVERY = 8
"""Decode steps between two host synchronizations on an accelerator, if `sync_every` is null. It is 1 on a CPU."""

AT_ONCE = 16
"""Random numbers generated at a time for each row."""

_NUMBERS = 6
"""Number of bookkeeping entries per row in `Rollout.rows`; random numbers follow them."""


def cache_bytes(device: torch.device, fraction: float, free: int | None = None) -> int:
    """Return the memory for the KV cache if the number of slots is not given, in bytes.

    Args:
        device: device of the model, which already has the weights.
        fraction: fraction of the free memory of a GPU.
        free: free memory of the GPU, in bytes; None reads it now.
    """
    if device.type != "cuda":
        return CACHE_BYTES
    return int(fraction * (free_bytes(device) if free is None else free))


class Rollout:
    """Sequences in slots, all sampled with one config. Rows 0 to `active` - 1 are being decoded, row b in slot b.

    Other sequences wait in first-in, first-out order. They can be added at any time.
    """

    def __init__(
        self,
        decoder: Decoder,
        head: LMHead,
        config: GenerationConfig,
        stopping: Stopping,
        resources: RolloutResources,
    ) -> None:
        """Start without sequences.

        Args:
            decoder: layers of the model.
            head: last layer of the model.
            config: sampling settings.
            stopping: stop conditions.
            resources: settings of the sampler, and the memory for the KV cache. `sync_every` is 1 with stop strings,
                with recorded experts, and for decoders that read rows on the host.
        """
        self.decoder = decoder
        self.head = head
        self.config = config
        self.stopping = stopping
        self.device = head.weight_VH.device
        self.responses = empty_responses(0, config.max_new_tokens, self.device)
        width = decoder.record_width
        self.experts = ExpertRecord(width, config.max_new_tokens, self.device) if width else None
        self.waiting = WaitingQueue()
        self.active = 0
        self.slots = 0
        self.resources = resources
        default = 1 if self.device.type == "cpu" else SYNC_EVERY
        settings = resources.settings
        self.sync_every = 1 if stopping.strings or decoder.reads_rows or width else settings.sync_every or default
        self.most_slots = settings.max_slots
        self.longest_prompt = 0
        self.finished: list[Tensor] = []
        """Finished sequences, as rows of `responses`."""
        self.cache: SlotCache | None = None
        self.longest = 0
        # Column b describes row b: sequence, newest token, its position, number of sampled tokens, index of the next
        # token in the flattened `responses`, key of the random numbers, then random numbers (fp64 bits).
        self.rows = torch.zeros(_NUMBERS + AT_ONCE, 0, dtype=torch.int64, device=self.device)
        self.numbers_used = AT_ONCE

    def add(self, prompts: Sequence[PromptInput], keys_S: Tensor) -> Tensor:
        """Queue the same number of responses for each prompt.

        Args:
            prompts: token ids of each prompt, with its images, on the device of the head.
            keys_S: keys from `counter_rng.response_keys`, in prompt order.

        Returns:
            [S] the rows of `responses` that will contain the responses.
        """
        n, keys_S = len(keys_S) // max(1, len(prompts)), keys_S.to(self.device)
        sequences_S = self._new_rows(len(keys_S))
        for i, text in enumerate(prompts):
            part = slice(i * n, (i + 1) * n)
            self.waiting.add(text, sequences_S[part], keys_S[part])
        self.longest_prompt = max(self.longest_prompt, *map(len, prompts), 0)
        unfinished = self.active + len(self.waiting)
        self.slots = max(self.slots, min(unfinished, self.most_slots or unfinished))
        return sequences_S

    def _new_rows(self, count: int) -> Tensor:
        """Append rows to `responses`, and return their indices."""
        first = len(self.responses.lengths)
        more = empty_responses(count, self.config.max_new_tokens, self.device)
        self.responses = Responses(*(torch.cat(pair) for pair in zip(self.responses, more, strict=True)))
        if self.experts is not None:
            self.experts.grow(count)
        return torch.arange(first, first + count, device=self.device)

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or is being decoded."""
        return len(self.waiting) > 0 or self.active > 0

    def run(self) -> Responses:
        """Decode until no sequence waits and none is active."""
        while self.busy:
            self.advance()
        return self.responses

    def release(self) -> None:
        """Return the KV cache to the kept memory, or free it. Decoding is not allowed after that."""
        if self.cache is not None:
            self.cache.release()
            self.cache = None

    def advance(self) -> None:
        """Start waiting sequences, or sample up to `sync_every` tokens for each active sequence."""
        if self._should_admit():
            self._admit()
            return
        for step in range(self.sync_every):
            self._step(some_ended=step > 0)
        self._retire_ended(0)

    def _should_admit(self) -> bool:
        """Return whether to start sequences now.

        Several sequences start together, since one prefill costs about as much as one decode step of all rows.
        """
        waiting = len(self.waiting)
        return self.slots - self.active >= min(waiting, max(1, self.slots // 8)) and waiting > 0

    def _admit(self) -> None:
        """Assign free slots to waiting sequences, copy their prompts' KV cache, and sample their first tokens."""
        self.waiting.prefill(self.decoder, self.slots - self.active)
        cache = self._cache()
        start, hidden, sequences, keys = self.active, [], [], []
        while self.active < self.slots and (begun := self.waiting.begin(self.slots - self.active)) is not None:
            count, read = len(begun.keys), begun.read
            cache.fill(self.active, self.active + count, read.state)
            if self.experts is not None and read.chosen_PW is not None:
                self.experts.begin(begun.sequences.tolist(), read.chosen_PW)
            self.rows[2, self.active : self.active + count] = begun.length - 1
            self.longest = max(self.longest, begun.length)
            hidden.append(read.hidden_H.expand(count, -1))
            sequences.append(begun.sequences)
            keys.append(begun.keys)
            self.active += count
        rows = self.rows[:, start : self.active]
        rows[0] = torch.cat(sequences)
        rows[3] = 0
        rows[4] = rows[0] * self.config.max_new_tokens
        rows[5] = torch.cat(keys)
        self.numbers_used = AT_ONCE
        self._begun(rows[0])
        self._record(torch.cat(hidden), start)
        self._retire_ended(start)

    def _begun(self, sequences: Tensor) -> None:
        """Process the rows of sequences that just got slots; a hook for subclasses."""

    def _cache(self) -> SlotCache:
        """Return the KV cache; allocate it after the first prefill, and grow it when needed.

        If `max_slots` is None, `cache_bytes` limits the number of slots.
        """
        length = self.longest_prompt + self.config.max_new_tokens
        if self.cache is None:
            like = self.waiting.prefilled_state()
            if self.resources.settings.max_slots is None:
                limit = self._cache_bytes()
                self.most_slots = max(1, limit // self.decoder.bytes_per_slot(like, length))
                self.slots = min(self.slots, self.most_slots)
            self.cache = self.decoder.new_cache(like, self.slots, length, self.resources.memory)
        elif length > self.cache.length or self.slots > self.cache.slots:
            self.cache.resize(max(self.slots, self.cache.slots), max(length, self.cache.length))
        if self.slots > self.rows.shape[1]:
            self.rows = F.pad(self.rows, (0, self.slots - self.rows.shape[1]))
        return self.cache

    def _cache_bytes(self) -> int:
        """Return the memory for the KV cache; kept blocks that it replaces count as free."""
        fraction, memory = self.resources.settings.cache_fraction, self.resources.memory
        if memory is None or self.device.type != "cuda":
            return cache_bytes(self.device, fraction)
        return cache_bytes(self.device, fraction, free_bytes(self.device) + memory.cache_bytes)

    def _step(self, *, some_ended: bool) -> None:
        """Run one decode step: feed the newest token of every row, and sample the next one.

        The host reads nothing from the device, and can start the next step at once. Rows that have ended since the
        last synchronization (`some_ended`) repeat their last step, which changes nothing.
        """
        assert self.cache is not None
        tokens_B, positions_B = self.rows[1, : self.active], self.rows[2, : self.active]
        self.cache.reach(self.longest + 1, None if self.waiting else self.active)
        hidden_BH = self.decoder.step(self.cache, tokens_B, positions_B, self.longest)
        self.longest = min(self.longest + 1, self.cache.length - 1)  # the longest row may have ended
        if self.experts is not None:
            self.experts.add(self.rows[4, : self.active] - 1, self.decoder.chosen_NW)
        self._record(hidden_BH, 0, some_ended=some_ended)

    def _record(self, hidden_BH: Tensor, first: int, *, some_ended: bool = False) -> None:
        """Sample and store a token for the rows from `first` on, except those that have ended (`some_ended`)."""
        rows = self.rows[:_NUMBERS, first : self.active]
        _, tokens_B, _, counts_B, cells_B, _ = rows
        tokens, logprobs = self.responses.tokens.view(-1), self.responses.logprobs.view(-1)
        drawn_B, logprobs_B = self._draw(hidden_BH, counts_B)
        more: int | Tensor = 1
        if some_ended:  # write the last token of such a row again
            ended_B = self.stopping.is_stop_V[tokens_B] | (counts_B >= self.config.max_new_tokens)
            cells_B = cells_B - ended_B.long()
            drawn_B = torch.where(ended_B, tokens_B, drawn_B)
            logprobs_B = torch.where(ended_B, logprobs[cells_B], logprobs_B)
            more = (~ended_B).long()
        tokens.index_copy_(0, cells_B, drawn_B)
        logprobs.index_copy_(0, cells_B, logprobs_B)
        tokens_B.copy_(drawn_B)
        rows[2:5].add_(more)

    def _retire_ended(self, first: int) -> None:
        """Read on the host which of the rows from `first` on have ended, and retire them."""
        sequences_B, tokens_B, _, counts_B, _, _ = self.rows[:_NUMBERS, first : self.active]
        ended_B = self.stopping.is_stop_V[tokens_B]
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
        """Sample tokens and log-probs [B] for the last B active rows, which have `counts_B` tokens so far."""
        rows = max(1, LOGIT_ELEMENTS // len(self.head.weight_VH))
        parts = [
            sample(self.head.logits(h), self.config, u, blocked_NV=self.stopping.blocked(c))
            for h, c, u in zip(
                hidden_BH.split(rows), counts_B.split(rows), self._uniforms(counts_B).split(rows), strict=True
            )
        ]
        return parts[0] if len(parts) == 1 else (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))

    def _uniforms(self, counts_B: Tensor) -> Tensor:
        """Return a uniform number for the next token of each of the last B active rows, [B] fp64.

        All rows advance by one token per step, so numbers for `AT_ONCE` steps are generated together.
        """
        if len(counts_B) < self.active:  # sequences that have just started; the others are ahead
            return uniforms(self.rows[5, self.active - len(counts_B) : self.active], counts_B, 1)[0]
        numbers = self.rows[_NUMBERS:, : self.active]
        if self.numbers_used == AT_ONCE:
            numbers.copy_(uniforms(self.rows[5, : self.active], counts_B, AT_ONCE).view(torch.int64))
            self.numbers_used = 0
        self.numbers_used += 1
        return numbers[self.numbers_used - 1].view(torch.float64)

    def _retire(self, done: Tensor) -> None:
        """Free the rows `done`, and move the last active rows into the gaps."""
        left = self.active - len(done)
        stays = torch.ones(self.active, dtype=torch.bool, device=self.device)
        stays[done] = False
        gaps, movers = done[done < left], stays[left:].nonzero()[:, 0] + left
        if len(gaps):
            self.rows[:, gaps] = self.rows[:, movers]
            if self.cache is not None:  # if None, `fill_cache` recomputes it from these rows
                self.cache.move(movers, gaps, self.longest)
        self.active = left
        self.longest = int(self.rows[2, :left].max()) if left else 0
