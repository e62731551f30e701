"""Test that images stay with their prompts in every operation on a batch."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.api.image_keys import IMAGE_KEYS
from realign.api.sampler import requests_of
from realign.api.shards import shard
from realign.runtime.ray.wire_format import from_wire, to_wire
from tests.images import image_prompts, image_sample

SIZES = [[(2, 3)], [], [(3, 3), (1, 2)], [(2, 2)]]
RESPONSES = [[4, 2, 3], [5], [1, 6], [3, 3]]


@pytest.fixture
def data():
    return image_sample(SIZES, RESPONSES)


def images_of(sample):
    """Return patches and grids of each prompt by id, as lists."""
    parts = zip(sample.ids, *(sample.sequences(key) for key in IMAGE_KEYS), strict=True)
    return {i: (pixels.tolist(), grids.tolist()) for i, pixels, grids in parts}


def assert_same_images(part, whole):
    found, wanted = images_of(part), images_of(whole)
    assert found == {i: wanted[i] for i in part.ids}


def equal(a, b):
    return a.ids == b.ids and a.lengths == b.lengths and all(torch.equal(a[key], b[key]) for key in a.keys)


def test_images_follow_their_prompts_in_another_order(data):
    moved = data.take([3, 0, 2, 1])
    assert list(images_of(moved)) == ["p3", "p0", "p2", "p1"]
    assert_same_images(moved, data)
    for part in data.minibatches(2, np.random.default_rng(0)):
        assert_same_images(part, data)


def test_the_prompts_of_a_batch_can_be_parted_and_gathered(data):
    assert equal(SequenceSample.gather(data.unpack()), data)
    assert equal(SequenceSample.gather(data.chunks(3)), data)


@pytest.mark.parametrize("budget", [32, 40, 100])
def test_micro_batches_with_a_part_of_a_group_have_the_images_of_its_prompt(data, budget):
    batches = data.split(MicroBatchSpec(max_tokens_per_microbatch=budget))
    for part in batches:
        assert_same_images(part, data)
    assert len(batches) > 1 or budget == 100


@pytest.mark.parametrize("ranks", [2, 6])
def test_shards_for_ranks_have_the_images_of_their_prompts(data, ranks):
    parts = shard(data, ranks, "input_ids")
    for part in parts:
        assert_same_images(part, data)
    assert equal(parts.restore(parts.parts), data)


def test_images_survive_pickling_and_the_wire_format(data):
    assert equal(pickle.loads(pickle.dumps(data)), data)
    assert equal(from_wire(pickle.loads(pickle.dumps(to_wire(data)))), data)


def test_selected_tokens_keep_their_images(data):
    assert data.select(["input_ids"]).keys == {"input_ids", *IMAGE_KEYS}
    assert data.select(["loss_mask"]).keys == {"loss_mask"}
    assert image_prompts(SIZES).select(["prompt_ids"]).keys == {"prompt_ids", *IMAGE_KEYS}


def test_requests_with_images_are_rejected():
    with pytest.raises(ValueError, match="the prompts have images"):
        requests_of(image_prompts(SIZES), GenerationConfig(), 0)
    assert len(requests_of(image_prompts([[], []]), GenerationConfig(n=2), 0)) == 4
