"""Test that requirements on dataset rows are checked before the first step."""

from __future__ import annotations

import pytest

from realign.api import MicroBatchSpec
from realign.data.encoding import LengthLimit, TooLong
from realign.errors import ConfigError, DataError
from realign.runtime import run
from realign.runtime.local import LocalRuntime
from tests.toys import Prompts, experiment


def test_trap_d11_a_dataset_smaller_than_a_batch_trains_and_an_empty_one_is_refused(tmp_path):
    assert len(run(experiment(tmp_path, data=Prompts(3))).series("loss")) == 3
    with pytest.raises(DataError, match=r"^data: the dataset has no rows"):
        run(experiment(tmp_path, data=Prompts(0), overwrite=True))


def test_a_token_budget_that_cannot_hold_one_sequence_is_refused_at_once(tmp_path):
    class Long(Prompts):
        longest_row = 30

    with pytest.raises(
        ConfigError, match=r"=35: the longest row has 30 tokens and its response up to 6\. Set it to at least 36,"
    ):
        LocalRuntime(experiment(tmp_path, data=Long(), microbatch=MicroBatchSpec(35)))
    LocalRuntime(experiment(tmp_path, data=Long(), microbatch=MicroBatchSpec(36)))


def test_a_dataset_is_loaded_for_the_token_budget_of_the_run(tmp_path):
    rooms = []

    class Noting(Prompts):
        def load(self, tokenizer):
            rooms.append(LengthLimit("max_tokens", None, TooLong.drop).room)
            return super().load(tokenizer)

    LocalRuntime(experiment(tmp_path, data=Noting(6), microbatch=MicroBatchSpec(77)))
    assert rooms == [77]
    assert LengthLimit("max_tokens", None, TooLong.drop).room is None


def test_missing_dataset_keys_are_named(tmp_path):
    with pytest.raises(DataError, match=r"reads the key 'row', but the dataset has prompt_ids\."):
        run(experiment(tmp_path, data=Prompts(keys=("prompt_ids",))))
