"""`Rollout`: sequences enter slots of a static cache, get one token per step, and leave when they end.

The rest of the file is what a rollout consists of: the queue of prompts that wait for slots, the responses sampled so
far, the stop conditions, and the record of chosen experts.

Shapes: S sequences (responses, n to each prompt), B of them being decoded. N tokens of the longest response, P tokens
of a prompt, T packed prompt tokens. H hidden size, W experts of all routers per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from realign.api.generation import GenerationConfig
from realign.api.router_experts import UNKNOWN
from realign.api.sample import on_device
from realign.api.sampling_mask import SamplingMask
from realign.errors import ConfigError
from realign.functional.logprobs import LMHead
from realign.models.device import free_bytes
from realign.models.network.decoder import DTYPE, Decoder, SlotCache
from realign.models.network.images import PromptInput, append_tokens
from realign.samplers.in_process.draw import join_draws, sample, uniforms
from realign.samplers.in_process.settings import InProcessSampling

MARGIN = 8
"""Extra tokens decoded before a possible stop string, since the first tokens of a tail may decode differently."""

PREFILL_TOKENS = 2**13
"""Maximum number of prompt tokens in one prefill pass; a longer prompt is prefilled alone."""

CACHE_BYTES = 2**30
"""Memory for the KV cache on a CPU, in bytes, if the number of slots is not given."""

LOGIT_ELEMENTS = 2**26
"""Maximum number of logits computed at a time; 256 MiB in fp32."""

SYNC_EVERY = 8
"""Decode steps between two host synchronizations on an accelerator, if `sync_every` is null. It is 1 on a CPU."""

_AT_ONCE = 16
"""Random numbers generated at a time for each row."""


class RowEntry(IntEnum):
    """Entries of `Rollout.rows`, which has a column for each row being decoded.

    Entries are in one tensor, so that a row moves to another slot by one copy. `Rollout._record` advances `POSITION`,
    `COUNT` and `CELL` together, which are therefore neighbors.
    """

    SEQUENCE = 0
    """Row of `Rollout.responses`."""
    TOKEN = 1
    """The newest token."""
    POSITION = 2
    """Position of the newest token."""
    COUNT = 3
    """Number of sampled tokens."""
    CELL = 4
    """Index of the next token in the flattened `responses`."""
    KEY = 5
    """Key of the random numbers."""
    NUMBERS = 6
    """The first of `_AT_ONCE` random numbers, as the bits of fp64."""


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
        sampling: InProcessSampling,
    ) -> None:
        """Start without sequences.

        Args:
            decoder: layers of the model.
            head: last layer of the model.
            config: sampling settings.
            stopping: stop conditions.
            sampling: settings of the sampler. `sync_every` is 1 with stop strings, with recorded experts or sampling
                masks, and for decoders that read rows on the host.
        """
        self.decoder = decoder
        self.head = head
        self.config = config
        self.stopping = stopping
        self.device = head.weight_VH.device
        self.responses = _empty_responses(0, config.max_new_tokens, self.device)
        width = decoder.record_width
        self.experts = ExpertRecord(width, config.max_new_tokens, self.device) if width else None
        self.masks = MaskRecord() if config.sampling_replay else None
        self.waiting = _WaitingQueue()
        self.active = 0
        self.slots = 0
        self.sampling = sampling
        default = 1 if self.device.type == "cpu" else SYNC_EVERY
        steps = stopping.strings or decoder.reads_rows or width or config.sampling_replay
        self.sync_every = 1 if steps else sampling.sync_every or default
        self.most_slots = sampling.max_slots
        self.longest_prompt = 0
        self.finished: list[Tensor] = []
        """Finished sequences, as rows of `responses`."""
        self.cache: SlotCache | None = None
        self.longest = 0
        self.rows = torch.zeros(RowEntry.NUMBERS + _AT_ONCE, 0, dtype=torch.int64, device=self.device)
        """[entries, slots] int64: column b describes row b, see `RowEntry`."""
        self.numbers_used = _AT_ONCE
        self._texts: dict[int, PromptInput] = {}
        """Prompt of each sequence."""
        self._cache_limit: int | None = None

    def add(self, prompts: Sequence[PromptInput], keys_S: Tensor) -> Tensor:
        """Queue the same number of responses for each prompt.

        Args:
            prompts: token ids of each prompt, with its images, on the device of the head.
            keys_S: keys from `draw.response_keys`, in prompt order.

        Returns:
            [S] the rows of `responses` that will contain the responses.
        """
        n, keys_S = len(keys_S) // max(1, len(prompts)), keys_S.to(self.device)
        sequences = self._new_rows(len(keys_S))
        sequences_S = on_device(torch.tensor(sequences, dtype=torch.int64), self.device)
        for i, text in enumerate(prompts):
            part = slice(i * n, (i + 1) * n)
            self.waiting.add(text, sequences_S[part], keys_S[part])
            self._texts |= dict.fromkeys(sequences[part], text)
        self.longest_prompt = max(self.longest_prompt, *map(len, prompts), 0)
        unfinished = self.active + len(self.waiting)
        self.slots = max(self.slots, min(unfinished, self.most_slots or unfinished))
        return sequences_S

    def _new_rows(self, count: int) -> list[int]:
        """Append rows to `responses`, and return their indices."""
        first = len(self.responses.lengths)
        more = _empty_responses(count, self.config.max_new_tokens, self.device)
        self.responses = Responses(*(torch.cat(pair) for pair in zip(self.responses, more, strict=True)))
        if self.experts is not None:
            self.experts.grow(count)
        return list(range(first, first + count))

    def _entry(self, entry: RowEntry) -> Tensor:
        """Return an entry of the rows that are being decoded, a view [B] of `rows`."""
        return self.rows[entry, : self.active]

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or is being decoded."""
        return len(self.waiting) > 0 or self.active > 0

    def run(self) -> Responses:
        """Decode until no sequence waits and none is active."""
        while self.busy:
            self.advance()
        return self.responses

    def advance(self) -> None:
        """Start waiting sequences, or sample up to `sync_every` tokens for each active sequence."""
        if self._should_admit():
            self._admit()
            return
        assert self.cache is not None
        # ends with one row at the latest, since the cache has pages for one full slot
        while not self.cache.reserve(self.active, self.sync_every):
            self._interrupt()
        for step in range(self.sync_every):
            self._step(some_ended=step > 0)
        self._retire_ended(0)

    def _should_admit(self) -> bool:
        """Return whether to start sequences now.

        Several sequences start together, since one prefill costs about as much as one decode step of all rows.
        """
        waiting = len(self.waiting)
        if not waiting or self.slots - self.active < min(waiting, max(1, self.slots // 8)):
            return False
        return self.cache is None or self.cache.room(self.waiting.next_length) > 0

    def _admit(self) -> None:
        """Assign free slots to waiting sequences, copy their prompts' KV cache, and sample their first tokens."""
        self.waiting.prefill(self.decoder, self.slots - self.active)
        cache = self._cache()
        start, hidden, sequences, keys = self.active, [], [], []
        while self.waiting:
            most = min(self.slots - self.active, cache.room(self.waiting.next_length))
            if most == 0 or (started := self.waiting.begin(most)) is None:
                break
            count, read = len(started.keys), started.read
            cache.fill(self.active, self.active + count, read.state)
            if self.experts is not None and read.chosen_PW is not None:
                self.experts.begin(started.sequences.tolist(), read.chosen_PW)
            # of the last prompt token: `_record` samples the first token of the response, and advances the position
            self.rows[RowEntry.POSITION, self.active : self.active + count] = started.length - 1
            self.rows[RowEntry.COUNT, self.active : self.active + count] = started.sampled
            self.longest = max(self.longest, started.length)
            hidden.append(read.hidden_H.expand(count, -1))
            sequences.append(started.sequences)
            keys.append(started.keys)
            self.active += count
        if not sequences:  # longer prompts left fewer slots
            return
        rows = self.rows[:, start : self.active]
        rows[RowEntry.SEQUENCE] = torch.cat(sequences)
        rows[RowEntry.CELL] = rows[RowEntry.SEQUENCE] * self.config.max_new_tokens + rows[RowEntry.COUNT]
        rows[RowEntry.KEY] = torch.cat(keys)
        self.numbers_used = _AT_ONCE  # the numbers drawn ahead lack these rows
        self._begin_sequences(rows[RowEntry.SEQUENCE], rows[RowEntry.COUNT])
        self._record(torch.cat(hidden), start)
        self._retire_ended(start)  # the first token may be a stop token, and a decode step would write after it

    def _begin_sequences(self, sequences_B: Tensor, counts_B: Tensor) -> None:
        """Process sequences that just got slots, with their numbers of tokens; a hook for subclasses."""

    def _interrupt(self) -> None:
        """Return the last row to the queue, since the others need its memory. It continues when there is room."""
        row = self.rows[:, self.active - 1]
        sequence, sampled = row[[RowEntry.SEQUENCE, RowEntry.COUNT]].tolist()
        text = append_tokens(self._texts[sequence], self.responses.tokens[sequence, :sampled])
        last_row = slice(self.active - 1, self.active)
        # copies, since another sequence will use this column of `rows`
        keys = self.rows[RowEntry.KEY, last_row].clone()
        self.waiting.put_back(text, self.rows[RowEntry.SEQUENCE, last_row].clone(), keys, sampled)
        self._retire([self.active - 1])

    def _cache(self) -> SlotCache:
        """Return the KV cache; allocate it after the first prefill, and grow it when needed.

        If `max_slots` is None, `cache_bytes` limits the number of slots. Fewer fit when prompts become longer.
        """
        length = self.longest_prompt + self.config.max_new_tokens
        like = self.waiting.prefilled_state()  # only a prefill shows which layers keep what, and in which dtype
        if self.sampling.max_slots is None and (
            self.cache is None or (length > self.cache.length and not self.cache.bounded)
        ):
            if self._cache_limit is None:  # later, the cache itself occupies what was free
                self._cache_limit = cache_bytes(self.device, self.sampling.cache_fraction)
            expected = self.decoder.expected_tokens(self.longest_prompt, self.config.max_new_tokens)
            self.most_slots = max(1, self._cache_limit // self.decoder.bytes_per_slot(like, expected))
            self.slots = min(self.slots, self.most_slots)
            while self.active > self.slots:
                self._interrupt()
        if self.cache is None:
            self.cache = self.decoder.new_cache(like, self.slots, length, self._cache_limit)
        elif length > self.cache.length or self.slots > self.cache.slots:
            self.cache.resize(self.slots, max(length, self.cache.length))
        if self.slots > self.rows.shape[1]:
            self.rows = F.pad(self.rows, (0, self.slots - self.rows.shape[1]))
        return self.cache

    def _step(self, *, some_ended: bool) -> None:
        """Run one decode step: feed the newest token of every row, and sample the next one.

        The host reads nothing from the device, and can start the next step at once. Rows that have ended since the
        last synchronization (`some_ended`) repeat their last step, which changes nothing.
        """
        assert self.cache is not None
        tokens_B, positions_B = self._entry(RowEntry.TOKEN), self._entry(RowEntry.POSITION)
        # slots that no waiting sequence will use stay uninitialized
        self.cache.reach(self.longest + 1, None if self.waiting else self.active)
        hidden_BH = self.decoder.step(self.cache, tokens_B, positions_B, self.longest)
        self.longest = min(self.longest + 1, self.cache.length - 1)  # the longest row may have ended
        if self.experts is not None:
            # the step computed the newest token, in the cell before the next one
            self.experts.add(self._entry(RowEntry.CELL) - 1, self.decoder.chosen_NW)
        self._record(hidden_BH, 0, some_ended=some_ended)

    def _record(self, hidden_BH: Tensor, first: int, *, some_ended: bool = False) -> None:
        """Sample and store a token for the rows from `first` on, except those that have ended (`some_ended`)."""
        rows = self.rows[:, first : self.active]
        tokens_B, counts_B, cells_B = rows[RowEntry.TOKEN], rows[RowEntry.COUNT], rows[RowEntry.CELL]
        tokens, logprobs = self.responses.tokens.view(-1), self.responses.logprobs.view(-1)
        drawn_B, logprobs_B, kept = self._draw(hidden_BH, counts_B)
        if self.masks is not None:
            self.masks.add(rows[RowEntry.SEQUENCE].tolist(), kept)
        more: int | Tensor = 1
        if some_ended:  # write the last token of such a row again, since the host does not know yet which have ended
            ended_B = self.stopping.is_stop_V[tokens_B] | (counts_B >= self.config.max_new_tokens)
            cells_B = cells_B - ended_B.long()
            drawn_B = torch.where(ended_B, tokens_B, drawn_B)
            logprobs_B = torch.where(ended_B, logprobs[cells_B], logprobs_B)
            more = (~ended_B).long()
        tokens.index_copy_(0, cells_B, drawn_B)
        logprobs.index_copy_(0, cells_B, logprobs_B)
        tokens_B.copy_(drawn_B)
        rows[RowEntry.POSITION : RowEntry.CELL + 1].add_(more)

    def _retire_ended(self, first: int) -> None:
        """Read on the host which of the rows from `first` on have ended, and retire them."""
        rows = self.rows[:, first : self.active]
        sequences_B, tokens_B, counts_B = rows[RowEntry.SEQUENCE], rows[RowEntry.TOKEN], rows[RowEntry.COUNT]
        ended_B = self.stopping.is_stop_V[tokens_B]
        if self.stopping.strings:
            ended_B = ended_B | self.stopping.has_stop_string(self.responses.tokens[sequences_B], counts_B)
        # the only line at which the host waits for the device
        over = (ended_B | (counts_B >= self.config.max_new_tokens)).tolist()
        if ended_rows := [b for b, is_over in enumerate(over) if is_over]:
            rows_D = on_device(torch.tensor(ended_rows), self.device)
            sequences = sequences_B[rows_D]
            self.responses.lengths[sequences] = counts_B[rows_D]
            if not self.config.fixed_length:
                self.responses.truncated[sequences] = ~ended_B[rows_D]
            self.finished.append(sequences)
            self._retire([first + b for b in ended_rows])

    def _draw(self, hidden_BH: Tensor, counts_B: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Sample a token for each of the last B active rows, which have `counts_B` tokens so far; see `sample`."""
        rows = max(1, LOGIT_ELEMENTS // len(self.head.weight_VH))
        parts = [
            sample(self.head.logits(h), self.config, u, blocked_NV=self.stopping.block_tokens(c), exact=self.head.exact)
            for h, c, u in zip(
                hidden_BH.split(rows), counts_B.split(rows), self._uniforms(counts_B).split(rows), strict=True
            )
        ]
        return join_draws(parts)

    def _uniforms(self, counts_B: Tensor) -> Tensor:
        """Return a uniform number for the next token of each of the last B active rows, [B] fp64.

        All rows advance by one token per step, so numbers for `_AT_ONCE` steps are generated together.
        """
        if len(counts_B) < self.active:  # sequences that have just started; the others are ahead
            return uniforms(self._entry(RowEntry.KEY)[self.active - len(counts_B) :], counts_B, 1)[0]
        # in `rows`, so that numbers drawn ahead move with their row
        numbers = self.rows[RowEntry.NUMBERS :, : self.active]
        if self.numbers_used == _AT_ONCE:
            numbers.copy_(uniforms(self._entry(RowEntry.KEY), counts_B, _AT_ONCE).view(torch.int64))
            self.numbers_used = 0
        self.numbers_used += 1
        return numbers[self.numbers_used - 1].view(torch.float64)

    def _retire(self, done: Sequence[int]) -> None:
        """Free the rows `done`, and move the last active rows into the gaps."""
        left = self.active - len(done)
        # only as many rows move as there are gaps below `left`, since a move may copy a slot of the KV cache
        gaps = [row for row in done if row < left]
        movers = sorted({*range(left, self.active)} - {*done})  # as many as there are gaps
        if gaps:
            sources, targets = (on_device(torch.tensor(rows), self.device) for rows in (movers, gaps))
            self.rows[:, targets] = self.rows[:, sources]
        if self.cache is not None:  # if None, `fill_cache` recomputes it from these rows
            for row in done:
                self.cache.drop(row)
            if gaps:
                self.cache.move(movers, gaps, self.longest)
        self.active = left
        self.longest = int(self._entry(RowEntry.POSITION).max()) if left else 0


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


class _WaitingQueue:
    """Responses that have not started, grouped by prompt, in first-in, first-out order. Its length counts responses."""

    def __init__(self) -> None:
        self._prompts: deque[_Prompt] = deque()
        self._responses = 0

    def __len__(self) -> int:
        return self._responses

    def add(self, text: PromptInput, sequences: Tensor, keys: Tensor) -> None:
        """Append the responses of a prompt.

        Args:
            text: the prompt, on the device of the model.
            sequences: [n] rows of `Rollout.responses` for the responses.
            keys: [n] keys of their random numbers.
        """
        self._prompts.append(_Prompt(text, sequences, keys))
        self._responses += len(keys)

    def put_back(self, text: PromptInput, sequences: Tensor, keys: Tensor, sampled: int) -> None:
        """Queue a response before all others, with the `sampled` tokens that it has so far at the end of `text`."""
        self._prompts.appendleft(_Prompt(text, sequences, keys, sampled=sampled))
        self._responses += len(keys)

    @property
    def next_length(self) -> int:
        """Number of tokens of the first text."""
        return len(self._prompts[0].text)

    def count_sampled(self, sequence: int) -> int:
        """Return how many tokens of a waiting response have been sampled."""
        return self._prompt_of(sequence).sampled

    def _prompt_of(self, sequence: int) -> _Prompt:
        return next(p for p in self._prompts if sequence in p.sequences.tolist())

    def begin(self, most: int) -> _StartedResponses | None:
        """Remove and return up to `most` responses of the first prompt; None if that has not been prefilled."""
        if not self._prompts or (read := self._prompts[0].read) is None:
            return None
        prompt = self._prompts[0]
        started = _StartedResponses(read, len(prompt.text), prompt.sequences[:most], prompt.keys[:most], prompt.sampled)
        self._keep(prompt, prompt.sequences[most:], prompt.keys[most:])
        return started

    def remove(self, sequence: int) -> None:
        """Remove the response with this row of `Rollout.responses`."""
        prompt = self._prompt_of(sequence)
        stays = prompt.sequences != sequence
        self._keep(prompt, prompt.sequences[stays], prompt.keys[stays])

    def _keep(self, prompt: _Prompt, sequences: Tensor, keys: Tensor) -> None:
        """Keep only these responses of a prompt."""
        self._responses -= len(prompt.keys) - len(keys)
        prompt.sequences, prompt.keys = sequences, keys
        if not len(keys):
            self._prompts.remove(prompt)

    def prefill(self, decoder: Decoder, wanted: int) -> None:
        """Prefill the prompts of the next `wanted` responses, or as many of them as fit one pass."""
        new: list[_Prompt] = []
        total = 0
        for prompt in self._prompts:
            if wanted <= 0:
                break
            wanted -= len(prompt.keys)
            if prompt.read is not None:  # its other responses did not get slots at the last admission
                continue
            total += len(prompt.text)
            if new and total > PREFILL_TOKENS:
                break
            new.append(prompt)
        if not new:
            return
        last_hidden, states = decoder.prefill([prompt.text for prompt in new])
        chosen: Sequence[Tensor | None] = [None] * len(new)
        if decoder.record_width:
            chosen = decoder.chosen_NW.split([len(prompt.text) for prompt in new])
        for prompt, *read in zip(new, states, last_hidden, chosen, strict=True):
            prompt.read = _Prefilled(*read)

    def prefilled_state(self) -> Any:
        """Return the state of a prompt that has been prefilled."""
        return next(prompt.read.state for prompt in self._prompts if prompt.read is not None)

    def forget_prefills(self) -> None:
        """Drop the results of prefills, for example since the weights have changed."""
        for prompt in self._prompts:
            prompt.read = None


@dataclass(eq=False)
class _Prompt:
    """A prompt with responses that have not started; see `_StartedResponses` for the fields."""

    text: PromptInput
    sequences: Tensor
    keys: Tensor
    read: _Prefilled | None = None
    sampled: int = 0


class _StartedResponses(NamedTuple):
    """Responses of one prompt that leave the queue."""

    read: _Prefilled
    length: int
    """Number of prompt tokens."""
    sequences: Tensor
    """[n] rows of `Rollout.responses`."""
    keys: Tensor
    """[n] keys of their random numbers."""
    sampled: int
    """Number of tokens that were sampled before; not 0 for a response that was interrupted."""


class _Prefilled(NamedTuple):
    """Prefill result of a prompt."""

    state: Any
    """State of the prompt, see `Decoder.prefill`."""
    hidden_H: Tensor
    """Hidden state of the last prompt token, from which the first response tokens are sampled."""
    chosen_PW: Tensor | None
    """Experts chosen for the prompt tokens; None if they are not recorded."""


class Responses(NamedTuple):
    """Responses in prompt order, n per prompt; response s is in row s, starting at column 0."""

    tokens: Tensor
    """[S, N] int64."""
    logprobs: Tensor
    """[S, N] fp32, 0 after the end."""
    lengths: Tensor
    """[S] int64."""
    truncated: Tensor
    """[S] bool."""


def _empty_responses(count: int, tokens: int, device: torch.device) -> Responses:
    """Allocate `count` empty responses of up to `tokens` tokens."""
    return Responses(
        torch.zeros(count, tokens, dtype=torch.int64, device=device),
        torch.zeros(count, tokens, device=device),
        torch.zeros(count, dtype=torch.int64, device=device),
        torch.zeros(count, dtype=torch.bool, device=device),
    )


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
        self._min_new = config.min_new_tokens if ids else 0  # without stop tokens, there is nothing to block
        self.strings = tuple(config.stop_strings)
        self._tokenizer = tokenizer
        self._tail = MARGIN + max((len(s.encode()) for s in self.strings), default=0)

    def block_tokens(self, counts_B: Tensor) -> Tensor | None:
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
        tails = tokens_BN.gather(1, columns.clamp_(min=0)).tolist()  # columns before the start repeat token 0
        hits = [
            self._contains(tail[-count:]) and (count <= self._tail or self._contains(tokens_BN[row, :count].tolist()))
            for row, (tail, count) in enumerate(zip(tails, counts_B.tolist(), strict=True))
        ]
        return torch.tensor(hits, device=counts_B.device)

    def _contains(self, tokens: list[int]) -> bool:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(s in text for s in self.strings)


class MaskRecord:
    """The tokens that top-k, top-p and min-p kept for each sampled token of a rollout."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Tensor]] = {}

    def add(self, sequences: Sequence[int], kept: Sequence[Tensor]) -> None:
        """Append the set of the next token of each of these sequences."""
        for sequence, ids in zip(sequences, kept, strict=True):
            self._kept.setdefault(sequence, []).append(ids)

    def of(self, sequences: Sequence[int]) -> list[SamplingMask]:
        """Return the sets of ended sequences, one for each token of the response."""
        return [SamplingMask.of(self._kept[sequence]) for sequence in sequences]

    def forget(self, sequences: Iterable[int]) -> None:
        """Free the sets of sequences whose rows are released."""
        for sequence in sequences:
            self._kept.pop(sequence, None)


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
        choices = []
        for sequence, length in zip(sequences, lengths, strict=True):
            response_NW = self._responses_SNW[sequence, :length].clone()
            response_NW[-1:] = UNKNOWN
            choices.append(torch.cat([self._prompts[sequence], response_NW]))
        return choices

    def forget(self, sequences: Iterable[int]) -> None:
        """Free the choices for the prompts of sequences whose rows are released."""
        for sequence in sequences:
            self._prompts.pop(sequence, None)
