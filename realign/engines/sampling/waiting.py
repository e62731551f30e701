"""`WaitingQueue`: prompts whose responses wait for slots, and the prefill of these prompts.

Shapes: S sequences (responses, n to each prompt), H hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from realign.engines.network.images import PromptInput
from realign.engines.sampling.decoder import Decoder

PREFILL_TOKENS = 2**13
"""Maximum number of prompt tokens in one prefill pass; a longer prompt is prefilled alone."""


class Prefilled(NamedTuple):
    """Prefill result of a prompt."""

    state: Any
    """State of the prompt, see `Decoder.prefill`."""
    hidden_H: Tensor
    """Hidden state of the last prompt token, from which the first response tokens are sampled."""
    chosen_PW: Tensor | None
    """Experts chosen for the prompt tokens; None if they are not recorded."""


class Begun(NamedTuple):
    """Responses of one prompt that leave the queue."""

    read: Prefilled
    length: int
    """Number of prompt tokens."""
    sequences: Tensor
    """[n] rows of `Rollout.responses`."""
    keys: Tensor
    """[n] keys of their random numbers."""


@dataclass(eq=False)
class _Prompt:
    """A prompt with responses that have not started; see `Begun` for the fields."""

    text: PromptInput
    sequences: Tensor
    keys: Tensor
    read: Prefilled | None = None


class WaitingQueue:
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

    def begin(self, most: int) -> Begun | None:
        """Remove and return up to `most` responses of the first prompt; None if that has not been prefilled."""
        if not self._prompts or (read := self._prompts[0].read) is None:
            return None
        prompt = self._prompts[0]
        begun = Begun(read, len(prompt.text), prompt.sequences[:most], prompt.keys[:most])
        self._keep(prompt, prompt.sequences[most:], prompt.keys[most:])
        return begun

    def remove(self, sequence: int) -> None:
        """Remove the response with this row of `Rollout.responses`."""
        prompt = next(p for p in self._prompts if sequence in p.sequences.tolist())
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
            if prompt.read is not None:
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
            prompt.read = Prefilled(*read)

    def prefilled_state(self) -> Any:
        """Return the state of a prompt that has been prefilled."""
        return next(prompt.read.state for prompt in self._prompts if prompt.read is not None)

    def forget_prefills(self) -> None:
        """Drop the results of prefills, for example since the weights have changed."""
        for prompt in self._prompts:
            prompt.read = None
