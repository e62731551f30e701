from __future__ import annotations

import pytest
import torch

from realign.engines.distributed.expert_parallel import check_experts, experts_of
from realign.errors import ConfigError
from realign.models.network.branches import read_stack
from tests.families import family_model

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "olmoe", "glm4_moe", "gpt_oss")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_result_of_experts_is_the_weighted_sum_of_each(family: str) -> None:
    """The ranks of a row's experts return their results without weights, and the rank of the row adds them."""
    model = family_model(family)
    parts = experts_of(model, read_stack(model).layers)
    assert parts
    for experts in parts.values():
        generator = torch.Generator().manual_seed(0)
        rows_RH = torch.randn(7, 64, generator=generator)
        chosen_RK = torch.rand(7, 4, generator=generator).argsort(-1)[:, :2]
        scores_RK = torch.rand(7, 2, generator=generator)
        with torch.no_grad():
            once_R1 = torch.ones(7, 1)
            each = [experts(rows_RH, chosen_RK[:, [k]], once_R1) * scores_RK[:, [k]] for k in range(2)]
            torch.testing.assert_close(experts(rows_RH, chosen_RK, scores_RK), each[0] + each[1])


def test_a_number_of_ranks_divides_the_experts() -> None:
    check_experts("sharding.expert=2", 4, 2, adapted=True)
    with pytest.raises(ConfigError, match=r"^sharding.expert=3: 3 ranks divide the experts .*, but it has 4\.$"):
        check_experts("sharding.expert=3", 4, 3, adapted=False)
    with pytest.raises(ConfigError, match="LoRA needs at least two experts on each rank, but 3 ranks divide 3"):
        check_experts("sharding.expert=3", 3, 3, adapted=True)
