"""Test the profiler of steps: attribution of operators to calls, and the files of a profiled run."""

from __future__ import annotations

import gzip
import json

import pytest

from realign.config import compose
from realign.config.experiment import build_experiment
from realign.errors import ConfigError
from realign.runtime import LocalRuntime
from realign.runtime.profiling import (
    OUTSIDE,
    SUMMARY,
    TRACE,
    ProfileOptions,
    Span,
    profile_steps,
    self_times,
    summarize,
)
from tests.config_parts import write_experiment


def op(name, thread, start, end, self_s=1.0):
    return Span(name, thread, start, end, self_s)


def test_an_operator_belongs_to_the_call_of_its_thread_or_to_the_only_active_call():
    spans = [
        op("RPC a", 1, 0, 10),
        op("RPC b", 2, 5, 20),
        op("mm", 1, 6, 7),  # thread 1 executes a, although b is active too
        op("mm", 2, 6, 7),
        op("add", 3, 1, 2),  # only a is active
        op("add", 3, 12, 13, 0.5),  # only b is active
        op("lost", 3, 6, 8),  # both are active
        op("late", 1, 11, 12),  # after the call of its thread
        op("early", 3, -2, -1),
    ]
    assert self_times(spans) == {
        "a": {"mm": 1.0, "add": 1.0},
        "b": {"mm": 1.0, "add": 0.5},
        OUTSIDE: {"late": 1.0, "early": 1.0},
    }


def test_calls_are_summarized_per_step_with_the_time_outside_of_calls():
    rows = [{"step_s": 4.0, "time/a_s": 1.0, "time/b_s": 2.0}, {"step_s": 6.0, "time/a_s": 2.0, "time/b_s": 2.0}]
    spans = [op("RPC a", 1, 0, 3), op("mm", 1, 0, 1, 0.5), op("add", 1, 1, 2, 1.5), op("nop", 1, 2, 2, 0.0)]
    calls = summarize(["a", "b"], rows, {"a": 30.0, "b": 0.0}, spans, operators=1)
    assert [(c.name, c.seconds, c.fraction, c.tokens_per_s, dict(c.operators)) for c in calls] == [
        ("a", 1.5, pytest.approx(0.3), 10.0, {"add": 0.75}),
        ("b", 2.0, pytest.approx(0.4), None, {}),
        (OUTSIDE, 1.5, pytest.approx(0.3), None, {}),
    ]


@pytest.fixture
def runtime(tmp_path):
    write_experiment(tmp_path / "conf")
    made = LocalRuntime(build_experiment(compose(["experiment=bigram", "steps=3"], tmp_path / "conf")))
    yield made
    made.close()


def test_profiled_steps_write_a_trace_and_a_summary_of_all_calls(runtime, tmp_path):
    profile = profile_steps(runtime, ProfileOptions(start=2, steps=2), 0, tmp_path / "out")
    assert (profile.first, profile.steps, profile.device) == (2, 2, "cpu")
    assert [call.name for call in profile.calls] == ["actor_gen", "reward_inf", "actor_train", OUTSIDE]
    assert sum(call.fraction for call in profile.calls) == pytest.approx(1)
    assert profile.calls[0].tokens_per_s is not None
    assert profile.calls[1].tokens_per_s is None  # the reward has no model
    assert profile.calls[2].operators
    trace = json.loads(gzip.decompress((tmp_path / "out" / TRACE).read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("RPC actor_train") == 2
    summary = json.loads((tmp_path / "out" / SUMMARY).read_text())
    assert [call["name"] for call in summary["calls"]] == [call.name for call in profile.calls]


def test_a_run_with_too_few_steps_is_an_error_before_any_step(runtime, tmp_path):
    with pytest.raises(ConfigError, match=r"profile.start=3 profile.steps=2: the command runs 4 steps, but 3 steps"):
        profile_steps(runtime, ProfileOptions(start=3, steps=2), 0, tmp_path)
    with pytest.raises(ConfigError, match="but 1 steps are left"):
        profile_steps(runtime, ProfileOptions(), 2, tmp_path)
    assert list(tmp_path.glob("*.gz")) == []
