"""Test the description of what a run waits for, and errors that only one rank sees."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from realign.engines.distributed.ranks import is_of_another_rank
from realign.interfaces.grpo import GRPOActorInterface, dataflow
from realign.runtime import CheckpointSpec, run
from realign.runtime.processes.watchdog import Watch
from realign.runtime.training import activity
from tests.engines.distributed.run_ranks import run_ranks
from tests.toys import CountToken, experiment

PARTS = {"actor": GRPOActorInterface(), "reward": CountToken()}


def during(what: str | None, *, first: bool) -> str:
    watch, graph = Watch(), dataflow(PARTS)
    if what is None:
        return activity(watch, graph, PARTS, first_step=first)
    with watch.doing(what):
        return activity(watch, graph, PARTS, first_step=first)


def test_the_current_call_is_named_and_the_first_call_of_a_reward_starts_its_workers():
    reward = next(rpc.name for rpc in dataflow(PARTS).rpcs if rpc.model == "reward")
    assert during(f"call {reward!r}", first=True) == (
        f"running call {reward!r} for the first time, which starts its workers, 0 s"
    )
    assert during(f"call {reward!r}", first=False) == f"running call {reward!r}, 0 s"
    assert during("call 'actor_gen'", first=True) == "running call 'actor_gen' for the first time, 0 s"
    assert during("evaluation", first=True) == "running evaluation, 0 s"


def test_between_two_operations_nothing_is_shown():
    assert during(None, first=True) == ""


FAILS_ON_RANK_0 = {
    "metrics": "realign.runtime.metrics.records.JsonLinesWriter.log",
    "recorded calls": "realign.runtime.training.write_calls",
    "samples": "realign.runtime.training.TrainingLoop._warn",
    "details": "realign.runtime.metrics.details.RunDetails.after_step",
    "chain": "realign.runtime.chain.Chain.step",
    "chain of checkpoints": "realign.runtime.chain.Chain.checkpoint",
}


def error_of_rank_0(folder: Path, name: str, every_steps: int = 1) -> tuple[str, bool]:
    with patch(name, side_effect=OSError("no space left")), pytest.raises(OSError, match="no space") as caught:
        run(experiment(folder, steps=3, checkpoint=CheckpointSpec(every_steps=every_steps)))
    return str(caught.value), is_of_another_rank(caught.value)


@pytest.mark.parametrize(
    "what", ["details", *(pytest.param(x, marks=pytest.mark.slow) for x in FAILS_ON_RANK_0 if x != "details")]
)
def test_an_error_that_only_rank_0_sees_ends_all_ranks_with_it(tmp_path, what):
    """Otherwise, the others would wait for rank 0 in their next collective, until it is gone."""
    own, other = run_ranks(2, error_of_rank_0, tmp_path, FAILS_ON_RANK_0[what])
    assert own == ("no space left", False)
    assert other == ("no space left", True)


def test_an_error_of_rank_0_after_the_last_checkpoint_ends_all_ranks_with_it(tmp_path):
    own, other = run_ranks(2, error_of_rank_0, tmp_path, FAILS_ON_RANK_0["chain of checkpoints"], 10)
    assert own == ("no space left", False)
    assert other == ("no space left", True)
