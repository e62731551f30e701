"""`Sampler`: the contract of samplers, which sample responses for a role in this process or on a server.

Interfaces, environments, evaluation, calibration and chat call `model.sampler`. A sampler receives token ids and
returns token ids, never text, together with the log-prob and the policy version of every sampled token.

Shapes: P tokens of a prompt, N tokens of a response, T packed tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from realign.api.generation import GenerationConfig
from realign.api.lengths import Lengths
from realign.api.sample import PIXELS, SequenceSample, with_response_index
from realign.api.sampling_mask import SamplingMask, with_masks
from realign.api.seeds import derive_seed
from realign.settings import Settings


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
    mask: SamplingMask | None = None
    """On the host: the tokens that each token was drawn from, with `GenerationConfig.sampling_replay`."""


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
            A copy: all tokens of a finished response, or the tokens before the cancellation of a canceled one. For
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
            concurrent.futures.CancelledError: the response was canceled.
            TimeoutError: the response did not finish within `timeout_s`. Sampling continues.
            RuntimeError: the sampler was closed or failed.
            ValueError: the sampler cannot serve the request.
        """
        ...

    def cancel(self) -> bool:
        """Cancel the response; `result` then raises `CancelledError`. Other responses are not affected.

        Returns:
            Whether this call canceled it; False if the response already finished, failed or was canceled.
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
        # `Future.cancel` is also True for a future that was canceled before.
        return not self.future.done() and self.future.cancel()


PROMPTS = "prompt_ids"
"""The key of the prompts that `Sampler.generate` reads."""


@dataclass(frozen=True)
class Capabilities:
    """Guarantees of a sampler. The launch table lists the consequences of a missing `bitwise`."""

    bitwise: bool
    """Equal seeds and weights produce equal tokens, independent of concurrent requests. Micro-batches, ranks,
    restarts and staleness 0 then do not change the results."""
    logprobs_at_temperature: bool
    """Log-probs are under the distribution at `temperature`, after all sampling parameters."""
    stop_strings: bool
    """`GenerationConfig.stop_strings` is supported."""
    lora: bool
    """`update` accepts a policy with LoRA adapters."""
    abort: bool
    """`Handle.cancel` frees the resources of a response that is being decoded, and `Handle.tokens` returns its tokens
    while it is being decoded."""
    router_experts: bool = False
    """`generate` supports `GenerationConfig.router_replay`."""
    sampling_replay: bool = False
    """`GenerationConfig.sampling_replay` is supported."""
    frees_memory: bool = False
    """`sleep` frees memory that training can use. With synchronous rollout, the sampler then sleeps in each training
    call."""


class WeightSource(Protocol):
    """Provides weights to a sampler, by the transport that the sampler supports. `PipelinableEngine` is one."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return all weights by name; see `PipelinableEngine.weights`."""
        ...

    def save(self, path: Path) -> None:
        """Write a Hugging Face folder; see `PipelinableEngine.save`."""
        ...


class Sampler(Protocol):
    """Samples responses. All methods are thread-safe.

    `realign.testing.check_sampler` checks an implementation against this contract.
    """

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        ...

    def submit(self, request: Request) -> Handle:
        """Request one response without waiting for it.

        A sampler with `Capabilities.bitwise` returns the tokens that `generate` returns for this id and index.

        Args:
            request: the prompt, its sampling parameters and its seed.

        Returns:
            The handle of the response.

        Raises:
            RuntimeError: the sampler was closed or failed.
            ValueError: the sampler cannot serve the request. `Handle.result` may raise this instead.
        """
        ...

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Sample `config.n` responses for each prompt and wait for all of them.

        Equivalent to one `submit` per response with response indices 0 to n - 1.

        Args:
            data: key `prompt_ids`, one non-empty sequence per id. The images of prompts are the keys `IMAGE_KEYS` of
                `realign.api.sample`.
            config: sampling parameters.
            seed: seed of this call.

        Returns:
            A sample of the same ids: `input_ids`, `prompt_mask`, `loss_mask`, `logprobs` (0 for prompt tokens) and
            `versions` int32 (-1 for prompt tokens) [T], `truncated` [S] bool and `response_index` [S] (0 to n - 1);
            with `config.router_replay` also `router_experts`, with `config.sampling_replay` also `sampling_mask`.

        Raises:
            RuntimeError: the sampler was closed or failed.
            ValueError: a prompt or a sampling parameter is invalid.
        """
        ...

    def update(self, source: WeightSource, version: int) -> None:
        """Update the weights, and return when the sampler uses them.

        Unfinished responses continue with the new weights. Their earlier tokens keep their version.

        Args:
            source: provides the weights.
            version: version of the weights.

        Raises:
            RuntimeError: the sampler was closed or failed.
            ValueError: the weights do not fit the sampler's model, which keeps its current weights.
        """
        ...

    def pause(self) -> None:
        """Stop sampling until `resume`. Returns when no token is being sampled.

        The sampler accepts and queues requests, and `generate` waits. `update` works. Does nothing if already paused.
        """
        ...

    def resume(self) -> None:
        """End a pause. Does nothing if not paused."""
        ...

    def sleep(self) -> None:
        """Stop sampling until `wake`, and free the memory of the KV cache if the sampler supports it.

        Requests wait as in a pause, and `update` works. Does nothing if already asleep.
        """
        ...

    def wake(self) -> None:
        """Allocate the memory that `sleep` freed, and continue unless paused. Does nothing if awake."""
        ...

    def close(self) -> None:
        """Release all resources. Waiting calls and unfinished handles raise RuntimeError. Idempotent."""
        ...

    def capabilities(self) -> Capabilities:
        """Return the guarantees of the sampler, which never change."""
        ...


def requests_of(data: SequenceSample, config: GenerationConfig, seed: int) -> list[Request]:
    """Return the requests of a `generate` call: `config.n` for each prompt, in prompt order.

    Raises:
        ValueError: an id does not have exactly one prompt, its prompt is empty, or prompts have images.
    """
    if PIXELS in data and len(data[PIXELS]):
        raise ValueError("requests contain token ids only, but the prompts have images. Sample them with `generate`.")
    for i, count in zip(data.ids, data.lengths[PROMPTS].counts.tolist(), strict=True):
        if count != 1:
            raise ValueError(f"id {i!r} has {count} sequences of {PROMPTS!r}. Give it exactly one.")
    for i, length in zip(data.ids, data.lengths[PROMPTS].flat.tolist(), strict=True):
        if not length:
            raise ValueError(f"id {i!r} has an empty prompt. Give it at least one token.")
    pairs = list(zip(data.ids, data.sequences(PROMPTS), strict=True))
    return [Request(i, j, prompt, config, seed) for i, prompt in pairs for j in range(config.n)]


def sample_of(
    data: SequenceSample, completions: Sequence[Completion], n: int, *, masks: bool = False
) -> SequenceSample:
    """Combine responses into the sample that `Sampler.generate` returns.

    Args:
        data: the prompts.
        completions: the responses, in the order of `requests_of`.
        n: responses per prompt.
        masks: whether to add `sampling_mask`.
    """
    prompts = [prompt for prompt in data.sequences(PROMPTS) for _ in range(n)]
    totals = [len(p) + len(c.ids) for p, c in zip(prompts, completions, strict=True)]
    lengths = Lengths.of([totals[i : i + n] for i in range(0, len(totals), n)])
    device = data[PROMPTS].device

    def join(parts: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tensor:
        # `torch.cat` rejects an empty list, which a call without prompts has.
        empty = torch.zeros(0, dtype=dtype, device=device)
        return torch.cat([empty, *(x.to(device, dtype) for pair in parts for x in pair)])

    pairs = list(zip(prompts, completions, strict=True))
    sampled_T = join([(torch.zeros_like(p), torch.ones_like(c.ids)) for p, c in pairs], torch.bool)
    keys = {
        "input_ids": join([(p, c.ids) for p, c in pairs], torch.int64),
        "prompt_mask": ~sampled_T,
        "loss_mask": sampled_T,
        "logprobs": join([(torch.zeros_like(p), c.logprobs) for p, c in pairs], torch.float32),
        "versions": join([(torch.full_like(p, -1), c.versions) for p, c in pairs], torch.int32),
    }
    truncated_S = torch.tensor([c.truncated for c in completions], dtype=torch.bool, device=device)
    out = SequenceSample(data.ids).with_data(keys, lengths=lengths).with_sequences(truncated=truncated_S)
    out = with_response_index(out)
    return with_masks(out, [c.mask for c in completions]) if masks else out


def generate_by_requests(
    submit: Callable[[Request], Handle], data: SequenceSample, config: GenerationConfig, *, seed: int
) -> SequenceSample:
    """Implement `Sampler.generate` with `submit`. On an error, cancels all requests of the call.

    Args:
        submit: see `Sampler.submit`.
        data: see `Sampler.generate`.
        config: sampling parameters.
        seed: seed of the call.

    Raises:
        ValueError: the config asks for choices of experts, which single responses do not include.
    """
    if config.router_replay:
        raise ValueError("generation.router_replay=true: this sampler does not return choices of experts")
    handles: list[Handle] = []
    try:
        for request in requests_of(data, config, seed):
            handles.append(submit(request))
        completions = [handle.result() for handle in handles]
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise
    return sample_of(data, completions, config.n, masks=config.sampling_replay)


@dataclass
class SamplerSpec(Settings):
    """Sampler of a role (config node `models.ROLE.sampler`). Subclasses construct samplers outside the engine.

    An external sampler serves synchronous and asynchronous rollout, evaluation, calibration and chat. The model calls
    its `update` after every change of the weights.
    """

    external: ClassVar[bool] = True
    """Whether `open` returns a sampler. If False, the role's engine samples."""

    torchrun: ClassVar[bool] = False
    """Whether the external sampler works under torchrun, where all ranks call `open` and the methods of the sampler."""

    def check(self, where: str) -> None:
        """Check the configuration before any weights are loaded.

        Args:
            where: the key of this node, for messages.

        Raises:
            ValueError: the configuration is invalid. The message names the key.
        """

    def capabilities(self) -> Capabilities:
        """Return the guarantees of the sampler, for the launch table."""
        raise NotImplementedError(f"{type(self).__name__} does not implement capabilities")

    def open(self, name: str, source: WeightSource, tokenizer: object) -> Sampler:
        """Construct the sampler with the weights of `source` as version 0.

        Args:
            name: name of the role, for messages.
            source: engine of the role.
            tokenizer: tokenizer of the role.

        Raises:
            ValueError: the sampler cannot be constructed. The message names the key.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement open")


@runtime_checkable
class SharedByRanks(Protocol):
    """An external sampler under torchrun, whose methods all ranks call together."""

    def of_rank_0(self) -> Sampler:
        """Return a sampler that rank 0 may call alone and from any thread, as in rollout=async."""
        ...


@runtime_checkable
class ConfiguresSampler(Protocol):
    """A model spec with a node `sampler`."""

    @property
    def sampler(self) -> SamplerSpec:
        """Sampler settings of the role."""
        ...


def samples_externally(spec: object) -> bool:
    """Return whether an external sampler samples for the role of this model spec."""
    return isinstance(spec, ConfiguresSampler) and spec.sampler.external
