"""Test the description of what a run waits for, what errors and a solved task leave, and errors of one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console

from realign.api import GenerationConfig
from realign.engines.training.stepper import Stepper
from realign.engines.training.transformers_engine import TransformersEngine
from realign.errors import RunComplete, RunError
from realign.interfaces.grpo import GRPOActorInterface, dataflow
from realign.ranks import current, is_of_another_rank
from realign.records.checkpoint.folder import list_checkpoints
from realign.runtime import Async, CheckpointSpec, DynamicSampling, run
from realign.runtime.calls import call
from realign.runtime.local import LocalRuntime
from realign.runtime.processes.watchdog import Watch
from realign.runtime.training import activity
from tests import checkpoint_runs
from tests.checkpoint_runs import assert_same_run, start_anywhere, started
from tests.engines.distributed.run_ranks import run_ranks
from tests.toys import GENERATION, CountToken, experiment

PARTS = {"actor": GRPOActorInterface(), "reward": CountToken()}


def during(what: str | None, *, first: bool) -> str:
    watch, graph = Watch(), dataflow(PARTS)
    if what is None:
        return activity(watch, graph, PARTS, first_step=first)
    with watch.doing(what):
        return activity(watch, graph, PARTS, first_step=first)


def test_the_current_call_is_named_and_the_first_call_of_a_reward_starts_its_workers():
    reward = next(rpc.name for rpc in dataflow(PARTS).rpcs if rpc.model == "reward")
    assert during(f"call {reward!r}", first=True) == (
        f"running call {reward!r} for the first time, which starts its workers, 0 s"
    )
    assert during(f"call {reward!r}", first=False) == f"running call {reward!r}, 0 s"
    assert during("call 'actor_gen'", first=True) == "running call 'actor_gen' for the first time, 0 s"
    assert during("evaluation", first=True) == "running evaluation, 0 s"


FAILS_ON_RANK_0 = {
    "metrics": "realign.records.metrics.records.JsonLinesWriter.log",
    "recorded calls": "realign.records.recorded_calls.write_calls",
    "samples": "realign.runtime.training.TrainingLoop._warn",
    "details": "realign.records.metrics.details.RunDetails.after_step",
    "final models": "realign.runtime.run_checkpoints.hashes_of",
}


def error_of_rank_0(folder: Path, name: str, every_steps: int = 1) -> tuple[str, bool]:
    with patch(name, side_effect=OSError("no space left")), pytest.raises(OSError, match="no space") as caught:
        run(experiment(folder, steps=3, checkpoint=CheckpointSpec(every_steps=every_steps)))
    return str(caught.value), is_of_another_rank(caught.value)


@pytest.mark.parametrize(
    "what", ["details", *(pytest.param(x, marks=pytest.mark.slow) for x in FAILS_ON_RANK_0 if x != "details")]
)
def test_an_error_that_only_rank_0_sees_ends_all_ranks_with_it(tmp_path, what):
    """Otherwise, the others would wait for rank 0 in their next collective, until it is gone."""
    own, other = run_ranks(2, error_of_rank_0, tmp_path, FAILS_ON_RANK_0[what])
    assert own == ("no space left", False)
    assert other == ("no space left", True)


def test_an_error_of_rank_0_after_the_last_checkpoint_ends_all_ranks_with_it(tmp_path):
    own, other = run_ranks(2, error_of_rank_0, tmp_path, FAILS_ON_RANK_0["final models"], 10)
    assert own == ("no space left", False)
    assert other == ("no space left", True)


SELDOM = CheckpointSpec(every_minutes=1e9, keep=9)


class Bug(Exception):
    """An error of user code."""


def checkpoints(run_folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(run_folder / "checkpoints")]


def calls_that_fail(method: str, step: int) -> Callable[..., Any]:
    """Return `call`, which fails for the first call of a method in a step."""

    def made(rpc, model, *arguments):
        if rpc.method == method and model.version == step - 1:
            raise Bug(rpc.name)
        return call(rpc, model, *arguments)

    return made


FEW = ("ppo", "rft", "curriculum")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in FEW),
        ("grpo", {"rollout": Async(max_staleness=0), "evaluation": None}),
    ],
)
def test_an_error_before_a_step_changes_weights_keeps_the_steps_before_bit_for_bit(files, tmp_path, name, changes):
    """All that comes before the update has changed its state by then: data, rewards, moments, generators."""
    started(files, tmp_path / "whole", name, **changes)
    start_anywhere()
    made = checkpoint_runs.experiment(files, tmp_path / "parts", name, checkpoint=SELDOM, **changes)
    with patch("realign.runtime.local.call", calls_that_fail("train_step", 3)), pytest.raises(Bug):
        run(made)
    assert checkpoints(tmp_path / "parts")[-1] == 2
    start_anywhere()
    run(checkpoint_runs.experiment(files, tmp_path / "parts", name, resume="auto", **changes))
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def counted(method: Callable[..., Any], number: int, *, before: bool) -> Callable[..., Any]:
    """Return a method that fails in its call of this number, before or after it has done its work."""
    calls = 0

    def counting(self, *arguments, **settings):
        nonlocal calls
        calls += 1
        if before and calls == number:
            raise Bug
        result = method(self, *arguments, **settings)
        if calls == number:
            raise Bug
        return result

    return counting


@pytest.mark.parametrize(
    ("owner", "name", "number", "before", "kept"),
    [
        # two mini-batches per step: the fifth call is the first one of step 3
        (TransformersEngine, "accumulate", 5, True, [2]),
        (TransformersEngine, "accumulate", 5, False, [2]),
        (TransformersEngine, "accumulate", 6, True, []),
        (Stepper, "update", 5, True, []),  # torch may have changed some of the weights
        (Stepper, "update", 5, False, []),
    ],
)
def test_a_step_that_has_begun_to_change_weights_is_not_kept_as_if_it_were_complete(
    files, tmp_path, owner, name, number, before, kept
):
    made = checkpoint_runs.experiment(files, tmp_path / "run", "grpo", checkpoint=SELDOM)
    with patch.object(owner, name, counted(getattr(owner, name), number, before=before)), pytest.raises(Bug):
        run(made)
    assert checkpoints(tmp_path / "run") == kept


class FailsIn(CountToken):
    """Reward that fails in its call number `at`."""

    at: int = 0
    calls: int = 0

    def inference(self, model, data, mb_spec):
        self.calls += 1
        if self.calls == self.at:
            raise Bug("the quota is used up")
        return super().inference(model, data, mb_spec)


def failing(at: int) -> FailsIn:
    reward = FailsIn()
    reward.at = at
    return reward


@pytest.mark.parametrize("rollout", [{}, {"dynamic_sampling": DynamicSampling()}])
def test_a_reward_that_fails_costs_no_complete_step(tmp_path, rollout):
    parts = {"actor": GRPOActorInterface(generation=GENERATION), "reward": failing(3)}
    with pytest.raises(Bug):
        run(experiment(tmp_path, steps=5, interfaces=parts, checkpoint=SELDOM, evaluation=None, **rollout))
    assert checkpoints(tmp_path / "run") == [2]
    result = run(experiment(tmp_path, steps=4, resume="auto", evaluation=None, **rollout))
    assert result.series("step") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("where", ["evaluate", "save"])
def test_an_error_after_the_training_of_a_step_keeps_this_step(tmp_path, where):
    """The evaluation before training runs first; the models are saved only at the end."""
    number, kept = {"evaluate": (2, 2), "save": (1, 3)}[where]
    name = f"realign.runtime.local.LocalRuntime.{where}"
    with patch(name, counted(getattr(LocalRuntime, where), number, before=True)), pytest.raises(Bug):
        run(experiment(tmp_path, checkpoint=SELDOM))
    assert checkpoints(tmp_path / "run") == [kept]
    assert run(experiment(tmp_path, resume="auto")).series("step") == [0, 1, 2, 3]
    assert (tmp_path / "run" / "final" / "actor").is_dir()


def test_a_checkpoint_that_cannot_be_written_does_not_hide_the_first_error(tmp_path):
    parts = {"actor": GRPOActorInterface(generation=GENERATION), "reward": failing(3)}
    made = experiment(tmp_path, interfaces=parts, checkpoint=SELDOM, evaluation=None)
    with (
        patch("realign.runtime.run_checkpoints.run_state", side_effect=RuntimeError("out of memory")),
        pytest.warns(UserWarning, match="checkpoint of step 2 was not written.*out of memory"),
        pytest.raises(Bug, match="quota"),
    ):
        run(made)


def test_an_error_is_told_with_how_to_continue(tmp_path):
    shown = StringIO()
    parts = {"actor": GRPOActorInterface(generation=GENERATION), "reward": failing(3)}
    with pytest.raises(Bug):
        run(experiment(tmp_path, interfaces=parts, checkpoint=SELDOM, evaluation=None), console=Console(file=shown))
    assert "Step 2 of 3 is the last complete one. Continue with resume=auto." in shown.getvalue()


def error_of_a_rank(folder: Path, where: str) -> list[int]:
    parts = {"actor": GRPOActorInterface(generation=GENERATION), "reward": CountToken()}
    if where == "all ranks":
        parts["reward"] = failing(3)
    made = experiment(folder, interfaces=parts, checkpoint=SELDOM, evaluation=None, steps=4)
    fails = where == "rank 1" and current().rank == 1
    method = calls_that_fail("train_step", 3) if fails else call
    with patch("realign.runtime.local.call", method), pytest.raises((Bug, RuntimeError)):
        run(made)
    return checkpoints(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("where", "kept"), [("all ranks", [2]), ("rank 1", [])])
def test_ranks_keep_the_last_step_together_or_not_at_all(tmp_path, where, kept):
    assert run_ranks(2, error_of_a_rank, tmp_path, where)[0] == kept


class Constant(CountToken):
    """Rewards that differ within a group up to call `until`, then `later` for all."""

    until, later, calls = 3, 1.0, 0

    def inference(self, model, data, mb_spec):
        self.calls += 1
        n = data.n_sequences
        rewards = (torch.arange(n) % 2).float() if self.calls < self.until else torch.full((n,), self.later)
        return data.select(["input_ids"]).with_sequences(rewards=rewards).select(["rewards"])


def solving(tmp_path: Path, later: float, until: int = 3, **changes: Any):
    reward = Constant()
    reward.until, reward.later = until, later
    parts = {"actor": GRPOActorInterface(generation=GENERATION), "reward": reward}
    settings = {"interfaces": parts, "dynamic_sampling": DynamicSampling(max_batches=2), "evaluation": None, "steps": 5}
    return experiment(tmp_path, checkpoint=SELDOM, **(settings | changes))


def test_a_task_that_dynamic_sampling_finds_solved_ends_well_with_its_models(tmp_path):
    result = run(solving(tmp_path, 1.0))
    assert result.stopped is not None
    assert result.stopped.startswith("dynamic_sampling: none of 8 prompts in 1 batches")
    assert result.stopped.endswith("the task is solved")
    assert result.series("step") == [0, 1, 2]
    assert (tmp_path / "run" / "final" / "actor").is_dir()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "stopped"
    with pytest.raises(RunComplete, match=r"dynamic_sampling stopped the run at step 2 of 5.*dynamic_sampling=null"):
        run(solving(tmp_path, 1.0, resume="auto"))


def test_asynchronous_rollout_that_finds_the_task_solved_ends_well_too(files, tmp_path):
    reward = Constant()
    reward.until = 9  # prompts are scored one by one
    actor = GRPOActorInterface(generation=GenerationConfig(n=4, max_new_tokens=5))
    changes = {"interfaces": {"actor": actor, "reward": reward}, "rollout": Async(max_staleness=1)}
    result = run(checkpoint_runs.experiment(files, tmp_path, "dynamic sampling", checkpoint=SELDOM, **changes))
    assert result.stopped is not None
    assert result.stopped.endswith("the task is solved")
    assert 0 < result.history[-1]["step"] < checkpoint_runs.STEPS
    assert (tmp_path / "final" / "actor").is_dir()


@pytest.mark.parametrize(("later", "until"), [(0.0, 3), (0.5, 3), (float("nan"), 3), (1.0, 1)])
def test_prompts_that_teach_nothing_for_another_reason_are_an_error_that_keeps_the_steps(tmp_path, later, until):
    """Rewards below the best, none at all, or equal ones from the first step on, which may be a mistake."""
    with pytest.raises(RunError, match="passed the filter"):
        run(solving(tmp_path, later, until))
    assert checkpoints(tmp_path / "run") == ([2] if until == 3 else [])
    assert not (tmp_path / "run" / "final").exists()
