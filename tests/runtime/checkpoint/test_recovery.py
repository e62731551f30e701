from __future__ import annotations

import pytest

from realign.runtime import CheckpointSpec, Experiment, Ray
from realign.runtime.checkpoint.recovery import Attempts
from realign.runtime.processes.worker_failures import WorkerLost
from tests.runtime.test_step import experiment

LOST = WorkerLost("RPC 'actor_gen', actor: generate: the worker has died")


def on_ray(tmp_path, **changes) -> Experiment:
    settings = {"runtime": Ray(max_recoveries=1), "checkpoint": CheckpointSpec(every_steps=1)}
    return experiment(tmp_path, **settings | changes)


def checkpointed(e: Experiment, step: int) -> None:
    (e.output_dir / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)


def test_a_run_continues_from_its_own_checkpoint_with_fresh_interfaces(tmp_path):
    e = on_ray(tmp_path)
    attempts = Attempts(e)
    assert attempts.experiment is e
    e.interfaces["reward"].shuffle = True  # the failed attempt leaves a changed state
    attempts.began()
    checkpointed(e, 4)
    with pytest.warns(UserWarning, match=r"has died. The run continues after step 4 \(recovery 1 of at most 1\)"):
        attempts.recover(LOST)
    assert attempts.experiment.resume == "auto"
    assert attempts.experiment.interfaces["reward"].shuffle is False
    with pytest.raises(WorkerLost, match=r"recovered runtime\.max_recoveries=1 times\. Restart it"):
        attempts.recover(LOST)


def test_checkpoints_of_an_earlier_run_are_not_used(tmp_path):
    e = on_ray(tmp_path, overwrite=True)
    checkpointed(e, 9)
    attempts = Attempts(e)
    with pytest.warns(UserWarning, match=r"The run restarts \(recovery 1 of at most 1\)"):
        attempts.recover(LOST)  # before the output folder belongs to this run
    assert attempts.experiment.resume is None


def test_a_run_without_a_checkpoint_yet_restarts_with_its_original_resume_settings(tmp_path):
    how = {"resume": "auto", "resume_skip": ["optimizer"], "resume_allow": ["models"]}
    e = on_ray(tmp_path, runtime=Ray(max_recoveries=3), **how)
    checkpointed(e, 10)
    checkpointed(e, 30)
    attempts = Attempts(e)
    attempts.began()
    with pytest.warns(UserWarning, match="The run restarts"):
        attempts.recover(LOST)
    assert {name: getattr(attempts.experiment, name) for name in how} == how
    attempts.began()
    checkpointed(e, 12)  # after resume=.../step_000010; the checkpoint of step 30 will soon be removed
    with pytest.warns(UserWarning, match="The run continues after step 12"):
        attempts.recover(LOST)
    assert attempts.experiment.resume == str(e.output_dir / "checkpoints" / "step_000012")
    checkpointed(e, 31)
    with pytest.warns(UserWarning, match="The run continues after step 31"):
        attempts.recover(LOST)
    now = attempts.experiment
    assert (now.resume, now.resume_skip, now.resume_allow) == ("auto", [], [])


@pytest.mark.parametrize("changes", [{"checkpoint": None}, {"runtime": Ray(max_recoveries=0)}])
def test_a_run_that_cannot_continue_says_why(tmp_path, changes):
    why = "checkpoint=null" if "checkpoint" in changes else "max_recoveries=0 times"
    with pytest.raises(WorkerLost, match=f"has died. The run .*{why}"):
        Attempts(on_ray(tmp_path, **changes)).recover(LOST)
