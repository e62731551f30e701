"""Test the operations of a run, and the watchdog of a run in one process."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from realign.runtime.processes import watchdog
from realign.runtime.processes.watchdog import CallTimeout, Watch, Watchdog, stacks, watchdog_for
from realign.runtime.runtime_spec import Local, Ray


def test_operations_are_listed_while_they_run_in_any_thread():
    watch, entered, leave = Watch(), threading.Event(), threading.Event()

    def other():
        with watch.doing("call 'ref_inf'", limited=True):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with watch.doing("call 'reward_inf'", [5]):
        thread.start()
        entered.wait()
        assert [(o.what, o.data, o.limited) for o in watch.operations()] == [
            ("call 'reward_inf'", [5], False),
            ("call 'ref_inf'", None, True),
        ]
    leave.set()
    thread.join()
    assert watch.operations() == []


def test_an_error_passes_through_and_ends_the_operation():
    watch = Watch()
    with pytest.raises(ZeroDivisionError), watch.started(), watch.telling(), watch.doing("evaluation"):
        1 / 0  # noqa: B018
    assert watch.operations() == []


def test_the_stacks_name_each_other_thread_with_file_and_function():
    entered, leave = threading.Event(), threading.Event()

    def blocked_in_an_environment():
        entered.set()
        leave.wait()

    thread = threading.Thread(target=blocked_in_an_environment, name="environment 3")
    thread.start()
    entered.wait()
    found = stacks()
    leave.set()
    thread.join()
    assert "Thread environment 3 (most recent call last):\n" in found
    assert __file__ in found
    assert "in blocked_in_an_environment" in found
    assert "test_the_stacks_name_each_other_thread" not in found


CHECKOUT = Path(watchdog.__file__).parents[3]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == watchdog.__name__]


def test_a_slow_operation_is_reported_once_with_the_stacks_and_the_run_continues(caplog):
    dog = Watchdog(report_s=0)
    with dog.doing("call 'actor_gen'", "4 prompts", limited=True):
        dog.report_slow()
        dog.report_slow()
    [text] = reports(caplog)
    assert re.match(r"call 'actor_gen' for \d+ s on '4 prompts' has not finished\. The run continues\.", text)
    assert "Set runtime.rpc_timeout_minutes to end a run whose calls hang. Stacks of all threads:" in text
    with dog.doing("evaluation"):
        dog.report_slow()
    assert "Set runtime" not in reports(caplog)[1]  # the limit does not apply to evaluations


def test_the_thread_reports_the_stack_of_the_thread_that_hangs(caplog):
    dog, never = Watchdog(report_s=0), threading.Event()
    with dog.started(), dog.doing("call 'reward_inf'", limited=True):
        while not reports(caplog):
            never.wait(0.01)
    [text] = reports(caplog)
    assert "Thread MainThread (most recent call last):" in text
    assert "in test_the_thread_reports_the_stack_of_the_thread_that_hangs" in text


def test_only_a_limited_operation_exceeds_the_limit():
    dog = Watchdog(limit_s=0)
    with dog.doing("evaluation"):
        assert dog.exceeded() is None
        with dog.doing("call 'actor_train'", limited=True):
            found = dog.exceeded()
            assert found is not None
            assert found.what == "call 'actor_train'"
    assert dog.exceeded() is None


def test_a_call_that_hangs_is_interrupted_with_exit_code_75_and_the_stacks(capfd):
    dog = Watchdog(limit_s=1000)
    before = signal.getsignal(watchdog.END)
    closed = []

    def hangs():
        try:
            dog.limit_s = 0
            time.sleep(1000)  # the signal interrupts a system call
        except Exception:  # user code may suppress exceptions
            raise AssertionError("suppressed") from None
        finally:
            closed.append(True)

    message = r"call 'x' exceeded runtime\.rpc_timeout_minutes=0"
    with pytest.raises(CallTimeout, match=message) as caught, dog.started(), dog.doing("call 'x'", limited=True):
        hangs()
    assert (caught.value.exit_code, closed) == (75, [True])
    assert isinstance(caught.value, KeyboardInterrupt)
    said = capfd.readouterr().err
    assert re.match(EXCEEDS, said)
    assert "time.sleep(1000)" in said
    assert signal.getsignal(watchdog.END) is before


EXCEEDS = r"error: call 'x' for \d+ s exceeds runtime\.rpc_timeout_minutes=0\. The run ends\."
HANGING = """
import threading
from realign.runtime.processes import watchdog
from realign.runtime.processes.watchdog import CallTimeout, Watchdog

watchdog.LOOK_S, watchdog.GRACE_S = 0.01, 0.1
dog = Watchdog(limit_s=0)
dog.record = lambda error, code: print(code, error)
with dog.started(), dog.doing("call 'x'", limited=True):
    while True:
        try:
            threading.Event().wait()
        except CallTimeout:
            pass
"""


def test_a_process_that_does_not_end_is_recorded_and_terminated_with_exit_code_75():
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run([sys.executable, "-c", HANGING], env=environment, capture_output=True, text=True)
    assert done.returncode == 75
    assert re.match(EXCEEDS, done.stderr)
    assert done.stdout == "75 call 'x' exceeded runtime.rpc_timeout_minutes=0. Restart the run with resume=auto.\n"


def test_a_run_that_ends_in_time_leaves_no_thread_and_no_report(capfd, caplog):
    dog = Watchdog(report_s=1000, limit_s=1000)
    before = set(threading.enumerate())
    for _ in range(2):  # a run that recovers starts it again
        with dog.started(), dog.doing("call 'x'", limited=True):
            started = set(threading.enumerate()) - before
            assert "watchdog" in {thread.name for thread in started}
        (thread,) = (thread for thread in started if thread.name == "watchdog")
        thread.join(60)  # the run waits half a second for it, which a busy machine can exceed
        assert not thread.is_alive()
    assert (capfd.readouterr().err, reports(caplog)) == ("", [])


@pytest.mark.parametrize(
    ("runtime", "seconds"),
    [
        (Local(), (1800, math.inf)),
        (Local(rpc_timeout_minutes=5), (300, 300)),
        (Ray(), (1860, math.inf)),
        (Ray(rpc_timeout_minutes=5), (360, 360)),
    ],
)
def test_a_run_without_torchrun_ends_only_if_a_limit_is_set(runtime, seconds):
    dog = watchdog_for(runtime)
    assert (dog.report_s, dog.limit_s) == seconds
