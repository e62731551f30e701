import errno
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from realign.errors import CheckpointError, ConfigError
from realign.own_files import FILES
from realign.records.checkpoint.saved_models import Saves
from realign.run_settings import CheckpointSpec


def saves(tmp_path, **settings):
    def write(folder):
        (folder / "actor").mkdir(parents=True, exist_ok=True)

    return Saves(tmp_path, write, **settings)


def names(tmp_path):
    return sorted(p.name for p in tmp_path.iterdir() if p.name != FILES)


def test_the_last_ones_stay(tmp_path):
    kept = saves(tmp_path, every_steps=2, keep=2)
    for step in range(9):
        kept.after_step(step, {}, last=step == 8)
    assert names(tmp_path) == ["step_000004", "step_000006"]


@pytest.mark.parametrize(("best", "step", "value"), [("eval/reward", 2, 3.0), ("-eval/reward", 4, 0.5)])
def test_the_best_is_kept_and_says_what_it_was(tmp_path, best, step, value):
    kept = saves(tmp_path, best=best)
    for number, reward in enumerate([9.0, 2.0, 3.0, math.nan, 0.5, 3.0, None]):
        kept.after_step(number, {} if reward is None else {"eval/reward": reward}, last=False)
    assert names(tmp_path) == ["best"]
    record = json.loads((tmp_path / "best" / "best.json").read_text())
    assert record == {"step": step, "metric": "eval/reward", "value": value}


def test_a_metric_that_nobody_measures_is_refused_before_training_or_after_the_first_step(tmp_path):
    kept = saves(tmp_path, best="eval/rewards")
    with pytest.raises(ConfigError, match=r"no metric 'eval/rewards' .* before training. Did you mean 'eval/reward'\?"):
        kept.after_step(0, {"eval/reward": 1.0}, last=False)
    kept = saves(tmp_path, best="los")
    kept.after_step(0, {"eval/reward": 1.0}, last=False)
    with pytest.raises(ConfigError, match=r"no metric 'los' was measured in the first step. Did you mean 'loss'\?"):
        kept.after_step(1, {"loss": 1.0}, last=False)
    kept = saves(tmp_path, best="xyz")
    with pytest.raises(ConfigError, match=r"no metric 'xyz' .* Valid: loss, lr\.$"):
        kept.after_step(1, {"lr": 1.0, "loss": 1.0}, last=False)


def test_a_full_disk_costs_a_save_and_not_the_run(tmp_path):
    full = []

    def write(folder):
        (folder / "critic").mkdir(parents=True, exist_ok=True)
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        (folder / "actor").mkdir(parents=True, exist_ok=True)

    kept = Saves(tmp_path, write, every_steps=1, keep=1, best="reward")
    kept.after_step(1, {"reward": 1.0}, last=False)
    full.append(True)
    with pytest.warns(UserWarning, match=r"was not saved: .*No space left.* Training continues") as told:
        kept.after_step(2, {"reward": 2.0}, last=False)
    assert [Path(str(w.message).split(" was")[0]).name for w in told] == ["best", "step_000002"]
    assert names(tmp_path) == ["best", "step_000001"]
    assert json.loads((tmp_path / "best" / "best.json").read_text())["step"] == 1
    full.clear()
    kept.after_step(3, {"reward": 1.5}, last=False)  # better than the last model that could be saved
    assert names(tmp_path) == ["best", "step_000003"]
    assert json.loads((tmp_path / "best" / "best.json").read_text())["step"] == 3


def test_what_was_made_and_the_record_are_taken_back(tmp_path):
    first = saves(tmp_path, every_steps=1, keep=2, best="reward")
    for step, reward in enumerate([0.0, 1.0, 5.0, 2.0]):
        first.after_step(step, {"reward": reward}, last=False)
    state = json.loads(json.dumps(first.state_dict()))
    (tmp_path / "step_000002" / "actor").rmdir()
    (tmp_path / "step_000002").rmdir()  # removed by steps after the checkpoint, which the resumed run repeats
    second = saves(tmp_path, every_steps=1, keep=2, best="reward")
    second.load_state_dict(state)
    second.after_step(4, {"reward": 4.0}, last=False)
    assert names(tmp_path) == ["best", "step_000003", "step_000004"]
    assert json.loads((tmp_path / "best" / "best.json").read_text())["step"] == 2
    other = saves(tmp_path, best="accuracy")
    other.load_state_dict(state)
    other.after_step(4, {"accuracy": 0.5}, last=False)
    assert json.loads((tmp_path / "best" / "best.json").read_text())["metric"] == "accuracy"


def state_of(made: Any) -> dict[str, Any]:
    return {"made": made, "known": [], "best": None, "record": 0.0, "best_step": None}


BAD_NAMES = [
    *("", ".", "..", "../victim", "../run", "./step_000001", "step_000001/", "step_000001/..", "step_000001/actor"),
    *("step_", "step_1", "step_00001", "step_-00001", "step_000001 ", " step_000001", "step_000001\n", "Step_000001"),
    *("step_00000\uff11", "step_000001\0", ".step_000001", "step_000001.old", "x_step_000001", "~/step_000001"),
    *("final", "best", "checkpoints", "config.yaml", "metrics.jsonl", "*", "step_*"),
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_a_checkpoint_names_only_folders_that_a_run_makes(tmp_path, name):
    kept = saves(tmp_path / "run", every_steps=1, keep=1)
    for made in ([name], ["step_000001", name]):
        with pytest.raises(CheckpointError, match=re.escape(f"saves.made={name!r} in the checkpoint")) as caught:
            kept.load_state_dict(state_of(made))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["{victim}", "../victim", "step_000001/../../victim"])
def test_no_folder_outside_of_the_run_is_removed(tmp_path, name):
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "run" / "step_000001").mkdir(parents=True)
    kept = saves(tmp_path / "run", every_steps=1, keep=1)
    with pytest.raises(CheckpointError, match=r"saves\.made="):
        kept.load_state_dict(state_of([name.format(victim=victim)]))
    kept.after_step(2, {}, last=False)
    assert victim.is_dir()


def test_a_link_is_refused_when_a_checkpoint_names_it_and_when_it_appears_later(tmp_path):
    victim = tmp_path / "victim" / "step_000001"
    victim.mkdir(parents=True)
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "step_000001"
    kept = saves(tmp_path / "run", every_steps=1, keep=1)
    kept.load_state_dict(state_of([link.name]))
    link.symlink_to(victim)
    with pytest.raises(ConfigError, match="step_000001' is a link to"):
        kept.after_step(2, {}, last=False)
    with pytest.raises(ConfigError, match="step_000001' is a link to"):
        kept.load_state_dict(state_of([link.name]))
    assert victim.is_dir()


def test_checkpoints_are_due_by_steps_or_minutes():
    spec = CheckpointSpec(every_steps=3, every_minutes=2)
    assert [spec.due(step, 60) for step in range(1, 7)] == [False, False, True, False, False, True]
    assert spec.due(1, 120)
    assert not CheckpointSpec(every_minutes=None).due(1, 1e9)
    assert spec.describe() == "every 3 steps, every 2 minutes, at the end; keeps the last 2"


def test_a_save_to_which_a_user_added_a_file_stays(tmp_path):
    kept = saves(tmp_path, every_steps=1, keep=1)
    kept.after_step(1, {}, last=False)
    (tmp_path / "step_000001" / "actor" / "results.json").write_text("mine")
    with pytest.warns(UserWarning, match=r"results\.json was not written .*step_000001 was not removed"):
        kept.after_step(2, {}, last=False)
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_final_fails_with_the_error_of_the_disk(tmp_path):
    def write(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"final was not saved: .*No space left"):
        Saves(tmp_path, write).final()
    assert names(tmp_path) == []
