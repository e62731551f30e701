from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.distributed import scenarios
from tests.engines.distributed.run_ranks import run_ranks
from tests.tiny import save_tiny


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, True])
def test_a_rollout_gathers_one_copy_of_the_layers_in_the_dtype_of_products(tmp_path: Path, keeps: bool) -> None:
    save_tiny(tmp_path / "qwen3", family="qwen3", vocab_size=97, num_hidden_layers=24)
    for rank in run_ranks(2, scenarios.joined, tmp_path, "bfloat16", keeps):
        assert rank["obstacle"] is None
        assert rank["same"] == [True, True]
        copy = 4 * rank["outer"] + 2 * rank["layers"] * rank["layer"]
        # Beside it, a layer in fp32 while it is gathered and joined.
        assert all(copy < peak < copy + 4 * 4 * rank["layer"] for peak in rank["peaks"])
        assert all(copy < left if keeps else left < copy / 10 for left in rank["left"])
