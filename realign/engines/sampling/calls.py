"""Requests of callers, and the rollouts that they share.

Shapes: S sequences.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from realign.api.generation import GenerationConfig
from realign.engines.network.images import PromptInput
from realign.engines.sampling.continuous import Stream, Taken


@dataclass(eq=False)
class Call:
    """A pending request of one caller.

    `config.n` is 1, so that calls with different numbers of responses can share a rollout.
    """

    prompts: list[PromptInput]
    """Token ids of each prompt, with its images, on the device of the weights."""
    keys_S: Tensor
    """Keys of the random numbers, in prompt order; see `counter_rng.response_keys`."""
    config: GenerationConfig
    sequences_S: Tensor | None = None
    """Rows of the rollout's responses; None if the call has not started."""
    left: int = 0
    """Number of unfinished sequences."""
    result: Future[Taken] = field(default_factory=Future)
    kept: tuple[Tensor, Tensor, Tensor] | None = None
    """Tokens, log-probs and versions of a canceled response."""

    @property
    def sequence(self) -> int:
        """Row of the single sequence of a started call."""
        assert self.sequences_S is not None
        return int(self.sequences_S[0])


@dataclass(eq=False)
class SharedRollout:
    """The rollout of all calls with one config."""

    stream: Stream
    calls: dict[int, Call] = field(default_factory=dict)
    """The call of each unfinished sequence."""

    def add(self, call: Call) -> None:
        """Queue the sequences of a call."""
        call.sequences_S = self.stream.add(call.prompts, call.keys_S)
        call.left = len(call.keys_S)
        self.calls |= dict.fromkeys(call.sequences_S.tolist(), call)

    def deliver(self) -> None:
        """Set the result of each call whose last sequence has ended."""
        for sequence in torch.cat(self.stream.finished).tolist() if self.stream.finished else []:
            call = self.calls[sequence]
            call.left -= 1
            if not call.left:
                assert call.sequences_S is not None
                call.result.set_result(self.stream.take(call.sequences_S))
            del self.calls[sequence]  # last, since an error ends all calls that are still listed
        self.stream.finished.clear()

    def remove(self, call: Call) -> None:
        """Drop the single sequence of an unfinished call, and store its tokens in `call.kept`."""
        call.kept = self.stream.so_far(call.sequence)
        self.stream.remove(call.sequence)
        del self.calls[call.sequence]
