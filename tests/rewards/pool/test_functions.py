"""Reward functions that score a group or a batch in one call, and `async def` functions."""

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from realign.errors import ConfigError, RealignError
from realign.rewards import FailureKind, RewardPool, exact_answer, load_function
from realign.rewards.pool import processes
from realign.rewards.pool.binding import RewardScope
from realign.rewards.pool.functions import Prepared

CASES = Path(__file__).parent / "reward_cases.py"


def test_by_module_and_by_file(tmp_path):
    assert load_function("realign.rewards.arithmetic:exact_answer") is exact_answer
    act = load_function(f"{CASES}:act")
    assert act("", "", {"value": 2}) == 2
    assert load_function(f"{CASES}:act") is act


def test_a_file_may_be_named_like_an_installed_module_and_import_its_neighbors(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "math.py").write_text(
        "from neighbor_of_math import HALF\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Row:\n    x: int\n"
        "def reward(prompt, response, row):\n    return HALF * Row(4).x\n"
    )
    (tmp_path / "neighbor_of_math.py").write_text("HALF = 0.5\n")
    assert load_function(f"{tmp_path}/math.py:reward")("", "", {}) == 2.0
    import math

    assert math.sqrt(4) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_answer", "the name must have the form 'package.module:function'"),
        ("realign.rewards.arithmetic:", "the name must have the form"),
        (":f", "the name must have the form"),
        ("realign.rewards.arithmetics:exact_answer", "no module named 'realign.rewards.arithmetics'"),
        ("no_such_package.x:f", "no module named 'no_such_package'"),
        ("realign.rewards.arithmetic:exact_anwser", "did you mean 'exact_answer'"),
        (f"{CASES.parent}/reward_case.py:act", "did you mean 'reward_cases.py'"),
        ("/no/such/folder/x.py:f", "the folder '/no/such/folder' does not exist"),
        (f"{CASES}:atc", "did you mean 'act'"),
        (f"{CASES}:not_a_function", "is a int; expected a function"),
        (f"{CASES}:Scaled", "is a type; expected a function"),
        (f"{CASES}:unknown_names", r"takes \(p, r, row\), which mixes|none of these names is the response"),
    ],
)
def test_a_wrong_name_says_what_is_there(name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_function(name)
    assert repr(name) in str(caught.value)


CONSTRUCTOR = """\
class Reward:
    def __init__(self, scale):
        if scale < 0:
            raise ValueError("scale is negative")

reward = Reward(-1)
"""


@pytest.mark.parametrize("by_module", [False, True])
def test_a_constructor_that_raises_on_import_keeps_its_traceback_and_a_note_names_the_function(
    tmp_path, monkeypatch, by_module
):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    file = tmp_path / f"broken_constructor_{by_module}.py"
    file.write_text(CONSTRUCTOR)
    name = f"{file.stem if by_module else file}:reward"
    with pytest.raises(ValueError, match="scale is negative") as caught:
        load_function(name)
    assert str(caught.value) == "scale is negative"
    assert not isinstance(caught.value, RealignError)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno) == (str(file), 4)
    assert caught.value.__notes__ == [f"while importing reward function {name!r}"]


def test_a_missing_package_of_the_file_keeps_its_traceback_and_the_file_can_be_imported_after_a_correction(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "broken_reward.py"
    file.write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library") as caught:
        load_function(f"{file}:f")
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == str(file)
    file.write_text("def f(prompt, response, row): return 1\n")
    assert load_function(f"{file}:f")("", "", {}) == 1


FILE = Path(__file__).parent / "scoped_rewards.py"
PROMPTS = ["a", "a", "a", "b", "c", "c"]
RESPONSES = ["x", "", "xyz", "xx", "x", "xxxx"]
ROWS = [{"price": 1}] * 3 + [{"price": 10}] + [{"price": 100}] * 2
GROUPS = [0, 0, 0, 1, 2, 2]


def pool(name, **changes):
    settings = {"workers": 0, "timeout_s": 20.0, "memory_mb": None, "max_failed_fraction": 1.0}
    return RewardPool(f"{FILE}:{name}", **(settings | changes))


def score(name, **changes):
    with pool(name, **changes) as rewards:
        return rewards.score(PROMPTS, RESPONSES, ROWS, GROUPS)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "name", ["lengths_of_a_group", "lengths_of_a_batch", "awaited_length", "awaited_group", "awaited_batch"]
)
def test_every_scope_gives_the_rewards_of_single_calls(name, workers):
    assert score(name, workers=workers).values == score("length").values == [1.0, 0.0, 3.0, 20.0, 100.0, 400.0]


def test_the_names_of_the_arguments_declare_the_scope():
    names = {
        "length": RewardScope.response,
        "lengths_of_a_group": RewardScope.group,
        "awaited_batch": RewardScope.batch,
    }
    assert {name: pool(name).binding.scope for name in names} == names
    with pytest.raises(ConfigError, match=r"takes \(prompt, responses, rows\), which mixes names of several calls"):
        pool("mixed_names")


def test_a_group_function_sees_all_responses_to_a_prompt_and_may_leave_some_without_reward():
    scores = score("above_the_shortest")
    assert scores.values == [1.0, None, 3.0, 0.0, 0.0, 3.0]
    assert scores.failures == []
    assert scores.values.count(None) - len(scores.failures) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failed_call_fails_each_response_of_its_group_and_no_other(workers):
    scores = score("fails_on_b", workers=workers)
    assert scores.values == [1.0, 1.0, 1.0, None, 1.0, 1.0]
    assert [(f.index, f.kind) for f in scores.failures] == [(3, FailureKind.exception)]


def test_a_list_of_another_length_is_nonsense():
    scores = score("too_few")
    assert scores.values == [None, None, None, 1.0, None, None]
    assert {f.kind for f in scores.failures} == {FailureKind.nonsense}
    assert "expected a list of 3 numbers or None (one per response in the same order)" in scores.failures[0].message


@pytest.mark.parametrize(("workers", "most"), [(0, 5), (1, 5), (2, 3)])
def test_concurrency_limits_the_calls_of_all_workers(workers, most):
    rows = [{"s": 0.02}] * 40
    with pool("most_at_a_time", workers=workers, concurrency=5) as rewards:
        values = rewards.score(["p"] * 40, ["r"] * 40, rows).values
    assert max(values) == most


@pytest.mark.parametrize("workers", [0, 1])
def test_every_failure_of_a_concurrent_call_stays_alone(workers):
    rows = [{"value": float(i)} for i in range(40)]
    bad = {
        3: ("raise", FailureKind.exception),
        5: ("hang", FailureKind.timeout),
        7: ("exit", FailureKind.exception),
        9: ("timeout", FailureKind.exception),
    }
    for index, (what, _) in bad.items():
        rows[index] = {"do": what}
    with pool("behaves", workers=workers, timeout_s=2.0) as rewards:
        scores = rewards.score(["p"] * 40, ["r"] * 40, rows)
    assert {f.index: f.kind for f in scores.failures} == {i: kind for i, (_, kind) in bad.items()}
    assert scores.values == [None if i in bad else float(i) for i in range(40)]
    message = {f.index: f.message for f in scores.failures}
    assert "no answer within timeout_s=2.0 s; the call was canceled" in message[5]
    assert "TimeoutError: of the function" in message[9]


def test_a_call_that_blocks_the_event_loop_or_ends_the_process_fails_alone(monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_S", 0.5)
    rows = [{"value": 1.0}, {"do": "block"}, {"value": 2.0}, {"do": "os_exit"}, {"value": 3.0}]
    with pool("behaves", workers=1, timeout_s=2.0) as rewards:
        scores = rewards.score(["p"] * 5, ["r"] * 5, rows)
    assert scores.values == [1.0, None, 2.0, None, 3.0]
    assert [f.kind for f in scores.failures] == [FailureKind.timeout, FailureKind.crash]


@pytest.mark.parametrize("workers", [0, 1])
def test_calls_of_one_worker_share_one_event_loop_so_that_clients_keep_their_connections(workers):
    with pool("loops_seen", workers=workers) as rewards:
        for _ in range(3):
            assert set(rewards.score(PROMPTS, RESPONSES, ROWS).values) == {1.0}


def test_dense_rewards_need_a_plain_function_of_one_response():
    with pytest.raises(ConfigError, match="is async, which dense rewards do not support"):
        pool("awaited_length", dense=True)


class Shift(Prepared):
    """A function that returns how often it was prepared."""

    def __init__(self, times: int = 0) -> None:
        self.times = times

    def prepare(self) -> "Shift":
        if self.times < 0:
            raise ConfigError("the machine lacks something")
        return Shift(self.times + 1)

    @property
    def note(self) -> str:
        return f"prepared {self.times} time"

    def __call__(self, prompt: str, response: str, row: dict[str, Any]) -> float:
        return float(self.times)


by_name = Shift()
SETTINGS: dict[str, Any] = {"timeout_s": 60.0, "memory_mb": None, "max_failed_fraction": 0.0}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("function", [f"{__name__}:by_name", Shift()])
def test_a_pool_prepares_a_function_once_before_the_workers_start(function, workers):
    with RewardPool(function, workers=workers, **SETTINGS) as pool:
        assert pool.score(["", ""], ["", ""], [{}, {}]).values == [1.0, 1.0]
        assert pool.note == "prepared 1 time"
