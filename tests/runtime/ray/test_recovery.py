"""Test runs whose workers are killed: they resume from the last checkpoint, and end with the same results."""

from __future__ import annotations

import os
import re
import signal
import warnings
from pathlib import Path

import pytest

from realign.runtime import CheckpointSpec, Ray, run
from realign.runtime.ray.groups import WorkerGroup
from tests.runtime.checkpoint.test_state import assert_same_tree, experiment, start_anywhere, started, untimed
from tests.runtime.ray.test_runtime import state

pytestmark = pytest.mark.usefixtures("cluster")
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
    assert_same_tree(state(tmp_path / "killed"), state(tmp_path / "calm"))
    kept = untimed(tmp_path / "killed" / "metrics.jsonl")
    assert kept == untimed(tmp_path / "calm" / "metrics.jsonl")
    assert [record["step"] for record in result.history] == list(range(6))
    saved = Path("final", "actor", "model.safetensors")
    assert (tmp_path / "killed" / saved).read_bytes() == (tmp_path / "calm" / saved).read_bytes()
