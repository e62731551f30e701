"""Test the KV cache in pages on a CPU, where plain operators stand for the kernel of CUDA."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from realign.api import GenerationConfig
from realign.engines.training.transformers_engine import TransformersEngine
from realign.models.network.decoder import ModuleTrunk, PackedDecoder
from realign.models.network.heads import read_head
from realign.models.network.kernels import AttentionArgs
from realign.models.network.kv_cache import DecodeContext, KVCache, PagedDecodeContext, PagedKVCache
from realign.samplers.in_process.background import Stream
from realign.samplers.in_process.compiled.fused_layers import FusedTrunk
from realign.samplers.in_process.compiled.library import CompiledDecode
from realign.samplers.in_process.decode import RowEntry, Stopping
from realign.samplers.in_process.draw import response_keys
from realign.samplers.in_process.settings import InProcessSampling
from tests.samplers.in_process.rollouts import UNTIED, check_equal, prompts, sample_of
from tests.tiny import tiny_engine, tiny_model

PAGE = 8
CONFIG = GenerationConfig(n=3, max_new_tokens=40)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("kernels", "kv_cache", "decoder"):
        monkeypatch.setattr(f"realign.models.network.{module}.PAGE", PAGE)


def engine_of(family: str = "qwen2", **settings: Any) -> TransformersEngine:
    sampling = InProcessSampling(compiled_decode=CompiledDecode.off, **settings)
    return tiny_engine(family, model=UNTIED, sampling=sampling)


@pytest.fixture
def in_pages(monkeypatch: pytest.MonkeyPatch) -> list[PagedKVCache]:
    """Use pages from now on; return the list that gets the caches."""
    made = []
    start = PagedKVCache.__init__

    def counted(cache: PagedKVCache, *args: Any) -> None:
        start(cache, *args)
        made.append(cache)

    monkeypatch.setattr(PagedKVCache, "__init__", counted)
    monkeypatch.setattr(FusedTrunk, "runs_paged", True)
    return made


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_attention_to_pages_equals_attention_to_slots(heads, window):
    torch.manual_seed(0)
    queries, keys = heads
    args = AttentionArgs(0.3, 0.0, window, None, None)
    texts = [{0: (torch.randn(keys, n, 16), torch.randn(keys, n, 16))} for n in (3, 17, 8)]
    slots, pages = KVCache(texts[0], 3, 40), PagedKVCache(texts[0], 3, 40)
    for row, text in enumerate(texts):
        slots.fill(row, row + 1, text)
        pages.fill(row, row + 1, text)
    positions = torch.tensor([3, 17, 8])
    for _ in range(12):
        q, k, v = (torch.randn(3, n, 16) for n in (queries, keys, keys))
        want = DecodeContext(slots, positions, int(positions.max())).attend_rows(0, q, k, v, args)
        got = PagedDecodeContext(pages, positions, *pages.advance(3)).attend_joined(0, q, torch.cat([k, v], 1), args)
        torch.testing.assert_close(got, want)
        positions = positions + 1


def test_each_page_belongs_to_one_slot_or_is_free_and_rows_hold_what_they_use():
    rng, kv = random.Random(0), torch.zeros(1, 30, 4)
    cache, active = PagedKVCache({0: (kv, kv)}, 6, 40, pages=14), 0
    for _ in range(300):
        tokens = rng.randrange(1, 30)
        if active < 6 and cache.room(tokens):
            cache.fill(active, active + 1, {0: (kv[:, :tokens], kv[:, :tokens])})
            active += 1
        elif active and (rng.random() < 0.2 or not cache.reserve(active, 2)):
            row = rng.randrange(active)
            active -= 1
            cache.drop(row)
            if row < active:
                cache.move([active], [row], 40)
        elif active:
            cache.advance(active)
        held = [page for pages in cache._pages for page in pages]
        assert sorted(held + cache._free) == list(range(1, 15))
        assert all(cache.pages_of(n) <= len(p) for n, p in zip(cache._tokens[:active], cache._pages, strict=False))
        assert not any(cache._pages[active:])
        assert len(held) <= sum(cache.pages_of(min(n + 2, 40)) for n in cache._tokens[:active])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("max_slots", [None, 2, 5])
def test_rollouts_in_pages_sample_the_same(family, max_slots, in_pages):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedTrunk, "runs_paged", False)
        want = engine_of(family).generate(sample_of(prompts()), CONFIG, seed=0)
    assert not in_pages
    check_equal(engine_of(family, max_slots=max_slots).generate(sample_of(prompts()), CONFIG, seed=0), want)
    assert len(in_pages) == 1


@torch.no_grad()
def test_an_interrupted_response_keeps_its_tokens_and_continues_with_new_weights():
    config = GenerationConfig(n=2, max_new_tokens=20, fixed_length=True)
    models = [tiny_model(**UNTIED), tiny_model(seed=7, **UNTIED)]
    heads = [read_head(model) for model in models]
    decoders = [PackedDecoder(ModuleTrunk(model), paged=True) for model in models]
    stopping = Stopping(config, [1], None, len(heads[0].weight_VH), torch.device("cpu"))
    stream = Stream(decoders[0], heads[0], config, stopping, InProcessSampling(), reach=64, version=1)
    sequences_S = stream.add(prompts(), response_keys(0, range(4), 2))
    for _ in range(5):
        stream.advance()
    last = int(stream.rows[RowEntry.SEQUENCE, stream.active - 1])
    before = stream.so_far(last)
    stream._interrupt()
    assert len(stream.waiting) == 1
    assert all(torch.equal(x, y) for x, y in zip(stream.so_far(last), before, strict=True))
    stream.update(decoders[1], heads[1], 2, recompute=True)
    stream.run()
    taken, versions_SN, _, _ = stream.take(sequences_S)
    assert taken.lengths.tolist() == [20] * 8
    assert versions_SN.tolist() == [[1] * 5 + [2] * 15] * 8
    row = sequences_S.tolist().index(last)
    assert torch.equal(taken.tokens[row, :5], before[0])
