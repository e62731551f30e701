"""Test the callbacks of a run: their events, metrics, stops, state and errors."""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from realign.api import Callback, CallbackResult
from realign.errors import ConfigError, RunComplete, RunError
from realign.records.checkpoint.folder import list_checkpoints
from realign.runtime import CheckpointSpec, run
from tests.checkpoint_runs import untimed
from tests.toys import experiment

EVERY = CheckpointSpec(every_steps=1, keep=9)


@dataclass
class Recorder(Callback):
    """Records its events, adds a metric, and stops at a step."""

    stop_at: int | None = None
    calls: list[str] = field(default_factory=list)
    metric: str = "double_reward"
    total: float = 0.0

    def on_start(self, event):
        self.calls.append(f"start at {event.next_step} of {event.steps}, resumed={event.resumed}")

    def on_evaluation(self, event):
        assert event.samples[0]["prompt"]
        assert all(name.startswith(("eval/", "time/")) for name in event.metrics)
        self.calls.append(f"evaluation {event.step}")

    def on_step(self, event):
        self.calls.append(f"step {event.step}")
        self.total += event.metrics["reward"]
        stop = "as told" if event.step == self.stop_at else None
        return CallbackResult({self.metric: 2 * event.metrics["reward"], "total": self.total}, stop)

    def on_end(self, event):
        self.calls.append(f"end at {event.step}: {event.status} {event.reason}")

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


@dataclass
class Returns(Callback):
    """Returns a fixed result from on_step."""

    result: object = None

    def on_step(self, event):
        return self.result


def test_events_come_in_order_with_all_metrics_and_what_is_added_is_recorded_and_drawn(tmp_path):
    recorder = Recorder()
    result = run(experiment(tmp_path), callbacks={"mine": recorder})
    assert recorder.calls == [
        "start at 1 of 3, resumed=False",
        "evaluation 0",
        "step 1",
        "evaluation 2",
        "step 2",
        "evaluation 3",
        "step 3",
        "end at 3: completed ",
    ]
    assert result.stopped is None
    assert result.series("double_reward") == [2 * reward for reward in result.series("reward")]
    recorded = untimed(result.output_dir / "metrics.jsonl")
    assert [record.get("total") for record in recorded][1:] == result.series("total")
    assert (result.output_dir / "curves.png").exists()


def test_a_callback_sees_the_metrics_of_those_before_it(tmp_path):
    seen = []

    class Reader(Callback):
        def on_step(self, event):
            seen.append(event.metrics["double_reward"])

    result = run(experiment(tmp_path, callbacks={"first": Recorder(), "second": Reader()}))
    assert seen == result.series("double_reward")


def test_metrics_and_samples_of_events_are_read_only(tmp_path):
    class Writer(Callback):
        def on_step(self, event):
            event.metrics["reward"] = 1.0

    class SampleWriter(Callback):
        def on_evaluation(self, event):
            event.samples[0]["reward"] = 1.0

    for writer in (Writer(), SampleWriter()):
        with pytest.raises(TypeError, match="does not support item assignment"):
            run(experiment(tmp_path, overwrite=True), callbacks={"writer": writer})


def test_a_stop_is_a_normal_end_with_models_evaluation_and_checkpoint(tmp_path):
    recorder = Recorder(stop_at=1)
    result = run(experiment(tmp_path, steps=5), callbacks={"mine": recorder})
    assert result.stopped == "callbacks.mine: as told"
    assert result.series("step") == [0, 1]
    assert "eval/reward" in result.history[-1]  # the last step of a run is evaluated
    assert recorder.calls[-2:] == ["evaluation 1", "end at 1: stopped callbacks.mine: as told"]
    assert (result.output_dir / "final" / "actor").exists()
    assert [checkpoint.step for checkpoint in list_checkpoints(result.output_dir / "checkpoints")] == [1]


def test_resuming_a_stopped_run_says_why_it_ended_until_its_callback_changes(tmp_path):
    run(experiment(tmp_path, steps=5, checkpoint=EVERY, callbacks={"mine": Recorder(stop_at=2)}))
    again = {"steps": 5, "checkpoint": EVERY, "resume": "auto"}
    message = r"callbacks\.mine stopped the run at step 2 of 5: as told\. To continue, .*callbacks\.mine=null"
    stopped = Recorder(stop_at=2)
    with pytest.raises(RunComplete, match=message):
        run(experiment(tmp_path, **again), callbacks={"mine": stopped})
    whole = run(experiment(tmp_path, steps=5, output_dir=tmp_path / "whole", callbacks={"mine": Recorder()}))
    result = run(experiment(tmp_path, **again, callbacks={"mine": Recorder(stop_at=9)}))
    assert result.series("step") == [0, 1, 2, 3, 4, 5]
    assert result.series("total") == whole.series("total")  # its state continues
    assert result.series("loss") == whole.series("loss")


def test_damaged_models_of_a_stopped_run_are_saved_again_and_it_stays_stopped(tmp_path):
    class Unchanged(Callback):
        def on_evaluation(self, event):
            return CallbackResult(stop="enough") if event.step == 2 else None

    out = run(experiment(tmp_path, steps=5, callbacks={"mine": Unchanged()})).output_dir
    for path in (out / "final" / "actor").iterdir():
        path.unlink()
    with pytest.warns(UserWarning, match="The run is complete, but its saved models"):
        result = run(experiment(tmp_path, steps=5, resume="auto", callbacks={"mine": Unchanged()}))
    assert result.stopped == "callbacks.mine: enough"
    assert any((out / "final" / "actor").iterdir())
    with pytest.raises(RunComplete, match=r"callbacks\.mine stopped the run at step 2"):
        run(experiment(tmp_path, steps=5, resume="auto", callbacks={"mine": Unchanged()}))


def test_the_evaluation_before_training_may_stop_the_run(tmp_path):
    class Good(Callback):
        def on_evaluation(self, event):
            return CallbackResult({"gap": 1 - event.metrics["eval/reward"]}, stop="good enough")

    result = run(experiment(tmp_path), callbacks={"good": Good()})
    assert result.series("step") == [0]
    assert len(result.series("gap")) == 1
    assert result.stopped == "callbacks.good: good enough"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (True, r"callbacks\.bad\.on_step returned True\. Return None or a realign\.api\.CallbackResult"),
        (CallbackResult({"x": float("nan")}), r"callbacks\.bad\.on_step returned x=nan\. A metric must be a finite"),
        (CallbackResult({"x": "1"}), "returned x='1'"),  # type: ignore[dict-item]
        (CallbackResult({"x": True}), "returned x=True"),
        (CallbackResult({"reward": 1.0}), "returned metric 'reward', which is already reported by something else"),
        (CallbackResult({"step": 1.0}), "returned a metric named 'step'"),
        (CallbackResult({" ": 1.0}), "returned a metric named ' '"),
    ],
)
def test_a_result_that_is_no_result_is_an_error_that_names_the_callback(tmp_path, returned, message):
    with pytest.raises(RunError, match=message):
        run(experiment(tmp_path), callbacks={"bad": Returns(returned)})


def test_a_bug_of_a_callback_keeps_its_traceback_and_names_its_key(tmp_path):
    class Buggy(Callback):
        def on_step(self, event):
            return {}["missing"]

    recorder = Recorder()
    with pytest.raises(KeyError) as caught:
        run(experiment(tmp_path), callbacks={"buggy": Buggy(), "mine": recorder})
    assert caught.value.__notes__ == ["in callbacks.buggy.on_step"]
    assert Path(__file__).name in traceback.extract_tb(caught.value.__traceback__)[-1].filename
    assert recorder.calls[-1] == "end at 1: failed 'missing'"
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1


def test_names_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="callbacks"):
        run(experiment(tmp_path), callbacks={"a/b": Recorder()})
    with pytest.raises(ConfigError, match=r"callbacks\.a: the experiment has a callback of this name"):
        run(experiment(tmp_path, callbacks={"a": Recorder()}), callbacks={"a": Recorder()})


def test_a_state_that_cannot_be_saved_is_an_error_at_the_start(tmp_path):
    class Unsaved(Callback):
        def state_dict(self):
            return {"now": object()}

    with pytest.raises(ValueError, match="type object cannot be saved in a checkpoint"):
        run(experiment(tmp_path), callbacks={"mine": Unsaved()})
