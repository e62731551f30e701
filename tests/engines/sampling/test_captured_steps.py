"""Test captured decode steps with fake CUDA graphs, which run on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from realign.api import GenerationConfig
from realign.engines import InProcessSampling, OptimizerSpec, TransformersModel
from realign.engines.network.decoder import PackedDecoder
from realign.engines.sampling.background import StreamingEngine
from realign.engines.sampling.captured_steps import MOST_CACHES, SHORTEST, CapturedDecoder, CapturedSteps
from realign.engines.sampling.compiled.fusion import Fusion
from realign.engines.sampling.compiled.library import CompiledDecode
from realign.errors import ConfigError
from tests.engines.sampling.rollouts import UNTIED, prompts, responses, sample_of
from tests.tiny import STEP, random_sample, save_tiny, tiny_engine, tiny_model, train


class Recorder(TorchDispatchMode):
    """Records the operators of a step with their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.kernels.append((func, args, kwargs or {}, [x for x in tree_leaves(out) if isinstance(x, Tensor)]))
        return out


class StandIn:
    """Repeats the operators of a step on the tensors of the first run, as a graph repeats kernels on addresses.

    The code of the step does not run again, so weights or a cache at other addresses would give the old results. A
    replay writes results to the memory of the first run, and raises an error if a shape has changed.
    """

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Run the function twice, as a capture does, since the first run may allocate."""
        run()
        with Recorder() as record:
            result = run()
        self.captured += 1

        def replay() -> Tensor:
            for func, args, kwargs, outputs in record.kernels:
                again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
                for x, new in zip(outputs, again, strict=True):
                    assert x.shape == new.shape
                    if x.data_ptr() != new.data_ptr():
                        x.copy_(new)
            self.replayed += 1
            return result

        return replay


def captured_engine(optimizer: OptimizerSpec | None = None, **settings: Any) -> tuple[Any, StandIn]:
    sampling = InProcessSampling(keep_memory=True, compiled_decode=CompiledDecode.off, **settings)
    engine = tiny_engine(model=UNTIED, optimizer=optimizer, sampling=sampling)
    stand_in = StandIn()
    engine.resources = replace(engine.resources, captured=CapturedSteps(stand_in))
    return engine, stand_in


CONFIG = GenerationConfig(n=3, max_new_tokens=12, temperature=0.8, stop_token_ids=tuple(range(2, 8)))


@pytest.mark.parametrize("settings", [{}, {"sync_every": 4}, {"max_slots": 5}], ids=str)
def test_captured_steps_sample_the_same_over_weight_updates_and_capture_nothing_again(settings: dict[str, Any]) -> None:
    engine, stand_in = captured_engine(optimizer=STEP, **settings)
    sampling = InProcessSampling(compiled_decode=CompiledDecode.off, **settings)
    plain = tiny_engine(model=UNTIED, sampling=sampling, optimizer=STEP)
    found = []
    for seed in range(3):
        got, want = (x.generate(sample_of(prompts()), CONFIG, seed=0) for x in (engine, plain))
        assert responses(got) == responses(want)
        torch.testing.assert_close(got["logprobs"], want["logprobs"], atol=1e-5, rtol=0)
        found.append(stand_in.captured)
        for x in (engine, plain):
            train(x, random_sample(((9, 4), (5,)), seed=seed))
    assert 0 < found[0] <= 5  # one for each power of two of the number of rows
    assert found[2] == found[1]
    assert stand_in.replayed > 3 * found[0]


def test_the_stand_in_reads_the_addresses_of_the_capture_only() -> None:
    places = [torch.ones(4)]
    replay = StandIn().capture(lambda: places[0] * 2 + 1)
    places[0].fill_(5)
    assert torch.equal(replay(), torch.full((4,), 11.0))
    places[0] = torch.zeros(4)
    assert torch.equal(replay(), torch.full((4,), 11.0))


@torch.no_grad()
def test_other_addresses_are_captured_again_and_steps_of_few_caches_are_kept() -> None:
    """Caches of concurrent rollouts alternate."""
    model, stand_in = tiny_model(**UNTIED), StandIn()
    trunk = Fusion(model, CompiledDecode.off).trunk(20, torch.float32)
    decoder, steps = PackedDecoder(trunk), CapturedSteps(stand_in)
    captured = CapturedDecoder(trunk, steps)
    texts = prompts((5, 3))
    _, states = decoder.prefill(texts)
    caches = [decoder.new_cache(states[0], 2, 20) for _ in range(MOST_CACHES + 1)]
    tokens, positions = torch.tensor([4, 7]), torch.tensor([5, 3])
    want = decoder.step(_filled(decoder.new_cache(states[0], 2, 20), states), tokens, positions, 5)
    for _ in range(2):
        for cache in caches[:MOST_CACHES]:
            got = captured.step(_filled(cache, states), tokens, positions, 5)
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert stand_in.captured == MOST_CACHES
    captured.step(_filled(caches[-1], states), tokens, positions, 5)
    assert len(steps) == 1


def _filled(cache: Any, states: list[Any]) -> Any:
    for slot, state in enumerate(states):
        cache.fill(slot, slot + 1, state)
    return cache


def test_freed_memory_drops_the_captured_steps() -> None:
    engine, stand_in = captured_engine()
    engine.generate(sample_of(prompts()), CONFIG, seed=0)
    steps = engine.resources.captured
    assert len(steps) == stand_in.captured > 0
    engine.free_kept_memory()
    assert len(steps) == 0
    engine.generate(sample_of(prompts()), CONFIG, seed=0)
    assert stand_in.captured == 2 * len(steps)
    assert all(length <= SHORTEST for _, _, length in steps._steps)


def test_asynchronous_rollouts_replay_captured_steps() -> None:
    engine, stand_in = captured_engine()
    sampler = StreamingEngine("actor", engine)
    try:
        got = sampler.generate(sample_of(prompts()), CONFIG, seed=3)
    finally:
        sampler.close()
    plain = tiny_engine(model=UNTIED, sampling=InProcessSampling(compiled_decode=CompiledDecode.off))
    want = plain.generate(sample_of(prompts()), CONFIG, seed=3)
    assert responses(got) == responses(want)
    assert stand_in.replayed > 0


def test_graphs_without_a_cuda_device_or_kept_memory_are_rejected(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_tiny(tmp_path / "m"))
    spec = TransformersModel(folder, device="cpu", sampler=InProcessSampling(cuda_graphs=True, keep_memory=True))
    message = r"models\.actor\.sampler\.cuda_graphs=true: torch finds no CUDA device\. Set cuda_graphs=false\."
    with pytest.raises(ConfigError, match=message):
        spec.check("actor")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"Set models\.actor\.sampler\.keep_memory=true\."):
        TransformersModel(folder, device="cpu", sampler=InProcessSampling(cuda_graphs=True)).check("actor")
    with pytest.raises(ConfigError, match=r"models\.actor\.sampler\.cuda_graphs=true: requires device=cuda"):
        tiny_engine(sampling=InProcessSampling(cuda_graphs=True, keep_memory=True))
