"""`Capture`: the calls of one session as token ids, merged into sequences for training.

A call whose rendered prompt starts with the text of an earlier call (its prompt and its response) continues that call.
Its prompt keeps the token ids of the earlier call, and only the text after them is tokenized. Every other call begins a
new sequence, for example after the chat template or the agent rewrote the history.

Shapes: T tokens of a sequence.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from realign.api.sampler import Completion
from realign.api.sampling_mask import SamplingMask
from realign.endpoint.renderer import Renderer


@dataclass(frozen=True, eq=False)
class CapturedCall:
    """One response of the policy."""

    parent: CapturedCall | None
    """The call that this call continues; None if the call begins a sequence."""
    ids: tuple[int, ...]
    """Token ids of the prompt, which begin with all tokens of the parent, and of the response."""
    prompt_tokens: int
    """Number of tokens of the prompt."""
    completion: Completion
    """The response on the CPU: token ids, log-probs and versions."""
    text: str
    """Text of the prompt and the response."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """The prompt of a call, with the token ids that the sampler gets."""

    ids: tuple[int, ...]
    text: str
    """Rendered text."""
    parent: CapturedCall | None = None
    """The call that this prompt continues."""
    started: int = 0
    """Number of token ids at the end that begin the response, such as the beginning of a forced tool call."""


@dataclass(frozen=True, eq=False)
class CapturedSequence:
    """A chain of calls as one packed sequence."""

    ids: Tensor
    """[T] int64."""
    sampled: Tensor
    """[T] bool: sampled tokens that train. A response that several sequences contain trains in the first one."""
    logprobs: Tensor
    """[T] fp32; 0 where `sampled` is False."""
    versions: Tensor
    """[T] int32; -1 where `sampled` is False."""
    mask: SamplingMask
    """The tokens that each token was drawn from, if recorded."""
    calls: int
    """Number of calls whose responses train in this sequence."""
    truncated: bool
    """Whether the length limit ended the last response."""
    turn: Tensor
    """[T] int32: the number of the call that sampled a token, from 0 in the session; -1 where `sampled` is False."""


@dataclass
class Capture:
    """The calls of one session. All methods are thread-safe."""

    _calls: list[CapturedCall] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        with self._lock:
            return len(self._calls)

    def prompt(self, renderer: Renderer, text: str) -> Prompt:
        """Tokenize a prompt. Keeps the token ids of the longest earlier call that its text starts with.

        Args:
            renderer: the tokenizer.
            text: rendered prompt, including special tokens.

        Raises:
            ValueError: the tokenizer cannot encode the text.
        """
        with self._lock:
            known = [call for call in self._calls if text.startswith(call.text)]
        for parent in sorted(known, key=lambda call: len(call.ids), reverse=True):
            behind = text[len(parent.text) :]
            new = renderer.encode(behind, before=parent.ids)
            # a tokenizer that changes a text, for example to normal form, gives other ids than those of the whole
            if renderer.decode(new, before=parent.ids) == behind:
                return Prompt((*parent.ids, *new), text, parent)
        return Prompt(tuple(renderer.encode(text)), text)

    def add(self, renderer: Renderer, prompt: Prompt, completion: Completion) -> CapturedCall:
        """Store a response.

        Args:
            renderer: the tokenizer.
            prompt: its prompt.
            completion: the response, with at least one token.
        """
        sampled = tuple(completion.ids.tolist())
        text = prompt.text + renderer.decode(sampled, before=prompt.ids)
        on_cpu = Completion(
            completion.ids.cpu(),
            completion.logprobs.cpu(),
            completion.versions.cpu(),
            completion.truncated,
            completion.mask,
        )
        call = CapturedCall(prompt.parent, prompt.ids + sampled, len(prompt.ids), on_cpu, text)
        with self._lock:
            self._calls.append(call)
        return call

    def calls(self) -> list[CapturedCall]:
        """Return the calls in the order in which their responses ended."""
        with self._lock:
            return list(self._calls)

    def sequences(self) -> list[CapturedSequence]:
        """Return one sequence for every call that no other call continues. Each sampled token trains exactly once."""
        calls = self.calls()
        continued = {id(call.parent) for call in calls if call.parent is not None}
        numbers = {id(call): number for number, call in enumerate(calls)}
        return [_sequence(call, numbers) for call in calls if id(call) not in continued]


def _sequence(last: CapturedCall, numbers: dict[int, int]) -> CapturedSequence:
    """Return the sequence that ends with a call; removes its calls from `numbers`, by ids of objects."""
    total = len(last.ids)
    sampled_T = torch.zeros(total, dtype=torch.bool)
    logprobs_T, versions_T = torch.zeros(total), torch.full((total,), -1, dtype=torch.int32)
    turn_T = versions_T.clone()
    mask = SamplingMask.none(0)
    calls, call = 0, last
    while True:
        response, drawn = slice(call.prompt_tokens, len(call.ids)), None
        if (number := numbers.pop(id(call), None)) is not None:
            calls += 1
            turn_T[response] = number
            sampled_T[response] = True
            logprobs_T[response] = call.completion.logprobs
            versions_T[response] = call.completion.versions
            drawn = call.completion.mask
        before = 0 if call.parent is None else len(call.parent.ids)
        mask = (drawn or SamplingMask.none(len(call.completion.ids))).then(mask)
        mask = SamplingMask.none(call.prompt_tokens - before).then(mask)
        if call.parent is None:
            break
        call = call.parent
    ids_T = torch.tensor(last.ids, dtype=torch.int64)
    return CapturedSequence(ids_T, sampled_T, logprobs_T, versions_T, mask, calls, last.completion.truncated, turn_T)
