"""Test runs whose workers are killed: they resume from the last checkpoint, and end with the same results."""

from __future__ import annotations

import os
import re
import signal
import warnings
from pathlib import Path

import pytest

from realign.runtime import CheckpointSpec, Ray, run
from realign.runtime.ray.workers import WorkerGroup
from realign.runtime.runtime_spec import RuntimeSpec
from tests.checkpoint_runs import assert_same_tree, experiment, start_anywhere, started, state, untimed

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]
SYNCED, OFTEN = "synced reference", CheckpointSpec(every_steps=2)


class Killing:
    """Kills the worker of a verb at its n-th request. Training workers are killed during the request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *deaths: tuple[str, str, int]) -> None:
        self.left = list(deaths)
        self.asked: dict[tuple[str, str], int] = {}
        ask = WorkerGroup.ask

        def watched(group: WorkerGroup, role: str, verb: str, parts, hook=None):
            n = self.asked[role, verb] = self.asked.get((role, verb), 0) + 1
            if (role, verb, n) in self.left:
                self.left.remove((role, verb, n))
                if verb in ("train", "accumulate"):
                    hook = die
                else:
                    os.kill(group.pids[-1], signal.SIGKILL)
            return ask(group, role, verb, parts, hook)

        monkeypatch.setattr(WorkerGroup, "ask", watched)


def die(output, mb):
    output.logprobs()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_run_whose_workers_are_killed_ends_with_the_same_bits(files, tmp_path, monkeypatch):
    """Kill at the first rollout, while restoring, during weight sync, and within an optimizer step."""
    started(files, tmp_path / "calm", SYNCED, checkpoint=OFTEN)
    deaths = [
        ("actor", "generate", 1),
        ("actor", "load_state_dict", 1),
        ("ref", "load_weights", 2),
        ("actor", "accumulate", 10),
    ]
    killing = Killing(monkeypatch, *deaths)
    start_anywhere()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        runtime = Ray(max_recoveries=4)
        result = run(experiment(files, tmp_path / "killed", SYNCED, runtime=runtime, checkpoint=OFTEN))
    assert killing.left == []
    told = [re.sub(r".*\. The run ", "", str(w.message)) for w in caught if "recovery" in str(w.message)]
    assert told == [
        f"continues after step {step} (recovery {i} of at most 4)." for i, step in enumerate((0, 0, 0, 2), 1)
    ]
    assert any("RPC 'actor_gen', actor: generate" in str(w.message) for w in caught)
    assert [record["step"] for record in result.history] == list(range(6))
    assert_ended_as(tmp_path / "killed", tmp_path / "calm")


PHASES = {
    "loading": ("ref", "fixed_weights", 1),
    "generation": ("actor", "generate", 4),
    "inference": ("actor", "forward", 3),
    "inference of the reference": ("ref", "forward", 2),
    "optimizer step": ("actor", "apply", 5),
    "end of the train step": ("actor", "start_step", 2),
    "source of the weight sync": ("actor", "weights", 3),
    "checkpoint": ("actor", "state_dict", 3),
    "saving": ("actor", "save", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "phases"), [(1, tuple(PHASES)), (2, ("generation", "inference", "optimizer step", "checkpoint"))]
)
def test_a_run_whose_worker_is_killed_in_any_phase_of_a_step_ends_with_the_same_bits(
    files, tmp_path, monkeypatch, devices, phases
):
    """With two devices, the last rank of two is killed, while the first rank waits in a collective."""

    def runtime() -> RuntimeSpec:
        return Ray(placement={"actor": {"devices": devices}}, max_recoveries=1)

    start_anywhere()
    run(experiment(files, tmp_path / "calm", SYNCED, runtime=runtime(), checkpoint=OFTEN))
    for phase in phases:
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            killing = Killing(patch, PHASES[phase])
            start_anywhere()
            run(experiment(files, tmp_path / phase, SYNCED, runtime=runtime(), checkpoint=OFTEN))
        assert killing.left == [], phase
        assert sum("recovery 1 of at most 1" in str(w.message) for w in caught) == 1, phase
        assert_ended_as(tmp_path / phase, tmp_path / "calm")


def assert_ended_as(killed: Path, calm: Path) -> None:
    """Compare the last checkpoint, the metrics and the saved model of two runs bit for bit."""
    assert_same_tree(state(killed), state(calm))
    assert untimed(killed / "metrics.jsonl") == untimed(calm / "metrics.jsonl")
    saved = Path("final", "actor", "model.safetensors")
    assert (killed / saved).read_bytes() == (calm / saved).read_bytes()
