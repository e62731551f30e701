"""`StreamingEngine`: the in-process sampler of asynchronous rollouts, whose weights can change while it samples.

Callers wait in their own threads, or keep handles. A `DecodingLoop` decodes the sequences of all callers together. New
weights take effect between two decode steps. Unfinished responses continue under the new weights (interruptible
generation, arXiv:2505.24298). Every token carries the version of the weights that sampled it.

Shapes: S sequences, N tokens of the longest response, T packed tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from realign.api.engine import PipelinableEngine, PostHook
from realign.api.generation import GenerationConfig
from realign.api.in_process_sampler import IN_PROCESS
from realign.api.microbatch import MicroBatchSpec
from realign.api.requests import Completion, Request, Tokens
from realign.api.router_experts import with_experts
from realign.api.sample import SequenceSample
from realign.api.sampler import PROMPTS, Capabilities, WeightSource
from realign.engines.sampling.calls import Call
from realign.engines.sampling.counter_rng import response_keys
from realign.engines.sampling.decoding_loop import DecodingLoop
from realign.engines.sampling.rollout import check_logprobs, checked_prompts, packed
from realign.engines.sampling.samplable import Samplable
from realign.engines.shared_model import SharedEngine
from realign.errors import ConfigError


class StreamingHandle:
    """Handle of one response of a `StreamingEngine`. Implements `realign.api.requests.Handle`."""

    def __init__(self, request: Request, loop: DecodingLoop, call: Call) -> None:
        """Wrap a call that has exactly one sequence."""
        self.request = request
        self._loop = loop
        self._call = call

    @property
    def done(self) -> bool:
        """See `Handle.done`."""
        return self._call.result.done()

    def tokens(self) -> Tokens:
        """See `Handle.tokens`. Waits until the current decode step ends.

        Raises:
            RuntimeError: the sampler was closed before the response ended.
        """
        if not self._call.result.done():
            return self._tokens(self._loop.so_far(self._call))
        if self._call.result.exception() is None:
            return self.result()
        return self._tokens(self._call.kept)

    def _tokens(self, found: tuple[Tensor, Tensor, Tensor] | None) -> Tokens:
        device = self.request.prompt_ids.device
        return Tokens.none(self.request.prompt_ids) if found is None else Tokens(*(x.to(device) for x in found))

    def result(self, timeout_s: float | None = None) -> Completion:
        """See `Handle.result`."""
        responses, versions_SN, _ = self._call.result.result(timeout_s)
        count, device = int(responses.lengths[0]), self.request.prompt_ids.device
        check_logprobs(responses.logprobs)
        found = (responses.tokens, responses.logprobs, versions_SN)
        ids, logprobs, versions = (x[0, :count].to(device) for x in found)
        return Completion(ids, logprobs, versions, bool(responses.truncated[0]))

    def cancel(self) -> bool:
        """See `Handle.cancel`. The slot is free before the next decode step."""
        return self._loop.cancel(self._call)


class StreamingEngine(SharedEngine):
    """Samples from a dedicated engine for callers in many threads.

    Implements `realign.api.Sampler` and `realign.api.PipelinableEngine`. All methods are thread-safe. A dedicated
    thread decodes, and runs the work that other threads submit between two decode steps.

    A call that is sampled alone returns the same bits as the wrapped engine's `generate`. When calls are sampled
    concurrently, log-probs may differ by rounding. Tokens may differ where rounding changes the draw.

    Args:
        name: role of the model, used in messages.
        engine: a copy of the policy that no other component uses.
        version: policy version of its weights.
        recompute: whether a weight update recomputes the KV cache of unfinished responses; if False, they keep the
            keys and values of the old weights.

    Raises:
        ConfigError: the engine cannot generate.
    """

    engine: Samplable

    def __init__(self, name: str, engine: PipelinableEngine, *, version: int = 0, recompute: bool = True) -> None:
        if not isinstance(engine, Samplable) or "logprobs" not in engine.outputs:
            raise ConfigError(f"models.{name}: {type(engine).__name__} cannot sample asynchronously. Set rollout=sync.")
        if engine.encoder_decoder:
            raise ConfigError(f"models.{name}: encoder-decoder models cannot sample asynchronously. Set rollout=sync.")
        super().__init__(name, name, engine)
        self.loop = DecodingLoop(name, engine, version=version, recompute=recompute)

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return self.loop.version

    def capabilities(self) -> Capabilities:
        """See `Sampler.capabilities`."""
        return replace(IN_PROCESS, abort=True)

    def submit(self, request: Request) -> StreamingHandle:
        """See `Sampler.submit`. Each request prefills its prompt; `generate` shares the prefill between responses."""
        prompt = SequenceSample.from_sequences([request.id], {PROMPTS: [[request.prompt_ids]]})
        keys_S = response_keys(request.seed, [request.id], request.response_index + 1)[-1:]
        return StreamingHandle(request, self.loop, self._add(prompt, keys_S, request.config))

    def _add(self, data: SequenceSample, keys_S: Tensor, config: GenerationConfig) -> Call:
        """Validate the prompts and queue a call for the loop."""
        found = checked_prompts(self.engine.module, data, config, self.engine.network.images)
        prompts = [p.to(self.engine.device) for p in found]
        call = Call(prompts, keys_S, replace(config, n=1))
        self.loop.add(call)
        return call

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `Sampler.generate`.

        Raises:
            RuntimeError: the engine was closed, or an error ended its loop.
        """
        if not len(data):
            return self.engine.generate(data, config, seed=seed).with_tokens(versions=torch.zeros(0).int())
        call = self._add(data, response_keys(seed, data.ids, config.n), config)
        responses, versions_SN, experts = call.result.result()
        out = packed(data, responses, config.n)
        sampled_SN = torch.arange(versions_SN.shape[1], device=versions_SN.device) < responses.lengths[:, None]
        versions_T = torch.full_like(out["input_ids"], -1, dtype=torch.int32)
        versions_T[out["loss_mask"]] = versions_SN[sampled_SN].to(versions_T.device)
        out = out.with_tokens(versions=versions_T)
        return with_experts(out, experts) if config.router_replay else out

    def update(self, source: WeightSource, version: int) -> None:
        """See `Sampler.update`. The next decode step samples with these weights.

        Raises:
            RuntimeError: the engine was closed, or an error ended its loop.
            ValueError: names or shapes of the weights do not match the model.
        """
        self.loop.load_weights(source.weights(), version)

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """See `PipelinableEngine.forward`. Decoding pauses during the call."""
        return self.loop.between_steps(lambda: self.engine.forward(data, mb_spec, post_hook))

    def pause(self) -> None:
        """See `Sampler.pause`. Returns after the current decode step."""
        self.loop.pause(True)

    def resume(self) -> None:
        """See `Sampler.resume`."""
        self.loop.pause(False)

    def sleep(self) -> None:
        """See `Sampler.sleep`. Frees the KV cache of all responses, and keeps the tokens sampled so far."""
        self.loop.sleep()

    def wake(self) -> None:
        """See `Sampler.wake`. Recomputes the KV cache from prompts and the tokens sampled so far."""
        self.loop.wake()

    def close(self) -> None:
        """Stop the loop. Calls that wait for responses raise RuntimeError."""
        self.loop.close()
