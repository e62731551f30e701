"""Test the description of what a run waits for."""

from __future__ import annotations

from realign.interfaces.grpo import GRPOActorInterface, dataflow
from realign.runtime.processes.watchdog import Watch
from realign.runtime.training import activity
from tests.toys import CountToken

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
