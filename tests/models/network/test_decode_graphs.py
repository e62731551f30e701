"""Test CUDA graphs of decode steps on a CPU, where a capture returns the work itself."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from realign.api import GenerationConfig
from realign.models.network.decode_graphs import DecodeGraphs, Work
from realign.models.network.decoder import PackedDecoder
from realign.models.network.kv_cache import DecodeContext, KVCache
from realign.samplers.in_process import decode, rollout_model
from realign.samplers.in_process.compiled.fused_layers import FusedTrunk
from realign.samplers.in_process.compiled.library import CompiledDecode
from realign.samplers.in_process.settings import InProcessSampling
from tests.samplers.in_process.rollouts import UNTIED, check_equal, prompts, sample_of
from tests.tiny import tiny_engine

PAGE = 8
CONFIG = GenerationConfig(n=3, max_new_tokens=40)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("kernels", "kv_cache", "decoder", "decode_graphs"):
        monkeypatch.setattr(f"realign.models.network.{module}.PAGE", PAGE)


class Captures:
    """Stands for `Capture`; counts what is captured, and how often it is replayed."""

    def __init__(self) -> None:
        self.replayed: list[int] = []

    def __call__(self, work: Work) -> Work:
        number = len(self.replayed)
        self.replayed.append(0)

        def replay() -> None:
            self.replayed[number] += 1
            work()

        return replay


@pytest.fixture
def use_graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that lets the decoders of rollouts use graphs from now on."""

    def use(capture: Any) -> None:
        def graphed(trunk: Any, routers: Any, images: Any, **settings: Any) -> PackedDecoder:
            return PackedDecoder(trunk, routers, images, **{**settings, "graphs": DecodeGraphs(trunk, capture)})

        monkeypatch.setattr(rollout_model, "PackedDecoder", graphed)

    return use


def generate(family: str = "qwen2", **settings: Any) -> Any:
    sampling = InProcessSampling(compiled_decode=CompiledDecode.off, **settings)
    return tiny_engine(family, model=UNTIED, sampling=sampling).generate(sample_of(prompts()), CONFIG, seed=0)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("settings", [{}, {"max_slots": 5}, {"max_slots": 3, "sync_every": 4}])
def test_rollouts_with_graphs_sample_the_same(paged, settings, use_graphs, monkeypatch):
    monkeypatch.setattr(FusedTrunk, "runs_paged", paged)
    want = generate(**settings)
    capture = Captures()
    use_graphs(capture)
    check_equal(generate(**settings), want)
    assert capture.replayed
    assert all(capture.replayed)


def test_rows_that_need_the_same_page_wait_and_sample_the_same(use_graphs, monkeypatch):
    monkeypatch.setattr(FusedTrunk, "runs_paged", True)
    want = generate(sync_every=4)
    interrupted = []
    interrupt = decode.Rollout._interrupt
    monkeypatch.setattr(decode.Rollout, "_interrupt", lambda rollout: (interrupted.append(1), interrupt(rollout))[1])
    page = 3 * 2 * (2 * 16) * PAGE * 4  # layers, keys and values, heads x size, tokens, bytes
    monkeypatch.setattr(decode, "CACHE_BYTES", 16 * page)
    use_graphs(Captures())
    check_equal(generate(sync_every=4), want)
    assert interrupted


def test_a_capture_that_fails_is_not_tried_again_and_the_rollout_goes_on(use_graphs, caplog):
    want, tried = generate(), []

    def fail(work: Work) -> Work:
        tried.append(work)
        raise RuntimeError("operation not permitted when stream is capturing")

    use_graphs(fail)
    with caplog.at_level(logging.WARNING, "realign"):
        check_equal(generate(), want)
    assert len(tried) == 1
    assert [record.message for record in caplog.records if "CUDA graphs" in record.message] == [
        "decode steps run without CUDA graphs, since capture failed: operation not permitted when stream is capturing"
    ]


def test_graphs_do_not_keep_the_cache_nor_themselves():
    def trunk(ids_N: Tensor, positions_N: Tensor, context: Any) -> Tensor:
        return ids_N[:, None].float()

    kv = torch.zeros(1, 4, 2)
    cache = KVCache({0: (kv, kv)}, 2, 8)
    graphs = DecodeGraphs(trunk, Captures())
    memory, owner = weakref.ref(cache), weakref.ref(graphs)
    gc.disable()
    try:
        for longest in (4, 5, 6):
            graphs.step(cache, torch.arange(2), torch.full((2,), longest), longest)
        del cache  # as a sampler that sleeps frees it
        assert memory() is None
        del graphs
        assert owner() is None
    finally:
        gc.enable()


def recorded(seen: list[Any]) -> Any:
    """Return a trunk that records its inputs, and returns the tokens as hidden states of size 1."""

    def trunk(ids_N: Tensor, positions_N: Tensor, context: Any) -> Tensor:
        seen.append((ids_N.tolist(), positions_N.tolist(), context))
        return ids_N[:, None].float()

    return trunk


def test_rows_are_rounded_to_powers_of_two_lengths_to_pages_and_new_memory_is_captured_again(
    monkeypatch,
):
    monkeypatch.setattr("realign.models.network.kv_cache.BUCKET", PAGE)
    seen: list[Any] = []
    kv, capture = torch.zeros(1, 4, 2), Captures()
    graphs, cache = DecodeGraphs(recorded(seen), capture), KVCache({0: (kv, kv)}, 6, 20)

    def step(rows: int, longest: int) -> None:
        tokens = torch.arange(10, 10 + rows)
        hidden = graphs.step(cache, tokens, torch.full((rows,), longest), longest)
        assert torch.equal(hidden[:, 0], tokens.float())

    for rows, longest in ((3, 4), (3, 5), (4, 6), (4, 8), (5, 19), (6, 19), (1, 19)):
        step(rows, longest)
    shapes = [(len(ids), context._length) for ids, _, context in seen]
    assert shapes == [(4, 8), (4, 8), (4, 8), (4, 16), (6, 20), (6, 20), (1, 20)]
    assert seen[1][:2] == ([10, 11, 12, 0], [5, 5, 5, 0])
    assert all(isinstance(context, DecodeContext) for _, _, context in seen)
    assert capture.replayed == [2, 1]
    cache.resize(8, 20)
    for _ in range(2):
        step(3, 4)
    assert capture.replayed == [2, 1, 1]
