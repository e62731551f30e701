import math
import sys
from types import SimpleNamespace

import pytest

from realign.errors import ConfigError
from realign.runtime import TensorBoard, WandB
from realign.runtime.metrics.trackers import WandbMode


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


def test_a_folder_of_tensorboard_has_one_for_each_run(calls, tmp_path):
    TensorBoard(folder=str(tmp_path / "all")).open("a", tmp_path)
    assert calls[0][1] == (str(tmp_path / "all" / "a"),)


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


@pytest.mark.parametrize(("tracker", "module"), [(TensorBoard, "torch.utils.tensorboard"), (WandB, "wandb")])
def test_a_missing_extra_is_named_when_the_config_is_read(monkeypatch, tracker, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'realign-rl\[(tensorboard|wandb)\]'"):
        tracker()
