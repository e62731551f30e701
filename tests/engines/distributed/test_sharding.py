from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realign.engines import Sharding
from realign.errors import ConfigError, SettingsError
from realign.models.parts import divide_layers, whole


def test_a_tensor_of_one_process_is_whole() -> None:
    x = torch.ones(2)
    assert whole(x) is x


def test_a_number_of_ranks_is_at_least_one() -> None:
    with pytest.raises(SettingsError, match="tensor=0: must be at least 1"):
        Sharding(tensor=0)


def test_the_former_name_of_a_dimension_sets_it() -> None:
    assert Sharding(tensor_parallel=2) == Sharding(tensor=2)


def test_the_ranks_that_no_other_dimension_needs_shard_the_weights() -> None:
    assert Sharding().sizes("actor", 6) == {"pipeline": 1, "replicate": 1, "shard": 6, "context": 1, "tensor": 1}
    all_five = {"pipeline": 2, "replicate": 2, "shard": 2, "context": 2, "tensor": 3}
    assert Sharding(pipeline=2, replicate=2, context=2, tensor=3).sizes("actor", 48) == all_five
    with pytest.raises(ConfigError, match=r"^models.ref.sharding.replicate=2 x tensor=2: must divide .* ranks \(6\)$"):
        Sharding(replicate=2, tensor=2).sizes("ref", 6)


def test_ranks_that_cannot_divide_the_heads_are_refused() -> None:
    Sharding(context=2, tensor=2).check_heads("actor", 28)
    with pytest.raises(ConfigError, match=r"^models.ref.sharding.context=16: must divide .* attention heads \(28\)$"):
        Sharding(context=16).check_heads("ref", 28)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.data())
def test_the_largest_stage_is_as_small_as_in_the_best_of_all_divisions(sizes: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(sizes)))
    divided = divide_layers(sizes, stages)
    assert [layer for own in divided for layer in own] == list(range(len(sizes)))
    assert all(divided)
    largest = []
    for cuts in combinations(range(1, len(sizes)), stages - 1):
        ends = [0, *cuts, len(sizes)]
        largest.append(max(sum(sizes[start:end]) for start, end in pairwise(ends)))
    assert max(sum(sizes[layer] for layer in own) for own in divided) == min(largest)


def test_equal_layers_are_divided_evenly() -> None:
    assert divide_layers([1] * 8, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert divide_layers([5, 1, 1, 1, 1, 4], 3) == [range(0, 1), range(1, 5), range(5, 6)]


def test_a_mesh_is_described_with_the_ranks_that_divide_experts() -> None:
    assert Sharding(replicate=2).describe("actor", 8) == "8 ranks = replicate 2 x shard 4"
    sharding = Sharding(tensor=2, expert=4)
    assert sharding.describe("actor", 16) == "16 ranks = shard 8 x tensor 2; experts are divided over 8 of them"
    with pytest.raises(ConfigError, match=r"expert=3: must divide the number of ranks with different prompts .* \(4\)"):
        Sharding(expert=3).describe("actor", 4)
