"""Requests to a sampler: `Request` for one response, the `Handle` to wait for it, and its `Completion`.

Shapes: P tokens of a prompt, N tokens of a response.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from realign.api.generation import GenerationConfig
from realign.api.seeds import derive_seed


@dataclass(frozen=True, eq=False)
class Request:
    """One response to one prompt."""

    id: Hashable
    """Id of the prompt."""
    response_index: int
    """Index of the response among the responses to this prompt, from 0."""
    prompt_ids: Tensor
    """[P] int64, at least one token."""
    config: GenerationConfig
    """Sampling parameters. `n` is ignored, since a request is one response."""
    seed: int
    """Seed of the call. The seed of the response is derived from (seed, id, response_index)."""

    @property
    def response_seed(self) -> int:
        """A 63-bit seed for this response, for samplers that accept one seed per request."""
        return derive_seed(self.seed, "response", str(self.id), self.response_index)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Sampled tokens of one response, on the device of its prompt."""

    ids: Tensor
    """[N] int64."""
    logprobs: Tensor
    """[N] fp32, under the distribution that each token was drawn from."""
    versions: Tensor
    """[N] int32, the policy version that sampled each token."""

    @classmethod
    def none(cls, prompt_ids: Tensor) -> Tokens:
        """Return the tokens of a response that has not started: none.

        Args:
            prompt_ids: the prompt, which determines the device.
        """
        empty = prompt_ids.new_zeros(0)
        return cls(empty, empty.float(), empty.int())


@dataclass(frozen=True, eq=False)
class Completion(Tokens):
    """A finished response."""

    truncated: bool
    """Whether the length limit ended the response. False for stop tokens, stop strings and `fixed_length`."""


class Handle(Protocol):
    """A requested response. All methods are thread-safe."""

    @property
    def request(self) -> Request:
        """The request."""
        ...

    @property
    def done(self) -> bool:
        """Whether `result` returns or raises without waiting."""
        ...

    def tokens(self) -> Tokens:
        """Return the tokens so far.

        Returns:
            A copy: all tokens of a finished response, or the tokens before the cancellation of a cancelled one. For
            an unfinished response, none if the sampler does not report its tokens (`Capabilities.abort`).
        """
        ...

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the response.

        Args:
            timeout_s: seconds to wait; None waits without limit.

        Returns:
            The finished response.

        Raises:
            concurrent.futures.CancelledError: the response was cancelled.
            TimeoutError: the response did not finish within `timeout_s`. Sampling continues.
            RuntimeError: the sampler was closed or failed.
            ValueError: the sampler cannot serve the request.
        """
        ...

    def cancel(self) -> bool:
        """Cancel the response; `result` then raises `CancelledError`. Other responses are not affected.

        Returns:
            Whether this call cancelled it; False if the response already finished, failed or was cancelled.
        """
        ...


class FutureHandle:
    """A `Handle` with a future that the sampler completes, for samplers without partial results."""

    def __init__(self, request: Request) -> None:
        """Create the handle of a request that has not started.

        Args:
            request: the request.
        """
        self.request = request
        self.future: Future[Completion] = Future()

    @property
    def done(self) -> bool:
        """See `Handle.done`."""
        return self.future.done()

    def tokens(self) -> Tokens:
        """See `Handle.tokens`. Returns no tokens before the response is finished."""
        finished = self.future.done() and not self.future.cancelled() and self.future.exception() is None
        return self.future.result() if finished else Tokens.none(self.request.prompt_ids)

    def result(self, timeout_s: float | None = None) -> Completion:
        """See `Handle.result`."""
        return self.future.result(timeout_s)

    def cancel(self) -> bool:
        """See `Handle.cancel`. Returns False if the sampler has started the request, unless a subclass can abort."""
        return not self.future.done() and self.future.cancel()


__all__ = ["Completion", "FutureHandle", "Handle", "Request", "Tokens"]
