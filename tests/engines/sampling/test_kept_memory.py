from __future__ import annotations

from typing import Any

import pytest
import torch

from realign.api import GenerationConfig
from realign.engines.network import decoder as decoders
from realign.engines.network.kv_cache import KeptMemory, KVCache
from realign.engines.sampling import decode
from realign.engines.sampling.background import StreamingEngine
from realign.engines.sampling.compiled import fusion
from realign.engines.sampling.compiled.fused_layers import FusedTrunk
from realign.engines.sampling.draw import response_keys
from realign.engines.sampling.in_process import InProcessSampling
from realign.engines.training.optimizer import OptimizerSpec
from realign.engines.training.transformers_engine import TransformersEngine
from realign.runtime.ray.host import Offload
from tests.engines.sampling.rollouts import prompts, same, sample_of
from tests.tiny import random_sample, tiny_engine, train

CONFIG = GenerationConfig(n=3, max_new_tokens=12)


def addresses_of(trunk: FusedTrunk) -> list[int]:
    layers = [x for layer in trunk.layers for x in (*layer.qkv, *layer.output, *layer.gate_up, *layer.down)]
    return [x.data_ptr() for x in (*layers, trunk.turns, trunk.norm.weight) if x is not None]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record the addresses of the weights, the head and the KV cache at each decode step of a packed model."""
    found: list[list[int]] = []
    step = decoders.PackedDecoder.step
    fused: list[FusedTrunk] = []
    read = fusion._read

    def reading(*args: Any) -> FusedTrunk:
        fused[:] = [read(*args)]
        return fused[0]

    def stepping(self: Any, cache: Any, *args: Any) -> Any:
        if not fused:  # the probe of the model
            return step(self, cache, *args)
        caches = [x.data_ptr() for layer in range(len(fused[0].layers)) for x in cache.kv[layer]]
        found.append(addresses_of(fused[0]) + caches)
        return step(self, cache, *args)

    monkeypatch.setattr(fusion, "_read", reading)
    monkeypatch.setattr(decoders.PackedDecoder, "step", stepping)
    return found


def _trained(dtype: torch.dtype, keep: bool) -> TransformersEngine:
    return tiny_engine(optimizer=OptimizerSpec(lr=1e-2), dtype=dtype, sampling=InProcessSampling(keep_memory=keep))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_cache_keep_their_addresses_over_updates_and_smaller_rollouts(
    seen: list[list[int]], dtype: torch.dtype
) -> None:
    kept, plain = (_trained(dtype, keep) for keep in (True, False))
    found: list[list[int]] = []
    small = GenerationConfig(n=2, max_new_tokens=7)
    for seed, config in enumerate((CONFIG, CONFIG, small, CONFIG)):
        want = plain.generate(sample_of(prompts()), config, seed=seed)
        before = len(seen)
        assert same(kept.generate(sample_of(prompts()), config, seed=seed), want)
        found += seen[before:]
        assert found
        assert all(addresses == found[0] for addresses in found)
        for engine in (kept, plain):
            train(engine, random_sample(((9, 4), (5,)), seed=seed))


def test_a_larger_rollout_replaces_the_memory_and_the_next_one_uses_it_again(seen: list[list[int]]) -> None:
    engine = tiny_engine(sampling=InProcessSampling(keep_memory=True))
    memory = engine.resources.memory
    assert memory is not None
    sizes = []
    for tokens in (6, 40, 6, 40):
        engine.generate(sample_of(prompts()), GenerationConfig(n=2, max_new_tokens=tokens), seed=0)
        sizes.append(memory.cache_bytes)
    assert sizes[0] < sizes[1] == sizes[2] == sizes[3]
    assert seen[-1] == seen[-2]


def test_memory_is_freed_on_request_and_when_the_model_is_offloaded() -> None:
    engine = tiny_engine(sampling=InProcessSampling(keep_memory=True))
    memory = engine.resources.memory
    assert memory is not None
    for free in (engine.free_kept_memory, Offload(engine.resident, engine.free_kept_memory).leave):
        engine.generate(sample_of(prompts()), CONFIG, seed=0)
        assert memory.weight_bytes > 0 < memory.cache_bytes
        free()
        assert memory.weight_bytes == 0 == memory.cache_bytes
    tiny_engine().free_kept_memory()


def test_a_sleeping_sampler_frees_its_memory_and_wakes_with_the_same_samples() -> None:
    engine = tiny_engine("llama", sampling=InProcessSampling(keep_memory=True))
    sampler = StreamingEngine("actor", engine)
    try:
        want = sampler.generate(sample_of(prompts()), CONFIG, seed=3)
        assert engine.resources.memory is not None
        sampler.pause()  # the cache is released after the result is set
        assert engine.resources.memory.cache_bytes > 0
        sampler.sleep()
        sampler.resume()
        assert engine.resources.memory.cache_bytes == 0 == engine.resources.memory.weight_bytes
        sampler.wake()
        assert same(sampler.generate(sample_of(prompts()), CONFIG, seed=3), want)
    finally:
        sampler.close()


def test_concurrent_rollouts_of_one_engine_have_separate_caches() -> None:
    """Calls with different settings have separate rollouts, which run in alternation."""
    other = GenerationConfig(n=1, max_new_tokens=20, temperature=0.5)
    want = [tiny_engine("llama").generate(sample_of(prompts()), config, seed=1) for config in (CONFIG, other)]
    sampler = StreamingEngine("actor", tiny_engine("llama", sampling=InProcessSampling(keep_memory=True)))
    try:
        for _ in range(2):
            calls = []
            sampler.pause()
            for config in (CONFIG, other):
                data = sample_of(prompts())
                calls.append(sampler._add(data, response_keys(1, data.ids, config.n), config))
            sampler.resume()
            for call, found in zip(calls, want, strict=True):
                responses, *_ = call.result.result()
                lengths = responses.lengths.tolist()
                tokens = [x[:n].tolist() for x, n in zip(responses.tokens, lengths, strict=True)]
                masks = zip(found.sequences(), found.sequences("loss_mask"), strict=True)
                assert tokens == [ids[mask].tolist() for ids, mask in masks]
    finally:
        sampler.close()


def test_blocks_of_a_cache_belong_to_one_rollout_at_a_time() -> None:
    memory, like = KeptMemory(), torch.zeros(0)
    a, b = memory.take("x", 10, like), memory.take("x", 10, like)
    assert a.data_ptr() != b.data_ptr()
    memory.give_back("x", a)
    assert memory.take("x", 7, like) is a
    memory.give_back("x", b)
    assert len(memory.take("x", 11, like)) == 11
    assert memory.cache_bytes == 0  # the block that was too small is not kept
    memory.give_back("x", b)
    assert memory.take("x", 4, like.double()).dtype == torch.float64


def test_a_cache_that_grows_keeps_its_contents_in_kept_memory() -> None:
    memory = KeptMemory()
    kv = {0: (torch.randn(2, 3, 4), torch.randn(2, 3, 4))}
    large = KVCache(kv, 8, 64, memory)
    large.release()
    cache = KVCache(kv, 2, 4, memory)
    cache.fill(0, 2, kv)
    cache.resize(4, 32)
    for found, want in zip(cache[0], kv[0], strict=True):
        assert found.shape == (4, 2, 32, 4)
        assert torch.equal(found[:2, :, :3], want.expand(2, -1, -1, -1))


def test_kept_memory_counts_as_free_for_the_number_of_slots_and_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(sampling=InProcessSampling(keep_memory=True))
    engine.generate(sample_of(prompts()), CONFIG, seed=0)
    memory = engine.resources.memory
    assert memory is not None
    layers = engine.module.model.layers
    needed = sum(p.numel() for p in layers.parameters()) * 4
    monkeypatch.setattr(fusion, "CPU_BYTES", needed - 1)
    with pytest.raises(fusion._Unknown, match="more than the limit"):
        fusion._check_memory(layers, torch.float32, 0)
    fusion._check_memory(layers, torch.float32, memory.weight_bytes)
    monkeypatch.setattr(decode, "free_bytes", lambda device: 1000)
    run = object.__new__(decode.Rollout)
    run.resources, run.device = engine.resources, torch.device("cuda")
    assert run._cache_bytes() == int(0.5 * (1000 + memory.cache_bytes))
