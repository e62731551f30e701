from __future__ import annotations

import threading

import pytest

from realign.runtime.processes.operations import Watch, stacks


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
