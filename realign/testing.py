"""Conformance tests for interfaces and samplers: an exact engine, random batches, and checks of the contracts.

`check_train_step(MyInterface(...), inputs)` runs your algorithm on a bigram model in float64. It fails if the weights
or the metrics depend on micro-batching, the order of prompts or values outside the loss mask.
`check_sampler(make, prompts, config, other)` fails if a sampler violates the contract of `realign.api.Sampler`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realign.api import (
    Capabilities,
    Completion,
    GenerationConfig,
    Handle,
    Lengths,
    Mean,
    MicroBatchSpec,
    Model,
    ModelInterface,
    Request,
    Sampler,
    SequenceSample,
    Stats,
    Sum,
    WeightSource,
    merge_stats,
    stat_values,
)
from realign.api.model import LossFn, LossWeightFn, PipelinableEngine, PostHook, StepIf
from realign.api.sampler import requests_of, sample_of
from realign.api.trace import keep_traces, with_responses
from realign.functional import last_true, previous


@dataclass
class BigramOutput:
    """`ModelOutput` of a bigram table of logits: the next token depends only on the current one."""

    logits_VV: Tensor
    values_V: Tensor
    ids_T: Tensor
    cu_seqlens: Tensor

    @property
    def logits(self) -> Tensor:
        """[T, V] logits after each token."""
        return self.logits_VV[self.ids_T]

    def logprobs(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> Tensor:
        """Return the log-probs of the tokens: [T]."""
        return self.logprobs_and_entropy(temperature=temperature, where_T=where_T)[0]

    def logprobs_and_entropy(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the tokens: ([T], [T]); 0 outside `where_T` and at first tokens."""
        before_T = previous(self.ids_T, self.cu_seqlens, fill=-1)
        known_T = before_T >= 0
        if where_T is not None:
            known_T = known_T & where_T
        logp_TV = (self.logits_VV[before_T.clamp(min=0)] / temperature).log_softmax(-1)
        logp_T = logp_TV.gather(-1, self.ids_T[:, None])[:, 0]
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        return torch.where(known_T, logp_T, 0), torch.where(known_T, entropy_T, 0)

    def values(self) -> Tensor:
        """Return the value of the state before each token: [T]."""
        return previous(self.values_V[self.ids_T], self.cu_seqlens, fill=0.0)

    def scores(self) -> Tensor:
        """Return the value at the last token of each sequence: [S]."""
        last_S = last_true(torch.ones_like(self.ids_T, dtype=torch.bool), self.cu_seqlens)
        return torch.where(last_S >= 0, self.values_V[self.ids_T[last_S.clamp(min=0)]], 0)


class BigramEngine(PipelinableEngine):
    """`PipelinableEngine` for a bigram table in float64, trained with SGD; small enough to verify by hand."""

    trainable = True
    outputs = frozenset({"logprobs", "values", "scores"})

    def __init__(self, *, vocabulary: int = 11, seed: int = 0, lr: float = 0.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits_VV = torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)
        self.values_V = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
        self.lr = lr

    @property
    def parameters(self) -> list[Tensor]:
        """The table of logits and the table of values."""
        return [self.logits_VV, self.values_V]

    def output(self, mb: SequenceSample) -> BigramOutput:
        """Run the forward pass of a batch."""
        return BigramOutput(self.logits_VV, self.values_V, mb["input_ids"], mb.cu_seqlens())

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """See `PipelinableEngine`."""
        parts = data.split(mb_spec)
        with torch.no_grad():
            results = [post_hook(self.output(mb), mb) for mb in parts]
        return parts.restore([r.select(r.keys - data.keys) for r in results])

    def state_dict(self) -> dict[str, Any]:
        """See `PipelinableEngine`."""
        return {"logits": self.logits_VV, "values": self.values_V}

    def fixed_weights(self) -> dict[str, Any]:
        """See `PipelinableEngine`. Empty, since all weights train."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """See `PipelinableEngine`. SGD has no state other than the weights."""
        for own, saved in zip(self.parameters, (state["logits"], state["values"]), strict=True):
            own.detach().copy_(saved)

    def weights(self) -> dict[str, Tensor]:
        """See `PipelinableEngine`."""
        return {"logits": self.logits_VV, "values": self.values_V}

    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """See `PipelinableEngine`."""
        for own, given in zip(self.parameters, (weights["logits"], weights["values"]), strict=True):
            own.lerp_(given, mix)

    def train_batch(
        self,
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        step_if: StepIf | None = None,
    ) -> Stats:
        """See `PipelinableEngine`. Uses SGD."""
        weight = loss_weight_fn(data)
        total, collected = torch.zeros((), dtype=torch.float64), list[Stats]()
        for p in self.parameters:
            p.requires_grad_(True).grad = None
        for mb in with_responses(data, mb_spec).split(mb_spec):
            loss, stats = loss_fn(self.output(mb), mb)
            if weight > 0 and loss.requires_grad:
                (loss / weight).backward()
            total = total + loss.detach()
            collected.append(merge_stats([keep_traces(stats, mb, mb_spec)]))
        merged = merge_stats(collected)
        stepping = bool(weight > 0) and (step_if is None or step_if(merged))
        for p in self.parameters:
            p.requires_grad_(False)
            if p.grad is not None and stepping:
                p -= self.lr * p.grad
        own: Stats = {"loss": Mean(total, weight), "optimizer_steps": Sum(torch.tensor(float(stepping)))}
        return merge_stats([merged, own])

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Sample up to `max_new_tokens` tokens for each response. Token 0 ends a response unless `fixed_length`."""
        logp_VV = (self.logits_VV / config.temperature).log_softmax(-1)
        found = [self._respond(request, logp_VV) for request in requests_of(data, config, seed)]
        out = sample_of(data, found, config.n)
        return out.select(out.keys - {"versions"})

    def _respond(self, request: Request, logp_VV: Tensor) -> Completion:
        config, generator = request.config, torch.Generator().manual_seed(request.response_seed)
        tokens, logps, token, ended = list[int](), list[float](), int(request.prompt_ids[-1]), False
        while len(tokens) < config.max_new_tokens and not ended:
            row_V = logp_VV[token]
            token = int(row_V.argmax() if config.greedy else torch.multinomial(row_V.exp(), 1, generator=generator))
            tokens.append(token)
            logps.append(float(row_V[token]))
            ended = token == 0 and not config.fixed_length
        ids, truncated = torch.tensor(tokens), not ended and not config.fixed_length
        return Completion(ids, torch.tensor(logps), torch.zeros_like(ids, dtype=torch.int32), truncated)

    def reduce(self, x: Tensor) -> Tensor:
        """Return `x`, since there is only one process."""
        return x

    def start_step(self, version: int) -> None:
        """Do nothing, since the engine has no schedules."""

    def save(self, path: Path) -> None:
        """Write the two tables."""
        path.mkdir(parents=True, exist_ok=True)
        np.savez(path / "bigram.npz", logits=self.logits_VV.numpy(), values=self.values_V.numpy())


def random_batch(
    seed: int = 0, *, n_prompts: int = 6, max_group: int = 4, max_tokens: int = 9, vocabulary: int = 11
) -> SequenceSample:
    """Create a batch with every key of the data layout, with groups of different sizes and tool tokens in responses.

    It also has keys of other lengths: one baseline reward and one pretraining text per prompt.

    Returns:
        A sample whose second prompt has a response without tokens, and whose last response has no reward (NaN).
    """
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, max_group + 1, n_prompts)
    counts[0] = max_group
    lengths = Lengths(counts, rng.integers(2, max_tokens + 1, counts.sum()))
    given, trained = list[np.ndarray](), list[np.ndarray]()
    for s, n in enumerate(lengths.flat.tolist()):
        prompt = n if s == counts[0] else int(rng.integers(1, n))
        given.append(np.arange(n) < prompt)
        trained.append((np.arange(n) >= prompt) & (rng.random(n) < 0.85))

    def noise(scale: float) -> Tensor:
        return torch.from_numpy(rng.normal(0, scale, lengths.total))

    base = -2.4 + noise(0.3)
    keys = {
        "input_ids": torch.from_numpy(rng.integers(0, vocabulary, lengths.total)),
        "prompt_mask": torch.from_numpy(np.concatenate(given)),
        "loss_mask": torch.from_numpy(np.concatenate(trained)),
        "logprobs": base,
        "prox_logprobs": base + noise(0.1),
        "ref_logprobs": base + noise(0.3),
        "values": noise(1.0),
        "returns": noise(1.0),
        "dense_rewards": noise(0.2),
        "advantages": noise(1.0),
        "versions": torch.zeros(lengths.total, dtype=torch.int32),
    }
    rewards_S = torch.from_numpy(rng.integers(0, 2, len(lengths.flat)).astype(np.float64))
    rewards_S[-1] = math.nan
    sample = SequenceSample(tuple(f"q{i}" for i in range(n_prompts)), keys, dict.fromkeys(keys, lengths))
    sample = sample.with_sequences(
        rewards=rewards_S,
        truncated=torch.from_numpy(rng.random(len(lengths.flat)) < 0.2),
        bootstrap_values=torch.from_numpy(rng.normal(0, 1, len(lengths.flat))),
    )
    text = Lengths(np.ones_like(counts), rng.integers(2, max_tokens + 1, n_prompts))
    sample = sample.with_data(
        {"ptx_input_ids": torch.from_numpy(rng.integers(0, vocabulary, text.total))}, lengths=text
    )
    sample = sample.with_data({"ptx_loss_mask": torch.from_numpy(rng.random(text.total) < 0.8)}, lengths=text)
    one = Lengths(np.ones_like(counts), np.ones_like(counts))
    sample = sample.with_data({"baseline_rewards": torch.from_numpy(rng.normal(0, 1, n_prompts))}, lengths=one)
    return sample.with_metadata(row=[{"answer": str(i)} for i in range(n_prompts)])


def random_preferences(
    seed: int = 0, *, n_prompts: int = 5, max_tokens: int = 9, vocabulary: int = 11
) -> SequenceSample:
    """Create a batch of preference pairs: one to three pairs per prompt, and one response without tokens.

    The chosen response is the first or the second of a pair, at random.

    Returns:
        A sample with every key of preference data, and `ref_logprobs`.
    """
    rng = np.random.default_rng(seed)
    n_pairs = rng.integers(1, 4, n_prompts)
    lengths = Lengths(2 * n_pairs, rng.integers(2, max_tokens + 1, 2 * n_pairs.sum()))
    given = []
    for s, n in enumerate(lengths.flat.tolist()):
        prompt = n if s == 2 * n_pairs[0] else int(rng.integers(1, n))
        given.append(np.arange(n) < prompt)
    prompt_T = torch.from_numpy(np.concatenate(given))
    keys = {
        "input_ids": torch.from_numpy(rng.integers(0, vocabulary, lengths.total)),
        "prompt_mask": prompt_T,
        "loss_mask": ~prompt_T,
        "ref_logprobs": torch.from_numpy(rng.normal(-2.4, 0.4, lengths.total)),
    }
    first_wins = rng.random(n_pairs.sum()) < 0.5
    labels = np.stack([first_wins, ~first_wins], 1).reshape(-1).astype(np.float32)
    margins = np.repeat(rng.random(n_pairs.sum()), 2).astype(np.float32)
    sample = SequenceSample(tuple(f"q{i}" for i in range(n_prompts)), keys, dict.fromkeys(keys, lengths))
    return sample.with_sequences(labels=torch.from_numpy(labels), margins=torch.from_numpy(margins))


@dataclass
class Trained:
    """The parameters and the metrics after a train_step."""

    parameters: list[Tensor]
    metrics: dict[str, float] = field(default_factory=dict)


def train_once(interface: ModelInterface, data: SequenceSample, mb_spec: MicroBatchSpec, *, seed: int = 0) -> Trained:
    """Run `train_step` of a copy of the interface, which may have state, on a new bigram model."""
    engine = BigramEngine(seed=seed)
    stats = deepcopy(interface).train_step(Model("actor", engine, seed=seed), data, mb_spec)
    return Trained(engine.parameters, stat_values(stats))


def check_train_step(
    interface: ModelInterface,
    inputs: Iterable[str],
    *,
    data: SequenceSample | None = None,
    whole_groups: bool = False,
    seed: int = 0,
) -> None:
    """Check that micro-batching, prompt order and values outside the loss mask do not change a `train_step`.

    Args:
        interface: the configured algorithm.
        inputs: keys that its RPC reads.
        data: a batch with these keys; None uses `random_batch`.
        whole_groups: whether the loss compares the sequences of a prompt. If True, groups are never split.
        seed: seed of the weights and the batch.

    Raises:
        AssertionError: the weights or the metrics changed. The message names the change and the difference.
    """
    data = (random_batch(seed) if data is None else data).select(inputs)
    whole = train_once(interface, data, MicroBatchSpec(), seed=seed)
    lengths = data.lengths["input_ids"]
    limit = int((lengths.per_prompt if whole_groups else lengths.flat).max())
    for spec in (MicroBatchSpec(n_microbatches=2), MicroBatchSpec(limit)):
        _assert_same(whole, train_once(interface, data, spec, seed=seed), f"cut by {spec}", tolerance=1e-10)
    if interface.plan().n_minibatches == 1:
        order = np.random.default_rng(seed).permutation(len(data))
        shuffled = train_once(interface, data.take(order), MicroBatchSpec(n_microbatches=2), seed=seed)
        _assert_same(whole, shuffled, "prompts in another order", tolerance=1e-10)
    for fill in (math.nan, math.inf):
        dirty = train_once(interface, _fill_masked(data, fill), MicroBatchSpec(), seed=seed)
        _assert_same(whole, dirty, f"{fill} in every masked slot", tolerance=0.0)


def _fill_masked(data: SequenceSample, fill: float) -> SequenceSample:
    masked_T = ~data["loss_mask"]
    token_keys = [
        k for k, x in data.data.items() if data.lengths[k] == data.lengths["input_ids"] and x.dtype.is_floating_point
    ]
    return data.with_tokens(**{k: data[k].masked_fill(masked_T, fill) for k in token_keys})


def _assert_same(a: Trained, b: Trained, what: str, *, tolerance: float) -> None:
    for x, y in zip(a.parameters, b.parameters, strict=True):
        difference = float((x - y).abs().max())
        if not difference <= tolerance:
            raise AssertionError(f"{what}: the weights after a train_step differ by {difference:.3g}")
    if a.metrics.keys() != b.metrics.keys():
        raise AssertionError(f"{what}: metrics {sorted(a.metrics.keys() ^ b.metrics.keys())} come and go")
    for name, value in a.metrics.items():
        other = b.metrics[name]
        if not abs(value - other) <= max(tolerance, 1e-5 if tolerance else 0.0) * max(1.0, abs(value)):
            raise AssertionError(f"{what}: metric {name} is {value!r} or {other!r}")


RESULT_S = 300.0
"""Seconds to wait for an expected response before the check fails."""
PAUSE_S = 0.05
"""Seconds to check that a paused sampler returns no response."""
CALLERS = 16
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
        """Wait for the response of a handle, at most `RESULT_S` seconds."""
        return handle.result(RESULT_S)

    def same(self, found: Iterable[Completion], generated: SequenceSample, what: str) -> None:
        """Check that submitted responses are well-formed, and equal to `generated` if the sampler is bitwise."""
        columns = [generated.sequences(key) for key in ("input_ids", "prompt_mask", "logprobs")]
        for one, ids, given, logprobs in zip(found, *columns, strict=True):
            count = len(one.ids)
            _require(len(one.logprobs) == len(one.versions) == count > 0, f"{what}: lengths of one response differ")
            _require(count <= self.config.max_new_tokens, f"{what}: {count} tokens exceed max_new_tokens")
            if self.bitwise:
                _require(one.ids.tolist() == ids[~given].tolist(), f"{what}: submit and generate give other tokens")
                close = torch.allclose(one.logprobs.float(), logprobs[~given].float(), atol=1e-4)
                _require(close, f"{what}: submit and generate give other log-probs")


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
    keys = {"input_ids", "prompt_mask", "loss_mask", "logprobs", "versions", "truncated"}
    _require(out.keys == keys, f"generate returns keys {sorted(out.keys)}, not {sorted(keys)}")
    _require(out.ids == case.prompts.ids, "generate returns other ids")
    dtypes = {key: out[key].dtype for key in ("prompt_mask", "loss_mask", "versions", "truncated")}
    want = dict.fromkeys(dtypes, torch.bool) | {"versions": torch.int32}
    _require(dtypes == want, f"generate returns dtypes {dtypes}, not {want}")
    _require(torch.equal(out["loss_mask"], ~out["prompt_mask"]), "loss_mask is not the complement of prompt_mask")
    _require(bool((out["versions"][out["prompt_mask"]] == -1).all()), "a prompt token has a version other than -1")
    _require(bool((out["versions"][out["loss_mask"]] == case.sampler.version).all()), "a token has another version")
    _require(bool((out["logprobs"][out["prompt_mask"]] == 0).all()), "a prompt token has a log-prob other than 0")
    _require(bool((out["logprobs"] <= 0).all()), "a log-prob is positive or not a number")
    owners = [prompt for prompt in case.prompts.sequences("prompt_ids") for _ in range(case.config.n)]
    for prompt, ids, given in zip(owners, out.sequences(), out.sequences("prompt_mask"), strict=True):
        _require(ids[given].tolist() == prompt.tolist(), "a sequence does not start with its prompt")
    if case.bitwise:
        again = case.generate()
        _require(all(torch.equal(out[key], again[key]) for key in keys), "generate does not repeat itself")
    nothing = case.sampler.generate(case.prompts.take([]), case.config, seed=case.seed)
    _require(len(nothing) == 0, "generate of no prompts returns some")


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


def _check_update(case: SamplerCase) -> None:
    """Check that new weights change log-probs and versions, and that earlier tokens keep their versions."""
    before = case.generate()
    handles = [case.sampler.submit(r) for r in case.requests()]
    case.sampler.update(case.other, 1)
    _require(case.sampler.version == 1, "version does not follow update")
    for handle in handles:
        versions_N = case.result(handle).versions
        _require(versions_N.tolist() == sorted(versions_N.tolist()), "versions of a response decrease")
        _require(set(versions_N.tolist()) <= {0, 1}, "a token has a version that never sampled")
    after = case.generate()
    _require(set(after["versions"].tolist()) == {-1, 1}, "tokens after an update have an old version")
    _require(before["logprobs"].tolist() != after["logprobs"].tolist(), "an update changes no log-prob")


def _check_cancel(case: SamplerCase) -> None:
    """Check that cancelling ends a response and does not affect other responses."""
    generated, requests = case.generate(), case.requests()
    case.sampler.pause()  # else the responses could end before they are cancelled
    handles = [case.sampler.submit(r) for r in requests]
    cancelled = {0, len(handles) - 1}
    _require(all(handles[i].cancel() for i in sorted(cancelled)), "an unfinished response cannot be cancelled")
    case.sampler.resume()
    for i in sorted(cancelled):
        _raises(CancelledError, partial(case.result, handles[i]), "result of a cancelled response")
        _require(handles[i].done and not handles[i].cancel(), "a response is cancelled twice")
        handles[i].tokens()
    others = [i for i in range(len(handles)) if i not in cancelled]
    case.same([case.result(handles[i]) for i in others], generated.take_sequences(others), "beside cancelled ones")
    _require(not handles[others[0]].cancel(), "a finished response is cancelled")
    case.result(handles[others[0]])


def _check_pause(case: SamplerCase) -> None:
    """Check that a paused or sleeping sampler samples no tokens, queues requests and accepts new weights."""
    sampler, request = case.sampler, case.requests()[0]
    ways = {"paused": (sampler.pause, sampler.resume), "asleep": (sampler.sleep, sampler.wake)}
    for version, (state, (stop, go)) in enumerate(ways.items(), 1):
        stop()
        stop()
        handle = sampler.submit(request)
        _raises(TimeoutError, partial(handle.result, PAUSE_S), f"result of a sampler that is {state}")
        _require(len(handle.tokens().ids) == 0 and not handle.done, f"a sampler that is {state} samples")
        sampler.update(case.other, version)
        go()
        go()
        _require(set(case.result(handle).versions.tolist()) == {version}, f"an update while {state} has no effect")
    sampler.pause()
    sampler.sleep()
    handle = sampler.submit(request)
    sampler.wake()
    _raises(TimeoutError, lambda: handle.result(PAUSE_S), "result of a sampler that is awake and paused")
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

    with ThreadPoolExecutor(CALLERS) as pool:
        for found in pool.map(ask, range(CALLERS)):
            case.same(found, generated, f"{CALLERS} threads")


def _check_close(case: SamplerCase) -> None:
    """Check that closing ends waiting calls and that later calls raise an error."""
    finished = case.sampler.submit(case.requests()[0])
    case.result(finished)
    case.sampler.pause()
    waiting = case.sampler.submit(case.requests()[-1])
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(case.generate)
        case.sampler.close()
        _raises(RuntimeError, call.result, "generate of a sampler that is closed meanwhile")
    _raises(RuntimeError, lambda: case.result(waiting), "a handle of a sampler that was closed")
    _raises(RuntimeError, lambda: case.result(case.sampler.submit(case.requests()[0])), "submit to a closed sampler")
    _raises(RuntimeError, case.generate, "generate of a closed sampler")
    case.result(finished)
    case.sampler.close()


SAMPLER_CHECKS: Mapping[str, Callable[[SamplerCase], None]] = MappingProxyType(
    {
        "generate": _check_generate,
        "submit": _check_submit,
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
            _require(isinstance(sampler.capabilities(), Capabilities), "capabilities returns no Capabilities")
            _require(sampler.version == 0, "the first version is not 0")
            SAMPLER_CHECKS[name](SamplerCase(sampler, prompts, config, other))
        finally:
            sampler.close()


__all__ = [
    "SAMPLER_CHECKS",
    "BigramEngine",
    "check_sampler",
    "check_train_step",
    "random_batch",
    "random_preferences",
    "train_once",
]
