"""`check_sampler`: the conformance test of samplers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch

from realign.api import (
    Capabilities,
    Completion,
    GenerationConfig,
    Handle,
    Request,
    Sampler,
    SequenceSample,
    WeightSource,
)
from realign.api.sampler import requests_of
from realign.api.sampling_mask import masks_of

_RESULT_S = 300.0
"""Seconds to wait for an expected response before the check fails."""
_PAUSE_S = 0.05
"""Seconds to check that a paused sampler returns no response."""
_CALLERS = 16
"""Number of threads that call a sampler concurrently."""


@dataclass
class SamplerCase:
    """A sampler and the inputs of its checks."""

    sampler: Sampler
    prompts: SequenceSample
    config: GenerationConfig
    other: WeightSource
    seed: int = 3

    @property
    def bitwise(self) -> bool:
        """Whether equal requests must return equal tokens."""
        return self.sampler.capabilities().bitwise

    def requests(self) -> list[Request]:
        """Return the requests of a `generate` call."""
        return requests_of(self.prompts, self.config, self.seed)

    def generate(self) -> SequenceSample:
        """Sample all responses in one call."""
        return self.sampler.generate(self.prompts, self.config, seed=self.seed)

    def result(self, handle: Handle) -> Completion:
        """Wait for the response of a handle, at most `_RESULT_S` seconds."""
        return handle.result(_RESULT_S)

    def same(self, completions: Iterable[Completion], generated: SequenceSample, what: str) -> None:
        """Check that submitted responses are well-formed, and equal to `generated` if the sampler is bitwise."""
        columns = [generated.sequences(key) for key in ("input_ids", "prompt_mask", "logprobs")]
        for completion, ids, given, logprobs in zip(completions, *columns, strict=True):
            count = len(completion.ids)
            _require(
                len(completion.logprobs) == len(completion.versions) == count > 0,
                f"{what}: lengths of one response differ",
            )
            _require(count <= self.config.max_new_tokens, f"{what}: {count} tokens exceed max_new_tokens")
            if self.bitwise:
                _require(
                    completion.ids.tolist() == ids[~given].tolist(), f"{what}: tokens of submit and generate differ"
                )
                close = torch.allclose(completion.logprobs.float(), logprobs[~given].float(), atol=1e-4)
                _require(close, f"{what}: log-probs of submit and generate differ")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _raises(kind: type[BaseException], action: Callable[[], object], what: str) -> None:
    try:
        action()
    except kind:
        return
    raise AssertionError(f"{what} must raise {kind.__name__}")


def _check_generate(case: SamplerCase) -> None:
    """Check keys, dtypes and alignment of the output of `generate`."""
    out = case.generate()
    keys = {"input_ids", "prompt_mask", "loss_mask", "logprobs", "versions", "truncated", "response_index"}
    _require(out.keys == keys, f"generate returns keys {sorted(out.keys)}, not {sorted(keys)}")
    _require(out.ids == case.prompts.ids, "generate returns different ids")
    dtypes = {key: out[key].dtype for key in ("prompt_mask", "loss_mask", "versions", "truncated")}
    want = dict.fromkeys(dtypes, torch.bool) | {"versions": torch.int32}
    _require(dtypes == want, f"generate returns dtypes {dtypes}, not {want}")
    _require(torch.equal(out["loss_mask"], ~out["prompt_mask"]), "loss_mask is not the complement of prompt_mask")
    _require(bool((out["versions"][out["prompt_mask"]] == -1).all()), "a prompt token has a version other than -1")
    _require(
        bool((out["versions"][out["loss_mask"]] == case.sampler.version).all()),
        "a token has a wrong version",
    )
    _require(bool((out["logprobs"][out["prompt_mask"]] == 0).all()), "a prompt token has a log-prob other than 0")
    _require(bool((out["logprobs"] <= 0).all()), "a log-prob is positive or not a number")
    indices = list(range(case.config.n)) * len(case.prompts)
    _require(out["response_index"].tolist() == indices, "response_index is not the index of each response of a prompt")
    owners = [prompt for prompt in case.prompts.sequences("prompt_ids") for _ in range(case.config.n)]
    for prompt, ids, given in zip(owners, out.sequences(), out.sequences("prompt_mask"), strict=True):
        _require(ids[given].tolist() == prompt.tolist(), "a sequence does not start with its prompt")
    if case.bitwise:
        again = case.generate()
        _require(
            all(torch.equal(out[key], again[key]) for key in keys),
            "equal calls of generate differ",
        )
    nothing = case.sampler.generate(case.prompts.take([]), case.config, seed=case.seed)
    _require(len(nothing) == 0, "generate without prompts returns prompts")


def _check_submit(case: SamplerCase) -> None:
    """Check that `submit` returns the responses of `generate`, independent of order and concurrent requests."""
    generated, requests = case.generate(), case.requests()
    case.same([case.result(case.sampler.submit(r)) for r in requests], generated, "one request at a time")
    handles = [case.sampler.submit(r) for r in reversed(requests)]
    case.same([case.result(h) for h in reversed(handles)], generated, "all requests in reverse order")
    _require(all(h.done for h in handles), "a handle with a result is not done")
    for handle in handles:
        tokens, result = handle.tokens(), case.result(handle)
        _require(tokens.ids.tolist() == result.ids.tolist(), "tokens and result of a finished response differ")


def _check_sampling_replay(case: SamplerCase) -> None:
    """Check that each token is in its sampling mask, if the sampler records them."""
    if not case.sampler.capabilities().sampling_replay:
        return
    case.config = replace(case.config, top_k=4, sampling_replay=True)
    generated, requests = case.generate(), case.requests()
    completions = [case.result(case.sampler.submit(r)) for r in requests]
    pairs = list(zip([c.ids for c in completions], [c.mask for c in completions], strict=True))
    pairs += list(zip(generated.sequences(), masks_of(generated), strict=True))
    for ids, mask in pairs:
        _require(mask is not None and len(mask.counts_N) == len(ids), "a response has no sampling mask")
        assert mask is not None
        for token, count, kept in zip(ids, mask.counts_N, mask.ids_K.split(mask.counts_N.tolist()), strict=True):
            _require(int(count) <= 4, "a sampling mask has more than top_k tokens")
            _require(not len(kept) or int(token) in kept.tolist(), "a sampled token is not in its sampling mask")


def _check_update(case: SamplerCase) -> None:
    """Check that new weights change log-probs and versions, and that earlier tokens keep their versions."""
    before = case.generate()
    handles = [case.sampler.submit(r) for r in case.requests()]
    case.sampler.update(case.other, 1)
    _require(case.sampler.version == 1, "version is not 1 after an update to version 1")
    for handle in handles:
        versions_N = case.result(handle).versions
        _require(versions_N.tolist() == sorted(versions_N.tolist()), "versions of a response decrease")
        _require(set(versions_N.tolist()) <= {0, 1}, "a token has a version other than 0 and 1")
    after = case.generate()
    _require(set(after["versions"].tolist()) == {-1, 1}, "tokens after an update have an old version")
    _require(before["logprobs"].tolist() != after["logprobs"].tolist(), "an update does not change the log-probs")


def _check_cancel(case: SamplerCase) -> None:
    """Check that cancelling ends a response and does not affect other responses."""
    generated, requests = case.generate(), case.requests()
    case.sampler.pause()  # else the responses could end before they are canceled
    handles = [case.sampler.submit(r) for r in requests]
    cancelled = {0, len(handles) - 1}
    _require(all(handles[i].cancel() for i in sorted(cancelled)), "an unfinished response cannot be canceled")
    case.sampler.resume()
    for i in sorted(cancelled):
        _raises(CancelledError, partial(case.result, handles[i]), "result of a canceled response")
        _require(handles[i].done and not handles[i].cancel(), "a response can be cancelled twice")
        handles[i].tokens()
    others = [i for i in range(len(handles)) if i not in cancelled]
    case.same(
        [case.result(handles[i]) for i in others],
        generated.take_sequences(others),
        "some cancelled",
    )
    _require(not handles[others[0]].cancel(), "cancel returns True for a finished response")
    case.result(handles[others[0]])


def _check_pause(case: SamplerCase) -> None:
    """Check that a paused or sleeping sampler samples no tokens, queues requests and accepts new weights."""
    sampler, request = case.sampler, case.requests()[0]
    ways = {"paused": (sampler.pause, sampler.resume), "asleep": (sampler.sleep, sampler.wake)}
    for version, (state, (stop, go)) in enumerate(ways.items(), 1):
        stop()
        stop()
        handle = sampler.submit(request)
        _raises(TimeoutError, partial(handle.result, _PAUSE_S), f"result of a sampler that is {state}")
        _require(len(handle.tokens().ids) == 0 and not handle.done, f"a sampler that is {state} returns tokens")
        sampler.update(case.other, version)
        go()
        go()
        _require(set(case.result(handle).versions.tolist()) == {version}, f"an update while {state} has no effect")
    sampler.pause()
    sampler.sleep()
    handle = sampler.submit(request)
    sampler.wake()
    _raises(TimeoutError, lambda: handle.result(_PAUSE_S), "result of a sampler that is paused after wake")
    sampler.resume()
    case.result(handle)


def _check_threads(case: SamplerCase) -> None:
    """Check concurrent calls from many threads."""
    generated, requests = case.generate(), case.requests()

    def ask(number: int) -> list[Completion]:
        if number % 4 == 0:
            case.generate()
        if number % 4 == 1:
            case.sampler.submit(requests[number % len(requests)]).cancel()
        return [case.result(handle) for handle in [case.sampler.submit(r) for r in requests]]

    with ThreadPoolExecutor(_CALLERS) as pool:
        for completions in pool.map(ask, range(_CALLERS)):
            case.same(completions, generated, f"{_CALLERS} threads")


def _check_close(case: SamplerCase) -> None:
    """Check that closing ends waiting calls and that later calls raise an error."""
    finished = case.sampler.submit(case.requests()[0])
    case.result(finished)
    case.sampler.pause()
    waiting = case.sampler.submit(case.requests()[-1])
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(case.generate)
        case.sampler.close()
        _raises(RuntimeError, call.result, "generate of a sampler that is closed during the call")
    _raises(RuntimeError, lambda: case.result(waiting), "a handle of a sampler that was closed")
    _raises(RuntimeError, lambda: case.result(case.sampler.submit(case.requests()[0])), "submit to a closed sampler")
    _raises(RuntimeError, case.generate, "generate of a closed sampler")
    case.result(finished)
    case.sampler.close()


SAMPLER_CHECKS: Mapping[str, Callable[[SamplerCase], None]] = MappingProxyType(
    {
        "generate": _check_generate,
        "submit": _check_submit,
        "sampling_replay": _check_sampling_replay,
        "update": _check_update,
        "cancel": _check_cancel,
        "pause": _check_pause,
        "threads": _check_threads,
        "close": _check_close,
    }
)
"""The checks of the sampler contract, by name."""


def check_sampler(
    make: Callable[[], Sampler],
    prompts: SequenceSample,
    config: GenerationConfig,
    other: WeightSource,
    *,
    only: str | None = None,
) -> None:
    """Check an implementation of `realign.api.Sampler` against its contract.

    For samplers without `Capabilities.bitwise`, skips only the comparison of tokens and log-probs between calls.

    Args:
        make: constructs a sampler, always with the same weights as version 0. `check_sampler` closes it.
        prompts: key `prompt_ids`, at least two ids.
        config: sampling parameters with `n` of at least 2.
        other: other weights of the same model.
        only: name of one of `SAMPLER_CHECKS`; None runs all.

    Raises:
        AssertionError: the sampler violates the contract. The message names the violation.
    """
    for name in SAMPLER_CHECKS if only is None else (only,):
        sampler = make()
        try:
            _require(isinstance(sampler.capabilities(), Capabilities), "capabilities does not return Capabilities")
            _require(sampler.version == 0, "the first version is not 0")
            SAMPLER_CHECKS[name](SamplerCase(sampler, prompts, config, other))
        finally:
            sampler.close()
