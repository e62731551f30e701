from __future__ import annotations

import numpy as np
import pytest
import torch

from realign.api import GenerationConfig, SequenceSample
from realign.engines.network.heads import read_head
from realign.engines.sampling.counter_rng import GAMMA, response_keys, uniforms
from realign.engines.sampling.rollout import generate
from realign.engines.sampling.rollout_model import RolloutModel
from tests.tiny import resources, tiny_model

MASK = 2**64 - 1


def splitmix64(state):
    """Return one number of SplitMix64, computed with Python integers as in the original code."""
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def test_numbers_are_those_of_splitmix64():
    assert splitmix64(GAMMA) == 0xE220A8397B1DCDAF  # first number of seed 0 in the reference implementations
    keys = [0, 1, -1, 2**62 + 12345, -(2**63)]
    first = [0, 3, 7, 1000, 0]
    found_KB = uniforms(torch.tensor(keys), torch.tensor(first), 4)
    for b, (key, start) in enumerate(zip(keys, first, strict=True)):
        want = [(splitmix64((key + (start + i + 1) * GAMMA) & MASK) >> 11) / 2**53 for i in range(4)]
        assert found_KB[:, b].tolist() == want


def test_keys_depend_on_seed_id_and_response_alone():
    keys = response_keys(3, ["a", "b"], 4)
    assert torch.equal(response_keys(3, ["b", "x", "a"], 4).view(3, 4)[[2, 0]].flatten(), keys)
    assert torch.equal(response_keys(3, ["a", "b"], 2), keys.view(2, 4)[:, :2].flatten())
    assert not set(response_keys(4, ["a", "b"], 4).tolist()) & set(keys.tolist())
    assert torch.equal(response_keys(3, [7], 1), response_keys(3, ["7"], 1))
    assert len(set(response_keys(0, range(1000), 16).tolist())) == 16_000


def test_numbers_are_uniform_within_a_stream_across_streams_and_in_pairs():
    keys_B = response_keys(11, range(2000), 8)
    found_KB = uniforms(keys_B, torch.zeros_like(keys_B), 8).numpy()
    assert found_KB.min() >= 0
    assert found_KB.max() < 1
    for x in (found_KB.flatten(), found_KB[0], found_KB[5], uniforms(keys_B[:1], torch.zeros(1).long(), 16_000)[:, 0]):
        counts, _ = np.histogram(x, bins=64, range=(0, 1))
        expected = len(x) / 64
        # 63 degrees of freedom: random numbers exceed this once in 60,000 tests
        assert ((counts - expected) ** 2 / expected).sum() < 120
    neighbours = [(found_KB[0], found_KB[1]), (found_KB[:, 0::2].ravel(), found_KB[:, 1::2].ravel())]
    for x, y in neighbours:  # positions of a response, and responses of a prompt
        counts, _, _ = np.histogram2d(x, y, bins=8, range=((0, 1), (0, 1)))
        expected = len(x) / 64
        assert ((counts - expected) ** 2 / expected).sum() < 120


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def sampled(model, ids, max_slots=None, **config):
    prompts = {i: [2 + i % 5, 3, 2 + (7 * i) % 11][: 1 + i % 3] for i in range(12)}
    data = SequenceSample.from_sequences(ids, {"prompt_ids": [[prompts[i]] for i in ids]})
    settings = GenerationConfig(n=3, max_new_tokens=20, **config)
    whole = RolloutModel(model, read_head(model))
    out = generate(whole, data, settings, resources(max_slots=max_slots), seed=5, eos_token_ids=[1], tokenizer=None)
    return {i: [x.tolist() for x in one.sequences()] for i, one in zip(ids, out.unpack(), strict=True)}


@pytest.mark.parametrize("max_slots", [1, 3, 7])
def test_tokens_do_not_depend_on_slots_or_waves(model, max_slots):
    assert sampled(model, range(12), max_slots=max_slots) == sampled(model, range(12))


def test_tokens_do_not_depend_on_the_cut_or_the_order_of_the_batch(model):
    """This makes runs with 1, 2 and 3 ranks sample the same tokens."""
    whole = sampled(model, range(12))
    assert sampled(model, [11, 3, 7, 0, 5, 1, 2, 4, 6, 8, 9, 10]) == whole
    parts = [sampled(model, ids) for ids in ([0, 4, 8], [5, 1], [2, 3, 6, 7, 9, 10, 11])]
    assert {i: x for part in parts for i, x in part.items()} == whole
    assert len({tuple(x) for x in whole[0]}) > 1
