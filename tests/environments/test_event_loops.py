"""Threads of executors; `test_environment_pool.py` tests event loops with the environments that they run."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, Future

import pytest

from realign.environments.event_loops import DaemonThreads, Limits, LoopBlocked, LoopThread


def test_any_number_of_calls_run_at_a_time_in_daemon_threads():
    threads, barrier = DaemonThreads(), threading.Barrier(40)
    calls = [threads.submit(barrier.wait, 60) for _ in range(40)]
    assert sorted(call.result() for call in calls) == list(range(40))
    assert threads.submit(threading.current_thread).result().daemon


def test_an_error_of_a_call_is_its_result():
    def fail() -> None:
        raise SystemExit("ended")

    with pytest.raises(SystemExit, match="ended"):
        DaemonThreads().submit(fail).result()


def test_a_canceled_call_does_not_run():
    threads, ran = DaemonThreads(), threading.Event()
    call: Future[None] = threads.submit(ran.set)
    canceled = call.cancel()  # it may have run already
    assert canceled != ran.wait(0 if canceled else 60)
    if canceled:
        with pytest.raises(CancelledError):
            call.result()


def test_whoever_waits_for_a_loop_that_another_batch_has_ended_is_told():
    thread, entered = LoopThread(Limits(timeout_s=60.0, concurrency=1)), threading.Event()

    async def wait() -> None:
        entered.set()
        await asyncio.sleep(60)

    def end() -> None:
        entered.wait()
        thread.end()

    threading.Thread(target=end).start()
    with pytest.raises(LoopBlocked):
        thread.run(wait())
