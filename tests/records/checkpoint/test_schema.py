"""A checkpoint from an untrusted source has correct hashes and any content: it loads, or ends in one line."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.torture.crafted import craft
from realign.errors import CheckpointError, RealignError
from realign.records.checkpoint.folder import STATE, list_checkpoints, write_checkpoint
from realign.records.checkpoint.serialize import DEPTH
from realign.runtime import CheckpointSpec, Experiment, run
from tests import checkpoint_runs
from tests.toys import experiment

EVERY = CheckpointSpec(every_steps=1, keep=9)


class Attacked:
    """A finished run of two steps, from whose changed checkpoints runs of three steps resume."""

    def __init__(self, folder: Path, make: Callable[..., Experiment]) -> None:
        self.make, self.folder = make, folder
        out = run(make(folder / "first", steps=2, checkpoint=EVERY)).output_dir
        (self.checkpoint,) = [c.path for c in list_checkpoints(out / "checkpoints") if c.step == 2]
        self.state = json.loads((self.checkpoint / STATE).read_bytes())

    def resume(self, state: Any) -> str:
        """Return the error message, empty if the run reached its last step."""
        return self.resume_text(json.dumps(state))

    def resume_text(self, state: str) -> str:
        """Do the same with the text of the state."""
        craft(self.checkpoint, state)
        out = self.folder / "again"
        shutil.rmtree(out, ignore_errors=True)
        made = self.make(out, steps=3, output_dir=out / "run", checkpoint=None, resume=str(self.checkpoint))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert run(made).series("step")[-1] == 3
        except RealignError as error:
            return str(error)
        return ""


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Attacked:
    """Return a run that several tests resume, each with its own state."""
    return Attacked(tmp_path_factory.mktemp("attacked"), experiment)


@pytest.mark.parametrize("levels", [DEPTH + 1, 300, 5000])
@pytest.mark.parametrize("key", ["config", "interfaces", "models", "records", "saves", "random", "rollout", "other"])
def test_nested_values_end_in_one_line(attacked, key, levels):
    state = attacked.state | {"tree": attacked.state["tree"] | {key: "HERE"}}
    for opening, closing in (("[", "]"), ('{"a": ', "}"), ('{"$tuple": [', "]}"), ('{"$dict": [["a", ', "]]}")):
        text = json.dumps(state).replace('"HERE"', opening * levels + "0" + closing * levels)
        message = attacked.resume_text(text)
        assert message
        assert "\n" not in message
        assert len(message) < 1500


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with a checkpoint of its second step. Tests change copies."""
    return run(experiment(tmp_path_factory.mktemp("run"), steps=2, checkpoint=EVERY)).output_dir


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("records", None, "records=None in the checkpoint: Input should be a valid dictionary"),
        ("records.sizes.metrics", None, "records.sizes.metrics=None in the checkpoint: Input should be"),
        ("data.drawn", "2", "data.drawn='2' in the checkpoint: Input should be a valid integer"),
        ("data.drawn", True, "data.drawn=True in the checkpoint: Input should be a valid integer"),
        ("data.drawn", -1, "data.drawn=-1 in the checkpoint: Input should be greater than or equal to 0"),
        ("counters.more", 1, "counters.more=1 in the checkpoint: Extra inputs are not permitted"),
        ("counters", {}, "counters.optimizer_steps in the checkpoint: Field required"),
        ("random", {}, "random: the state in the checkpoint does not fit (KeyError: 'python'). Set"),
        ("random.torch", torch.zeros(3, dtype=torch.uint8), "random: the state in the checkpoint does not fit"),
        ("interfaces.interfaces.actor", None, "interfaces.interfaces.actor=None in the checkpoint: Input"),
    ],
)
def test_the_message_names_the_path_the_value_and_what_is_valid(two_steps, tmp_path, path, value, message):
    shutil.copytree(two_steps, tmp_path / "run")
    (checkpoint,) = [c for c in list_checkpoints(tmp_path / "run" / "checkpoints") if c.step == 2]
    tree = checkpoint.read()
    group, _, rest = path.partition(".")
    names = [group] if not rest else [group, rest] if group == "interfaces" else path.split(".")
    node = tree
    for name in names[:-1]:
        node = node[name]
    node[names[-1]] = value
    write_checkpoint(checkpoint.path.parent, 2, tree)
    with pytest.raises(CheckpointError) as caught:
        run(experiment(tmp_path, steps=3, resume="auto"))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("swap", ["shape", "number", "missing", "dtype"])
def test_moments_of_another_shape_never_reach_the_kernels_of_the_optimizer(files, tmp_path, swap):
    made = checkpoint_runs.experiment(files, tmp_path, "raft", steps=1)
    run(made)
    checkpoint = list_checkpoints(tmp_path / "checkpoints")[-1]
    tree = checkpoint.read()
    moments = tree["models"]["actor"]["engine"]["optimizer"]["optimizer"]["state"]
    if swap == "shape":
        moments[0]["exp_avg"] = torch.zeros(1)
    elif swap == "number":
        moments[10**6] = moments[0]
    elif swap == "missing":
        del moments[0]["exp_avg_sq"]
    else:
        moments[0]["exp_avg"] = moments[0]["exp_avg"].long()
    write_checkpoint(checkpoint.path.parent, 1, tree)
    with pytest.raises(CheckpointError, match=r"models\.actor does not match the checkpoint \(ValueError: "):
        run(checkpoint_runs.experiment(files, tmp_path, "raft", steps=2, resume="auto"))


def test_a_pool_of_responses_that_are_no_tokens_ends_in_one_line(files, tmp_path):
    run(checkpoint_runs.experiment(files, tmp_path, "rft", steps=1))
    checkpoint = list_checkpoints(tmp_path / "checkpoints")[-1]
    for response in (["ab", [1], [1], 0.5], [[1], ["x"], [1], 0.5], [[1], [1, 2], [1], 0.5], [[1], [1], [1], "x"], 3):
        tree = checkpoint.read()
        tree["interfaces"]["interfaces.actor"]["pool"]["responses"] = [response]
        write_checkpoint(checkpoint.path.parent, 1, tree)
        with pytest.raises(CheckpointError, match=r"^interfaces\.actor: the state in the checkpoint does not fit"):
            run(checkpoint_runs.experiment(files, tmp_path, "rft", steps=2, resume="auto"))
