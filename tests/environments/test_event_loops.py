"""Threads of executors; `test_environment_pool.py` tests event loops with the environments that they run."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError

import pytest

from realign.environments import event_loops
from realign.environments.event_loops import DaemonThreads


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.005)


def idle(threads: DaemonThreads) -> int:
    return len(threads._idle)


def test_a_call_reuses_an_idle_thread():
    threads = DaemonThreads()
    first = threads.submit(threading.current_thread).result()
    wait_until(lambda: idle(threads) == 1)
    assert threads.submit(threading.current_thread).result() is first
    assert first.daemon
    threads.shutdown()


def test_any_number_of_calls_run_at_a_time():
    threads, barrier = DaemonThreads(), threading.Barrier(40)
    calls = [threads.submit(barrier.wait, 60) for _ in range(40)]
    assert sorted(call.result() for call in calls) == list(range(40))
    wait_until(lambda: idle(threads) == 40)
    threads.shutdown()


def test_an_error_of_a_call_is_its_result_and_its_thread_serves_further_calls():
    threads = DaemonThreads()

    def fail() -> None:
        raise SystemExit("ended")

    with pytest.raises(SystemExit, match="ended"):
        threads.submit(fail).result()
    assert threads.submit(int, "5").result() == 5
    threads.shutdown()


def test_a_canceled_call_does_not_run():
    threads, release, ran = DaemonThreads(), threading.Event(), []
    running = threads.submit(release.wait, 60)
    wait_until(running.running)
    assert not running.cancel()
    call = threads.submit(ran.append, 1)
    canceled = call.cancel()  # it may have run already
    release.set()
    assert running.result()
    assert canceled != bool(ran)
    if canceled:
        with pytest.raises(CancelledError):
            call.result()
    threads.shutdown()


def test_idle_threads_end_after_some_time_and_at_a_shutdown(monkeypatch):
    threads = DaemonThreads()
    worker = threads.submit(threading.current_thread).result()
    wait_until(lambda: idle(threads) == 1)
    threads.shutdown()
    worker.join(60)
    assert not worker.is_alive()
    monkeypatch.setattr(event_loops, "IDLE_S", 0.01)
    threads = DaemonThreads()
    worker = threads.submit(threading.current_thread).result()
    worker.join(60)
    assert not worker.is_alive()
    assert idle(threads) == 0
    assert threads.submit(int, "5").result() == 5
    threads.shutdown()


def test_a_thread_that_works_during_a_shutdown_ends_after_its_call():
    threads, release = DaemonThreads(), threading.Event()
    working = threads.submit(lambda: (release.wait(60), threading.current_thread())[1])
    threads.shutdown()
    release.set()
    worker = working.result()
    worker.join(60)
    assert not worker.is_alive()
