"""Test trackers, and the errors of trackers that never stop a run."""

from __future__ import annotations

import json
import math
import sys
import warnings
from types import SimpleNamespace
from typing import ClassVar

import pytest

from realign.errors import ConfigError
from realign.records import MLflow, SwanLab, TensorBoard, Trackio, WandB
from realign.records.metrics.trackers import LATEST, BestEffortTracker, SwanLabMode, WandbMode
from realign.runtime import CheckpointSpec, run
from tests.checkpoint_runs import run_until_killed
from tests.toys import experiment


def test_a_tracker_that_fails_ends_no_run_and_what_it_missed_is_told():
    class Flaky:
        heard: ClassVar[list[int]] = []

        def log(self, step, metrics):
            if step in (2, 4):
                raise ConnectionError("no network")
            self.heard.append(step)

        def close(self):
            raise OSError("gone")

    tracker = BestEffortTracker("mine", Flaky())
    tracker.log(1, {})
    with pytest.warns(UserWarning, match=r"Tracker 'mine' failed at step 2 \(ConnectionError: no network\)"):
        tracker.log(2, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned only once
        for step in (3, 4, 5):
            tracker.log(step, {})
    assert Flaky.heard == [1, 3, 5]
    with pytest.warns(UserWarning, match="Tracker 'mine'") as told:
        tracker.close()
    assert [str(w.message) for w in told] == [
        "Tracker 'mine' could not be closed (OSError: gone).",
        "Tracker 'mine' missed 2 steps, from 2 to 4.",
    ]


class Calls(list):
    """Fake of a module, a writer and a run. It records all calls."""

    def __getattr__(self, name):
        def note(*args, **kwargs):
            self.append((name, args, kwargs))
            return self

        return note


@pytest.fixture
def calls(monkeypatch):
    noted = Calls()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=noted.SummaryWriter))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=noted.init))
    return noted


def test_tensorboard_gets_the_finite_metrics_of_each_step(calls, tmp_path):
    tracker = TensorBoard().open("run", tmp_path)
    tracker.log(3, {"reward": 0.5, "kl": math.inf})
    tracker.close()
    assert calls == [
        ("SummaryWriter", (str(tmp_path / "tensorboard"),), {}),
        ("add_scalar", ("reward", 0.5, 3), {}),
        ("flush", (), {}),
        ("close", (), {}),
    ]


def test_wandb_gets_the_resolved_config_and_the_metrics(calls, tmp_path):
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    tracker = WandB(project="p", group="g", mode=WandbMode.offline).open("run", tmp_path)
    tracker.log(1, {"reward": 0.5})
    tracker.close()
    settings = {"project": "p", "group": "g", "name": "run", "dir": str(tmp_path), "mode": "offline"}
    assert calls == [
        ("init", (), {**settings, "config": {"steps": 3}}),
        ("log", ({"reward": 0.5},), {"step": 1}),
        ("finish", (), {}),
    ]


def write_samples(folder, count):
    rows = [{"step": i, "id": f"p{i}", "prompt": "1+1=", "response": "2", "reward": 1.0} for i in range(count)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("name", "tracker"), [("wandb", WandB), ("trackio", Trackio)])
def test_the_latest_samples_are_a_table_at_the_end(monkeypatch, tmp_path, name, tracker):
    noted = Calls()
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=noted.init, Table=lambda **table: table))
    write_samples(tmp_path, LATEST + 1)
    tracker().open("run", tmp_path).close()
    table = noted[1][1][0]["samples"]
    assert table["columns"] == ["step", "prompt", "response", "reward"]
    assert len(table["data"]) == LATEST
    assert table["data"][-1] == [LATEST, "1+1=", "2", 1.0]
    assert noted[-1] == ("finish", (), {})


def test_swanlab_gets_samples_as_text_and_its_mode(monkeypatch, tmp_path):
    noted = Calls()
    monkeypatch.setitem(sys.modules, "swanlab", SimpleNamespace(init=noted.init, Text=lambda text: text))
    write_samples(tmp_path, 1)
    tracker = SwanLab(mode=SwanLabMode.offline).open("run", tmp_path)
    tracker.log(2, {"reward": 0.5})
    tracker.close()
    assert noted[0][2]["mode"] == "offline"
    assert noted[1:3] == [
        ("log", ({"reward": 0.5},), {"step": 2}),
        ("log", ({"samples": ["step: 0\nprompt: 1+1=\nresponse: 2\nreward: 1.0"]},), {}),
    ]


def test_mlflow_gets_config_metrics_and_samples(monkeypatch, tmp_path):
    noted = Calls()
    noted.info = noted.experiment_id = noted
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=noted.client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=lambda *values: values))
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    write_samples(tmp_path, 1)
    tracker = MLflow(experiment="e", tracking_uri="https://host").open("run", tmp_path)
    tracker.log(4, {"eval/pass@2": 0.5})
    tracker.close()
    calls = {name: args for name, args, _ in noted if name != "info"}
    assert noted[0] == ("client", ("https://host",), {})
    assert calls["get_experiment_by_name"] == ("e",)
    assert calls["log_dict"][1:] == ({"steps": 3}, "config.yaml")
    assert calls["log_table"][1:] == (
        {"step": [0], "prompt": ["1+1="], "response": ["2"], "reward": [1.0]},
        "samples.json",
    )
    metrics = next(kwargs["metrics"] for name, _, kwargs in noted if name == "log_batch")
    assert [(name, value, step) for name, value, _, step in metrics] == [("eval/pass_at_2", 0.5, 4)]


class Board:
    """Stand-in for W&B, SwanLab and MLflow: a server whose runs outlive a process, each with its rules for steps."""

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}
        self.tags: dict[str, str] = {}
        self.current = ""

    def init(self, *, id=None, resume=None, **_):
        self.current = id or f"chosen by the server {len(self.steps)}"
        assert self.current not in self.steps or resume == "allow"
        self.steps.setdefault(self.current, [])
        return self

    def log(self, metrics, step=None):
        if step is not None:
            assert all(step > earlier for earlier in self.steps[self.current])  # W&B drops it silently
            self.steps[self.current].append(step)

    def finish(self):
        self.current = ""

    def Text(self, text):
        return text

    def Table(self, **table):
        return table

    # MLflow

    def MlflowClient(self, uri):
        return self

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="e")

    def search_runs(self, experiments, query, max_results):
        tag, _, value = query.partition(" = ")
        assert tag == "tags.realign_run"
        runs = [run for run, of in self.tags.items() if repr(of) == value]
        return [SimpleNamespace(info=SimpleNamespace(run_id=run)) for run in runs]

    def create_run(self, experiment, run_name, tags):
        run = self.init().current
        self.tags[run] = tags["realign_run"]
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def log_batch(self, run, metrics):
        self.current = run
        if metrics:  # there are none before the first step
            self.log({}, metrics[0][3])

    def update_run(self, run, status):
        assert status == "RUNNING"

    def set_terminated(self, run):
        pass

    log_dict = log_table = set_terminated


@pytest.fixture(params=[WandB, SwanLab, MLflow])
def board(request, monkeypatch):
    """Return a server, and the tracker that writes to it."""
    served = Board()
    served.log_dict = served.log_table = lambda *_: None
    monkeypatch.setitem(sys.modules, request.param.__name__.lower(), served)
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=lambda *values: values))
    for name in ("WANDB", "SWANLAB"):
        monkeypatch.delenv(f"{name}_RUN_ID", raising=False)
    return served, request.param


def test_a_resumed_run_continues_its_run_of_the_tracker_and_each_step_comes_once(tmp_path, board):
    """Kill it twice after steps that no checkpoint has: they run again, and the tracker keeps its values."""
    served, tracker = board
    seldom = {"checkpoint": CheckpointSpec(every_steps=2), "evaluation": None, "resume": "auto"}
    for stop in (3, 5):
        run_until_killed(experiment(tmp_path, steps=6, trackers={"x": tracker()}, **seldom), stop)
    run(experiment(tmp_path, steps=6, trackers={"x": tracker()}, **seldom))
    assert [[step for step in steps if step] for steps in served.steps.values()] == [[1, 2, 3, 4, 5, 6]]
    run(experiment(tmp_path, output_dir=tmp_path / "another", trackers={"x": tracker()}, evaluation=None))
    assert len(served.steps) == 2


EXTRAS = [
    (TensorBoard, "torch.utils.tensorboard"),
    (WandB, "wandb"),
    (Trackio, "trackio"),
    (MLflow, "mlflow"),
    (SwanLab, "swanlab"),
]


@pytest.mark.parametrize(("tracker", "module"), EXTRAS)
def test_a_missing_extra_is_named_when_the_config_is_read(monkeypatch, tracker, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'realign-rl\[(tensorboard|wandb|trackio|mlflow|swanlab)\]'"):
        tracker()
