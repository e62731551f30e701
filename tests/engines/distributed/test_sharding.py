from __future__ import annotations

import pytest
import torch

from realign.engines import Sharding
from realign.engines.distributed.sharding import whole
from realign.errors import ConfigError, SettingsError


def test_a_tensor_of_one_process_is_whole() -> None:
    x = torch.ones(2)
    assert whole(x) is x


def test_a_number_of_ranks_is_at_least_one() -> None:
    with pytest.raises(SettingsError, match="tensor=0: must be at least 1"):
        Sharding(tensor=0)


def test_the_former_name_of_a_dimension_sets_it() -> None:
    assert Sharding(tensor_parallel=2) == Sharding(tensor=2)


def test_the_ranks_that_no_other_dimension_needs_shard_the_weights() -> None:
    assert Sharding().sizes("actor", 6) == {"replicate": 1, "shard": 6, "context": 1, "tensor": 1}
    all_four = {"replicate": 2, "shard": 2, "context": 2, "tensor": 3}
    assert Sharding(replicate=2, context=2, tensor=3).sizes("actor", 24) == all_four
    with pytest.raises(ConfigError, match=r"^models.ref.sharding.replicate=2 x tensor=2: must divide .* ranks \(6\)$"):
        Sharding(replicate=2, tensor=2).sizes("ref", 6)


def test_ranks_that_cannot_divide_the_heads_are_refused() -> None:
    Sharding(context=2, tensor=2).check_heads("actor", 28)
    with pytest.raises(ConfigError, match=r"^models.ref.sharding.context=16: must divide .* attention heads \(28\)$"):
        Sharding(context=16).check_heads("ref", 28)


def test_a_mesh_is_described_with_the_ranks_that_divide_experts() -> None:
    assert Sharding(replicate=2).describe("actor", 8) == "8 ranks = replicate 2 x shard 4"
    sharding = Sharding(tensor=2, expert=4)
    assert sharding.describe("actor", 16) == "16 ranks = shard 8 x tensor 2; experts are divided over 8 of them"
    with pytest.raises(ConfigError, match=r"expert=3: must divide the number of ranks with different prompts .* \(4\)"):
        Sharding(expert=3).describe("actor", 4)
