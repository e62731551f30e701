"""What the rows of a dataset must be is found out before the first step."""

from __future__ import annotations

import pytest

from realign.api import MicroBatchSpec
from realign.runtime import run
from realign.runtime.step import LocalRuntime
from tests.runtime.test_step import Prompts, experiment


def test_trap_d11_a_dataset_smaller_than_a_batch_trains_and_an_empty_one_is_refused(tmp_path):
    assert len(run(experiment(tmp_path, data=Prompts(3))).series("loss")) == 3
    with pytest.raises(ValueError, match="holds no row"):
        run(experiment(tmp_path, data=Prompts(0), overwrite=True))


def test_a_token_budget_that_cannot_hold_one_sequence_is_refused_at_once(tmp_path):
    class Long(Prompts):
        longest_row = 30

    with pytest.raises(
        ValueError, match=r"=35 cannot hold one sequence: the longest row has 30 tokens and a resp.* 6;"
    ):
        LocalRuntime(experiment(tmp_path, data=Long(), microbatch=MicroBatchSpec(35)))
    LocalRuntime(experiment(tmp_path, data=Long(), microbatch=MicroBatchSpec(36)))


def test_missing_dataset_keys_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"reads key 'row' of the dataset, which gives \['prompt_ids'\]"):
        run(experiment(tmp_path, data=Prompts(keys=("prompt_ids",))))
