import logging
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from realign.errors import ConfigError
from realign.rewards import FailureKind, RewardError, RewardPool
from realign.rewards.pool.functions import SessionFunction
from realign.rewards.pool.worker import Problem, RewardCall, answer
from tests.processes import gone
from tests.rewards.pool.reward_cases import popping, popping_batch, popping_group, popping_later

HERE = Path(__file__).parent
CASES = f"{HERE / 'reward_cases.py'}:act"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory limits and process groups are read through /proc")


def make(function=CASES, workers=2, timeout_s=20.0, memory_mb=None, max_failed_fraction=1.0):
    return RewardPool(
        function, workers=workers, timeout_s=timeout_s, memory_mb=memory_mb, max_failed_fraction=max_failed_fraction
    )


def score(pool, rows):
    return pool.score(["p"] * len(rows), ["r"] * len(rows), rows)


def values(n):
    return [{"value": i / 2} for i in range(n)]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_values_stand_at_their_items(workers):
    with make(workers=workers) as pool:
        result = score(pool, values(301))
        assert result.values == [i / 2 for i in range(301)]
        assert result.failures == []
        assert score(pool, []).values == []
        assert score(pool, values(1)).values == [0.0]


@pytest.mark.parametrize(
    ("function", "first", "second"),
    [
        (popping, 3.0, 3.0),
        (popping_later, 3.0, 3.0),
        (SessionFunction.of(popping), 3.0, 3.0),
        (popping_group, 3.0, 2.0),  # one call with one row
        (popping_batch, 3.0, 3.0),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_may_change_the_row_of_its_call(function, first, second, workers):
    row = {"left": [0, 0, 0]}
    with make(function, workers=workers) as pool:
        for _ in range(2):  # also in the next epoch
            assert pool.score(["p"] * 2, ["r"] * 2, [row] * 2, groups=[0, 0]).values == [first, second]
    assert row == {"left": [0, 0, 0]}


@LINUX
def test_trap_c12_every_kind_of_failure_stays_alone(caplog):
    rows = values(200)
    bad = {
        3: ("raise", FailureKind.exception),
        50: ("exit", FailureKind.exception),
        51: ("os_exit", FailureKind.crash),
        90: ("memory", FailureKind.memory),
        91: ("small_memory", FailureKind.memory),
        120: ("segfault", FailureKind.crash),
    }
    for index, (what, _) in bad.items():
        rows[index] = {"do": what}
    with caplog.at_level(logging.WARNING), make(timeout_s=60.0, memory_mb=300) as pool:
        result = score(pool, rows)
        again = score(pool, values(20))
    assert {f.index: f.kind for f in result.failures} == {i: kind for i, (_, kind) in bad.items()}
    assert [f.index for f in result.failures] == sorted(bad)
    assert result.values == [None if i in bad else i / 2 for i in range(200)]
    assert result.values.count(None) == len(result.failures)
    assert again.values == [i / 2 for i in range(20)]
    message = {f.index: f.message for f in result.failures}
    assert "KeyError: 'no such answer'" in message[3]
    assert "reward_cases.py" in message[3]
    assert "exit code 7" in message[51]
    assert "MemoryError" in message[90]
    assert "SIGSEGV" in message[120]
    assert caplog.text.count("which gets no reward") == 3


def test_trap_c12_a_reward_that_hangs_stays_alone():
    rows = values(20)
    rows[9] = {"do": "hang"}
    with make(timeout_s=3.0) as pool:
        result = score(pool, rows)
    (failure,) = result.failures
    assert (failure.index, failure.kind) == (9, FailureKind.timeout)
    assert "timeout_s=3.0" in failure.message
    assert result.values == [None if i == 9 else i / 2 for i in range(20)]


def test_trap_c12_failures_above_the_fraction_stop_the_run():
    rows = [{"do": "raise"} for _ in range(20)]
    for workers in (0, 1):
        with make(workers=workers, max_failed_fraction=0.5) as pool, pytest.raises(RewardError) as caught:
            score(pool, rows)
        text = str(caught.value)
        assert "failed on 11 of 11 scored items" in text
        assert "(exception 11; 20 items in total)" in text
        assert "max_failed_fraction=0.5" in text
        assert "First failure, on item 0: KeyError: 'no such answer' (details: see the log)" in text
        assert "\n" not in text


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_traceback_is_logged_in_full_before_the_run_stops_and_later_ones_are_counted(caplog, workers):
    line = 1 + next(
        i for i, text in enumerate((HERE / "reward_cases.py").read_text().splitlines()) if "no such answer" in text
    )
    with make(workers=workers, max_failed_fraction=0.0) as pool, pytest.raises(RewardError):
        score(pool, [{"do": "raise"}] * 3)
    with make(workers=workers, max_failed_fraction=1.0) as pool:
        assert len(score(pool, [{"do": "raise"}] * 3).failures) == 3
    stopped, counted = caplog.messages
    for message in (stopped, counted):
        assert "Traceback (most recent call last):" in message
        assert re.search(rf'reward_cases\.py", line {line}, in ', message)
        assert message.endswith("KeyError: 'no such answer'")


def test_trap_c12_a_fraction_that_is_met_exactly_is_tolerated():
    rows = [{"do": "raise"}, *values(9)]
    with make(workers=0, max_failed_fraction=0.1) as pool:
        assert len(score(pool, rows).failures) == 1
    with make(workers=0, max_failed_fraction=0.0) as pool, pytest.raises(RewardError):
        score(pool, rows)


def test_none_is_an_abstention_not_a_failure():
    with make(workers=0, max_failed_fraction=0.0) as pool:
        result = score(pool, [{"value": None}, {"value": 1}, {"value": None}])
    assert result.values == [None, 1.0, None]
    assert result.failures == []
    assert result.values.count(None) - len(result.failures) == 2


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (-0.25, -0.25),
        (np.float16(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.int8(-2), -2.0),
        (np.array(2.5), 2.5),
        (torch.tensor(1.5), 1.5),
        (torch.tensor(2), 2.0),
        (torch.tensor(True), 1.0),
    ],
)
def test_numbers_of_every_make_are_accepted(value, expected):
    value_read = answer(lambda prompt, response, row: value, RewardCall(("", "", {}), {}))
    assert type(value_read) is float
    assert value_read == expected


@pytest.mark.parametrize(
    "value",
    [
        *("1.0", [1.0], {"score": 1.0}, 1j, math.nan, math.inf, -math.inf, 1e39, 10**400, object),
        *(np.array([1.0]), torch.ones(1), torch.tensor(math.nan), np.float32("inf")),
    ],
)
def test_what_is_not_a_number_is_nonsense(value):
    problem = answer(lambda prompt, response, row: value, RewardCall(("", "", {}), {}))
    assert isinstance(problem, Problem)
    assert problem.kind == FailureKind.nonsense
    assert "returned" in problem.message


def test_nonsense_comes_back_from_a_worker():
    rows = [{"do": "numpy"}, {"do": "array0"}, {"do": "vector"}, {"do": "decimal"}, {"value": "1"}]
    with make(workers=1) as pool:
        result = score(pool, rows)
    assert result.values == [0.5, 1.0, None, None, None]
    assert [f.kind for f in result.failures] == [FailureKind.nonsense] * 3


def test_trap_c13_integers_and_low_precision_scalars_arrive_exactly():
    scores = [torch.tensor(x, dtype=torch.bfloat16) for x in (1.0, 1.0, 1.0, 1.0078125)] + [2, torch.tensor(0.1).half()]
    with RewardPool(
        lambda prompt, response, row: row["value"], workers=0, timeout_s=1, memory_mb=None, max_failed_fraction=0
    ) as pool:
        values = score(pool, [{"value": s} for s in scores]).values
    assert values == [1.0, 1.0, 1.0, 1.0078125, 2.0, 0.0999755859375]
    assert all(type(value) is float for value in values)


@LINUX
def test_a_memory_limit_leaves_room_beyond_the_imports_only():
    with make(workers=1, memory_mb=200) as pool:
        result = score(pool, [{"do": "memory"}, {"value": 1.0}])
    assert result.failures[0].kind == FailureKind.memory
    assert result.values == [None, 1.0]


def test_a_row_that_cannot_be_pickled_fails_alone():
    rows = [{"value": 1.0}, {"value": 2.0, "function": lambda: 0}, {"value": 3.0}]
    with make(workers=1) as pool:
        result = score(pool, rows)
    assert result.values == [1.0, None, 3.0]
    assert "cannot be sent" in result.failures[0].message


def test_the_function_cannot_change_the_rows():
    rows = values(3)
    for workers in (0, 1):
        with make(f"{HERE / 'reward_cases.py'}:pops_its_row", workers=workers) as pool:
            assert score(pool, rows).values == [0.0, 0.5, 1.0]
    assert rows == values(3)


def test_a_pool_killed_from_outside_is_started_again():
    with make(f"{HERE / 'reward_cases.py'}:pid") as pool:
        first = {int(v) for v in score(pool, [{}] * 50).values}
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        second = {int(v) for v in score(pool, [{}] * 50).values}
    assert not first & second


def test_a_function_that_cannot_be_pickled_is_refused_unless_inline():
    with pytest.raises(ConfigError, match="cannot be sent to a worker"):
        make(lambda prompt, response, row: 1.0)
    assert score(make(lambda prompt, response, row: 1.0, workers=0), [{}]).values == [1.0]


def run_script(tmp_path, body, **popen):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    root = HERE.parents[1]
    env = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **popen
    )


def test_close_leaves_no_process_and_the_pool_can_go_on():
    pool = make(f"{HERE / 'reward_cases.py'}:pid")
    first = {int(v) for v in score(pool, [{}] * 20).values}
    pool.close()
    assert all(gone(pid) for pid in first)
    assert len(score(pool, [{}] * 20).values) == 20
    pool.close()
    pool.close()


@LINUX
def test_a_stopped_worker_takes_along_what_the_function_started(tmp_path):
    file = tmp_path / "pid"
    with make(f"{HERE / 'reward_cases.py'}:child_that_sleeps", workers=1, timeout_s=3.0) as pool:
        result = score(pool, [{"file": str(file)}])
    assert result.failures[0].kind == FailureKind.timeout
    assert gone(int(file.read_text()))


@LINUX
def test_a_script_without_guard_is_not_run_again_and_leaves_no_process(tmp_path):
    process = run_script(
        tmp_path,
        f"""
        print("script runs", flush=True)
        from realign.rewards import RewardPool
        pool = RewardPool({str(HERE / "reward_cases.py") + ":pid"!r},
                          workers=2, timeout_s=20, memory_mb=None, max_failed_fraction=0)
        print(*{{int(v) for v in pool.score(["p"] * 20, ["r"] * 20, [{{}}] * 20).values}}, flush=True)
        """,
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.count("script runs") == 1
    assert all(gone(int(pid)) for pid in out.splitlines()[1].split())
    assert err == ""


def test_a_guarded_script_may_hold_its_own_function(tmp_path):
    process = run_script(
        tmp_path,
        """
        from realign.rewards import RewardPool
        def reward(prompt, response, row):
            return 1.5
        if __name__ == "__main__":
            for function in (reward, __file__ + ":reward"):
                with RewardPool(function, workers=1, timeout_s=20, memory_mb=None, max_failed_fraction=0) as pool:
                    print(pool.score(["p"], ["r"], [{}]).values)
        """,
    )
    out, err = process.communicate(timeout=60)
    assert out == "[1.5]\n[1.5]\n", err


HANGING = f"""
    import signal
    from realign.rewards import RewardPool
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is born without
    with RewardPool({CASES!r}, workers=1, timeout_s=60, memory_mb=None, max_failed_fraction=1) as pool:
        print(int(pool.score(["p"], ["r"], [{{"do": "pid"}}]).values[0]), flush=True)
        print("hanging", flush=True)
        pool.score(["p"] * 3, ["r"] * 3, [{{"do": "hang"}}] * 3)
    """


@LINUX
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_hanging_worker_dies_with_the_run(tmp_path, how):
    process = run_script(tmp_path, HANGING)
    worker = int(process.stdout.readline())
    assert process.stdout.readline() == "hanging\n"
    time.sleep(0.3)
    process.send_signal(how)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -how, err
    assert gone(worker)
    if how == signal.SIGINT:
        assert "KeyboardInterrupt" in err


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, True, 0.5], [1.0, 1.0, 0.5]),
        ((1, 2, 3), [1.0, 2.0, 3.0]),
        (np.array([1.0, 2.0, 3.0]), [1.0, 2.0, 3.0]),
        (None, None),
        ([1, 2], "has 2 elements; expected a list of 3 numbers"),
        (2.0, "is not a list"),
        ("abc", "is not a list"),
        ([1, None, 2], "holds None for token 1"),
        ([1, 2, float("nan")], "holds nan for token 2"),
    ],
)
def test_dense_rewards_are_one_finite_number_per_token(value, expected):
    pool = RewardPool(
        lambda prompt, response, row, tokens: value,
        workers=0,
        timeout_s=1.0,
        memory_mb=None,
        max_failed_fraction=1.0,
        dense=True,
    )
    results = pool.score_tokens(["p"], ["r"], [{}], [["a", "b", "c"]])
    if isinstance(expected, str):
        assert results.values == [None]
        assert [f.kind for f in results.failures] == [FailureKind.nonsense]
        assert expected in results.failures[0].message
    else:
        assert results.values == [expected]
        assert results.failures == []
    with pytest.raises(ValueError, match=r"have different lengths: \[1, 2\]"):
        pool.score_tokens(["p"], ["r"], [{}], [[], []])


@LINUX
def test_a_function_that_leaks_loses_no_reward(caplog):
    """The function leaks 20 MiB per call. Workers are limited to 300 MiB."""
    with caplog.at_level(logging.WARNING), make(memory_mb=300) as pool:
        result = score(pool, [{"do": "leak", "value": i / 2} for i in range(60)])
    assert result.values == [i / 2 for i in range(60)]
    assert result.failures == []
    assert caplog.text.count("kept more than 50% of memory_mb=300 between two calls and was replaced") == 1


@LINUX
def test_a_leaking_worker_takes_along_what_the_function_started():
    with make(memory_mb=300, workers=1) as pool:
        pids = score(pool, [{"do": "leak_and_spawn"} for _ in range(20)]).values
        assert len(pids) == 20
        assert gone(int(pids[0]))


def test_a_function_that_hangs_on_everything_is_given_up_long_before_every_item_was_asked(caplog):
    """All 100 items together would take more than a minute."""
    pool = RewardPool(CASES, workers=2, timeout_s=1.0, patience_s=2.5, memory_mb=None, max_failed_fraction=0.9)
    with pool, pytest.raises(RewardError, match=r"\(timeout 91; 100 items in total\)"):
        score(pool, [{"do": "hang"}] * 100)
    given_up = re.search(r"no answer for patience_s=2\.5 s; (\d+) of 100 items get no reward", caplog.text)
    assert 80 < int(given_up[1]) < 100


def test_a_function_of_a_session_runs_in_a_thread_and_is_given_up_after_its_time():
    """A lock that nobody releases stands for a function that hangs; later items still get their rewards."""
    hanging, threads = threading.Event(), []

    def reward(prompt, response, row):
        threads.append(threading.current_thread())
        if row["value"] == 1:
            hanging.wait()
        return row["value"]

    with make(SessionFunction.of(reward), workers=2, timeout_s=2.0) as pool:
        result = score(pool, [{"value": value} for value in (0, 1, 2)])
        assert result.values == [0, None, 2]
        assert [(failure.kind, failure.index) for failure in result.failures] == [(FailureKind.timeout, 1)]
        assert "no answer within timeout_s=2 s; its thread goes on" in result.failures[0].message
    assert threading.current_thread() not in threads
    assert all(thread.daemon for thread in threads)
    hanging.set()
