"""Test environments that block their event loop or ignore cancellation: the cost, and that nothing hangs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from realign.api.environment import Response
from realign.environments import EnvironmentPool, Limits, SharedLoop, TurnWriter
from tests.environments.environment_fixtures import Blocking
from tests.processes import until
from tests.tiny import tiny_tokenizer

BLOCKED = "a call blocked the event loop, which was abandoned"
LOST = "its event loop was abandoned because a call blocked it"
SAID = Response("x", (1,), 0, False)


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """Release blocked threads at the end of a test, and wait until they end."""
    Blocking.release.clear()
    Blocking.closed.clear()
    yield
    Blocking.release.set()
    until(lambda: not threads())


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "environments"]


def shared(concurrency: int = 64) -> SharedLoop:
    return SharedLoop("mine", Limits(timeout_s=2.0, concurrency=concurrency, grace_s=1.0))


def opened(given: SharedLoop, make=Blocking) -> EnvironmentPool:
    return EnvironmentPool("mine", make, TurnWriter(tiny_tokenizer()), given)


def converse(given: SharedLoop, *hows: str) -> list[str | float]:
    """Return the reward of each environment after up to two turns, or its failure."""
    results: dict[int, str | float] = {}
    with opened(given) as pool:
        answers = pool.reset([({"name": how, "how": how}, 0) for how in hows])
        live = list(range(len(hows)))
        for turn in range(3):
            following = []
            for episode, answer in zip(live, answers, strict=True):
                if answer.step is None:
                    results[episode] = answer.failure
                elif answer.step.over:
                    results[episode] = answer.step.reward
                else:
                    following.append(episode)
            live = following
            answers = pool.step({episode: Response("x", (1,), turn, False) for episode in live})
    return [results[episode] for episode in range(len(hows))]


def test_a_step_that_blocks_fails_and_what_finished_in_time_keeps_its_result(caplog):
    given = shared()
    answers = converse(given, "good", "good", "step blocks", "waits")
    assert answers == [1.0, 1.0, *[f"no answer within timeout_s=2: {BLOCKED}"] * 2]
    assert sorted(Blocking.closed) == ["good", "good", "step blocks", "waits"]
    messages = [record.getMessage() for record in caplog.records]  # a busy machine may add those of asyncio
    (warning,) = [message for message in messages if "blocked its event loop" in message]
    assert "environment mine blocked its event loop for more than 3 s" in warning
    assert converse(given, "good", "good") == [1.0, 1.0]


def test_a_reset_that_blocks_fails_and_the_next_batch_has_a_new_loop(caplog):
    given = shared()
    with opened(given) as pool:
        answers = pool.reset([({"name": how, "how": how}, 0) for how in ("good", "reset blocks", "good")])
        assert [answer.failure for answer in answers][1] == f"no answer within timeout_s=2: {BLOCKED}"
    assert converse(given, "good") == [1.0]


def test_closing_takes_no_reward_back_and_waits_for_a_limited_time(caplog):
    assert converse(shared(), "close swallows", "good", "leaves a task") == [1.0, 1.0, 1.0]
    assert caplog.text.count("closing an environment failed") == 1
    caplog.clear()
    assert converse(shared(), "close blocks", "good") == [1.0, 1.0]
    assert "blocked its event loop" in caplog.text


@pytest.mark.parametrize("how", ["step blocks", "waits", "swallows"])
def test_an_exception_of_a_signal_handler_ends_the_wait_at_once(how):
    """With limits of an hour, the exception waits neither for the call nor for the end of the batch."""

    def stop(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, stop)
    given = SharedLoop("mine", Limits(timeout_s=3600.0, concurrency=1, grace_s=3600.0))

    def interrupted() -> None:
        with opened(given) as pool:
            pool.reset([({"name": how, "how": how}, 0)])
            threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGUSR1]).start()
            pool.step({0: SAID})

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert Blocking.closed == ([] if how == "step blocks" else [how])


def test_concurrent_batches_share_a_loop_and_leave_it_when_a_call_of_one_blocks_it(caplog):
    given = shared()
    with opened(given) as pool:
        pool.reset([({"name": "good", "how": "two turns"}, 0)])
        assert converse(given, "good") == [1.0]
        assert len(threads()) == 1
        assert converse(given, "good", "step blocks") == [1.0, f"no answer within timeout_s=2: {BLOCKED}"]
        (answer,) = pool.step({0: SAID})
        assert answer.failure == LOST
