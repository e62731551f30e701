from __future__ import annotations

import pytest
import torch

from realign.functional.packed import cu_seqlens_of
from realign.models.network.attention import PackedContext
from realign.models.network.kernels import AttentionArgs
from realign.models.network.kv_cache import DecodeContext, KVCache, PrefillContext

PROMPTS = (5, 1, 40)
STEPS = 4


def qkv(seed, tokens, query_heads, heads, size, value_size):
    g = torch.Generator().manual_seed(seed)
    shapes = ((query_heads, size), (heads, size), (heads, value_size))
    return tuple(torch.randn(1, h, tokens, d, generator=g) for h, d in shapes)


def args(window=None, softcap=None, sinks_H=None):
    return AttentionArgs(0.3, 0.0, window, softcap, sinks_H)


def decode_and_reference(layers, slots=4, dtype=torch.float32):
    """Return attention outputs of prefill and `STEPS` decode steps, and of packed attention over
    the whole sequences."""
    total = [n + STEPS for n in PROMPTS]
    whole = [tuple(x.to(dtype) for x in qkv(i, sum(total), *shape)) for i, (shape, _) in enumerate(layers)]
    starts = [sum(total[:i]) for i in range(len(total))]
    prompt_rows = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, PROMPTS, strict=True)])
    prefill = PrefillContext(cu_seqlens_of(PROMPTS), lengths=PROMPTS)
    for i, (_, a) in enumerate(layers):
        prefill.attend(i, *(x[:, :, prompt_rows] for x in whole[i]), a)
    kv = list(prefill.per_sequence())
    cache = KVCache(kv[0], slots, max(total))
    for row, prompt in enumerate(kv):
        cache.fill(row, row + 1, prompt)
    want = [PackedContext(cu_seqlens_of(total)).attend(0, *x, a) for x, (_, a) in zip(whole, layers, strict=True)]
    for step in range(STEPS):
        positions_B = torch.tensor(PROMPTS) + step
        rows = torch.tensor(starts) + positions_B
        context = DecodeContext(cache, positions_B, int(positions_B.max()))
        for i, (_, a) in enumerate(layers):
            got = context.attend(i, *(x[:, :, rows] for x in whole[i]), a)
            yield got, want[i][:, rows]


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks_H", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_soft_caps_sinks_and_windows(softcap, sinks_H, window):
    for got, want in decode_and_reference([((4, 2, 8, 8), args(window, softcap, sinks_H))]):
        assert torch.allclose(got, want, atol=1e-6)


def test_move_copies_rows_and_fill_serves_a_whole_group():
    kv = {3: (torch.randn(2, 5, 8), torch.randn(2, 5, 4))}
    cache = KVCache(kv, slots=6, length=9)
    cache.fill(2, 5, kv)
    keys, values = cache[3]
    assert keys.shape == (6, 2, 9, 8)
    assert values.shape == (6, 2, 9, 4)
    for row in (2, 3, 4):
        assert torch.equal(keys[row, :, :5], kv[3][0])
        assert torch.equal(values[row, :, :5], kv[3][1])
    assert not keys[[0, 1, 5]].any()
    cache.move(torch.tensor([4]), torch.tensor([0]), 3)
    assert torch.equal(keys[0, :, :3], kv[3][0][:, :3])
    assert not keys[0, :, 3:].any()


@pytest.mark.parametrize(
    "shapes",
    [
        [((2, 4), (2, 4)), ((2, 4), (2, 4))],
        [((2, 4), (1, 6)), ((2, 4), (1, 6))],
        [((2, 4), (1, 6)), ((1, 6), (2, 4))],  # one layer's keys have the shape of the other's values
        [((1, 4), (1, 4)), ((2, 8), (2, 8)), ((1, 4), (1, 4))],
    ],
)
def test_layers_of_any_shapes_keep_their_own_keys_and_values(shapes):
    prompt = {i: tuple(torch.randn(heads, 3, size) for heads, size in kv) for i, kv in enumerate(shapes)}
    cache = KVCache(prompt, slots=3, length=8)
    cache.fill(2, 3, prompt)
    cache.move([2], [0], 3)
    for _ in range(2):
        cache.resize(cache.slots + 1, cache.length + 2)
        for layer, kv in prompt.items():
            for found, x in zip(cache[layer], kv, strict=True):
                assert found.shape == (cache.slots, len(x), cache.length, x.shape[2])
                assert found[0, :, :3].equal(x)
                assert found.is_contiguous()
