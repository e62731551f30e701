import os
import sys
from pathlib import Path

import pytest

from realign.rewards import FailureKind, RewardPool
from realign.rewards.pool.limits import MemoryWatch, WorkerLimits, limit_process
from realign.rewards.sandbox import SandboxMode
from realign.rewards.unit_tests import UnitTestsFunction

CONTAINED = Path(__file__).parent / "contained.py"
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="limits of processes are POSIX")


def score(function, rows, **settings):
    settings = {"workers": 1, "timeout_s": 60.0, "memory_mb": 512, "max_failed_fraction": 1.0, **settings}
    with RewardPool(f"{CONTAINED}:{function}", **settings) as pool:
        return pool.score(["p"] * len(rows), ["r"] * len(rows), rows)


def test_workers_and_what_they_start_inherit_no_secret(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "abc")
    monkeypatch.setenv("ORDINARY", "abc")
    rows = [{"name": "JUDGE_API_KEY"}, {"name": "ORDINARY"}, {"name": "PATH"}]
    for function in ("environment_has", "child_has"):
        assert score(function, rows).values == [0.0, 1.0, 1.0]
        assert score(function, rows, keep_environment=["JUDGE_API_KEY"]).values == [1.0, 1.0, 1.0]
    assert os.environ["JUDGE_API_KEY"] == "abc"


def test_a_function_that_misses_its_key_is_told_which_setting_keeps_it(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "abc")
    (failure,) = score("needs_the_key", [{}]).failures
    assert "KeyError: 'JUDGE_API_KEY'" in failure.message
    assert failure.message.endswith(
        "Reward workers do not inherit JUDGE_API_KEY. To pass it, set keep_environment=[JUDGE_API_KEY]."
    )
    assert score("needs_the_key", [{}], keep_environment=["JUDGE_API_KEY"]).values == [3.0]


def test_programs_of_a_model_inherit_no_secret_even_in_this_process(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "abc")
    row = {"tests": "assert 'JUDGE_API_KEY' not in os.environ and 'PATH' in os.environ"}
    assert UnitTestsFunction(mode=SandboxMode.off)("", "import os", row) == 1.0


@POSIX
def test_a_call_that_uses_too_much_cpu_time_fails_alone():
    rows = [{"burn": False}, {"burn": True}, {"burn": False}]
    scores = score("burns", rows, cpu_s=1.0)
    assert scores.values == [1.0, None, 1.0]
    assert [f.kind for f in scores.failures] == [FailureKind.crash]
    assert "SIGXCPU): the call used more CPU time than cpu_s" in scores.failures[0].message


@pytest.mark.skipif(sys.platform != "linux", reason="memory limits are read through /proc")
def test_a_worker_cannot_take_its_limits_back():
    assert score("hard_limits_are_as_low_as_soft_ones", [{}], open_files=64).values == [1.0]


@POSIX
def test_macos_has_no_memory_limit_and_needs_no_proc(monkeypatch):
    resource = pytest.importorskip("resource")
    lowered = []
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("resource.setrlimit", lambda kind, values: lowered.append(kind))
    monkeypatch.setattr("pathlib.Path.read_text", None)
    limit_process(WorkerLimits(memory_mb=64, open_files=32))
    assert lowered == [resource.RLIMIT_CORE, resource.RLIMIT_NOFILE]
    assert not MemoryWatch().leaks()
