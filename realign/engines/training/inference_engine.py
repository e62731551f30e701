"""`InferenceEngine`: forward passes and generation with one network, in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from realign.api.engine import EngineCapabilities, Forward, PostHook
from realign.api.generation import GenerationConfig
from realign.api.microbatch import MicroBatchSpec
from realign.api.sample import TOKENS, SequenceSample
from realign.engines.training.weights import check_weights, mix_into, named_weights, shapes_of
from realign.errors import ConfigError
from realign.functional.logprobs import LMHead
from realign.models.files.model_folder import EXPERTS
from realign.models.files.tokenizers import end_tokens, end_tokens_beside
from realign.models.network.encoder_decoder import EncoderDecoder
from realign.models.network.heads import value_outputs
from realign.models.network.network import Network, Run
from realign.models.network.output import ScalarHead
from realign.models.network.passes import Layout, Passes, side_by_side
from realign.samplers.in_process.compiled.exact import ExactModel
from realign.samplers.in_process.compiled.fusion import Fusion
from realign.samplers.in_process.compiled.library import CompiledDecode
from realign.samplers.in_process.compiled.trunk import library_products
from realign.samplers.in_process.rollout_model import DecodableEngine, RolloutModel, positions_of
from realign.samplers.in_process.settings import InProcessSampling


class InferenceEngine(DecodableEngine):
    """The part of an engine that does not train. `TransformersEngine` adds training, saving and checkpoints."""

    def __init__(self, name: str, network: Network, tokenizer: Any, sampling: InProcessSampling, *, seed: int) -> None:
        """Wrap a network; see `TransformersEngine` for the arguments."""
        self.name = name
        self.network = network
        self.module: Any = network.module
        self.value_head = network.value_head
        self.device = network.device
        self.tokenizer = tokenizer
        self.sampling = sampling
        compiled = CompiledDecode.on if sampling.exact else sampling.compiled_decode
        self.fusion = Fusion(network.rollout_module, compiled) if network.abilities.fuses else None
        if network.abilities.rounded is not None and compiled is not CompiledDecode.off:
            network.abilities.rounded.multiply_by = library_products()
        if sampling.exact and isinstance(network.head, LMHead):
            network.exact = ExactModel(network, self.fusion)
        self._seed = seed

    @override
    def capabilities(self) -> EngineCapabilities:
        network = self.network
        language = isinstance(self.head, LMHead)
        head = {"logprobs"} if language else {"values", "scores"}
        weights, looked_up = network.counts()
        size = f"{_magnitude(weights)} parameters on {self.device}"
        has_experts = any(getattr(network.module.config, key, None) for key in EXPERTS)
        return EngineCapabilities(
            outputs=frozenset(head | value_outputs(self.value_head.spec if self.value_head else None)),
            trainable=False,
            positions=positions_of(self.module),
            eos_token_ids=self._eos_token_ids(),
            live_head=language,
            images=network.abilities.images is not None,
            encoder_decoder=isinstance(network.abilities.unpacked, EncoderDecoder),
            router_replay=network.abilities.replay is not None,
            router_replay_obstacle=network.abilities.no_replay,
            sampling_replay=True,
            products=0 if has_experts else weights - looked_up,
            size=size + (", unpacked" if network.abilities.unpacked is not None else ""),
        )

    @property
    def head(self) -> LMHead | ScalarHead:
        """Last layer of the model."""
        return self.network.head

    @override
    def lm_head(self) -> LMHead:
        """Return the head, which shares the memory of the weights.

        Raises:
            ValueError: the model has a scalar head.
        """
        if not isinstance(head := self.head, LMHead):
            raise ValueError(f"models.{self.name} has a scalar head and no distribution over the vocabulary")
        bias_V = None if head.bias_V is None else head.bias_V.detach()
        return self.network.limit_head(replace(head, weight_VH=head.weight_VH.detach(), bias_V=bias_V))

    def use_heads(self, heads: Mapping[str, LMHead]) -> None:
        """See `PipelinableEngine.use_heads`.

        Raises:
            ConfigError: the vocabulary of a head has another size than that of this model.
        """
        for role, head in heads.items():
            if (words := len(head.weight_VH)) != self.network.words:
                fewer = min(words, self.network.words)
                raise ConfigError(
                    f"models.{role}: its head has {words} tokens, but that of models.{self.name} has "
                    f"{self.network.words}, and a loss compares their distributions over the whole vocabulary. If the "
                    f"tokens of both tokenizers are below {fewer}, set head.vocabulary={fewer} of the model with more."
                )
        self.network.heads = {**self.network.heads, **{role: head.to(self.device) for role, head in heads.items()}}

    def _eos_token_ids(self) -> tuple[int, ...]:
        """Return the end tokens of the tokenizer and of the model's `generation_config`, which has no other effect.

        A model with a scalar head has no such config. Its tokenizer is usually that of the policy, so the config beside
        the tokenizer counts.
        """
        ids = set(end_tokens(self.tokenizer))
        if (config := getattr(self.module, "generation_config", None)) is not None:
            return tuple(sorted(ids.union(end_tokens(config))))
        return tuple(sorted(ids.union(end_tokens_beside(self.tokenizer))))

    @override
    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        """Run all micro-batches without gradient and without dropout.

        Raises:
            ValueError: the hook added no key, or added one with a different number of sequences.
        """
        return self._forward(data, mb_spec, post_hook, self.network.run, parallel=True)

    def reference(self, layers: int | None = None) -> Forward:
        """Return a `forward` that uses the current policy, regardless of later training; see `Network.reference`."""
        # One pass after another: the hooks of a branch record the arguments of a layer, and don't know of which pass
        # (ADR 12).
        return partial(self._forward, run=self.network.reference(layers))

    def _forward(
        self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook, run: Run, *, parallel: bool = False
    ) -> SequenceSample:
        passes = self.network.passes(data, mb_spec, parallel=parallel)

        @torch.no_grad()
        def compute(micro_batch: tuple[SequenceSample, Layout]) -> SequenceSample:
            part, layout = micro_batch
            moved = part.to(self.device)
            return only_new_keys(post_hook(run(part, moved, layout), moved), moved)

        results = list(side_by_side(compute, passes, passes.lanes))
        self.network.forget_rounded()
        return self._restore_to(data[TOKENS].device, passes, results)

    def _restore_to(self, device: torch.device, passes: Passes, results: Sequence[SequenceSample]) -> SequenceSample:
        """Merge the results of all passes into one sample on `device`, and wait for the copies."""
        merged = passes.batches.restore(results).to(device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # `SequenceSample.to` does not wait for its copies
        return merged

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `PipelinableEngine.generate`.

        Raises:
            ValueError: the model has a scalar head.
            RealignError: see `generate.generate`.
        """
        from realign.samplers.in_process.generate import generate

        model = RolloutModel.of(self.network, self._rollout_module(), config, self.fusion)
        with torch.no_grad(), self.network.autocast():
            out = generate(
                model,
                data,
                config,
                self.sampling,
                seed=seed,
                eos_token_ids=self._eos_token_ids(),
                tokenizer=self.tokenizer,
            )
        self.network.forget_rounded()
        return out

    def _rollout_module(self) -> Any:
        """Return the transformers model that rollouts run."""
        return self.module

    @override
    def weights(self) -> dict[str, Tensor]:
        """Return the weights by name: with adapters, both adapter and base weights."""
        return named_weights(self.module, self.value_head)

    def shards(self) -> dict[str, Tensor]:
        """Return this rank's shards (`DTensor`) of the weights of the model without its value head; not a collective.

        Weights that are not sharded are plain tensors.
        """
        return named_weights(self.module, None)

    @override
    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """Load or mix in weights. Optimizer moments and averages do not change."""
        own = self.weights()
        check_weights(self.name, shapes_of(own), shapes_of(weights), mix)
        mix_into(own, weights, mix)


def _magnitude(count: int) -> str:
    """Return a number such as `135M`."""
    for unit, size in {"B": 10**9, "M": 10**6, "k": 10**3}.items():
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def only_new_keys(result: SequenceSample, micro_batch: SequenceSample) -> SequenceSample:
    """Return the keys of `result` that the micro-batch does not contain."""
    # By identity, since a hook may also replace a key that the micro-batch has.
    new = [k for k, x in result.data.items() if x is not micro_batch.data.get(k)]
    if not new:
        raise ValueError(
            f"post_hook returned only keys of the micro-batch ({', '.join(sorted(result.data))}). It must add a key."
        )
    return result.select(new)
