from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realign.engines import Sharding
from realign.errors import ConfigError
from realign.models.parts import divide_layers


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
