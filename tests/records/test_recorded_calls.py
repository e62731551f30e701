"""A replay takes rewards, episodes and asynchronous batches from the record of the run."""

from __future__ import annotations

import shutil

import pytest
import torch

from realign.api import SequenceSample
from realign.config import build_experiment, compose
from realign.errors import CheckpointError, ConfigError
from realign.records.recorded_calls import ROLLOUT, RecordedCall, read_calls, recorded_calls_path, write_calls
from realign.runtime import run
from realign.time_machine.replay import replay, replay_steps
from tests.small_task import recorded
from tests.torchrun_ranks import Ranks

# os.urandom: neither a seed nor the state of a generator in the checkpoint can repeat it
REWARD = "import os\n\ndef score(prompt, response, row):\n    return os.urandom(1)[0] / 256\n"
ENVIRONMENT = """
import os


class Mood:
    def reset(self, row, *, seed):
        return row["prompt"] + "?" * (os.urandom(1)[0] % 3), {}

    def step(self, response):
        return "again", os.urandom(1)[0] / 256, response.turn >= 1, False, {}
"""


@pytest.fixture(scope="module")
def words(task, tmp_path_factory):
    """Return the overrides of a run of five steps with rewards that nothing can repeat."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "reward.py").write_text(REWARD)
    (folder / "mood.py").write_text(ENVIRONMENT)
    shared = [
        f"models.actor.path={task.model}",
        f"data.path={task.prompts}",
        "interfaces.actor.generation={n: 4, max_new_tokens: 6, temperature: 1.0}",
        *("batch_prompts=4", "steps=5", "checkpoint.every_steps=2", "checkpoint.keep=9"),
    ]
    scored = [
        "experiment=grpo_arithmetic",
        "evaluation=null",
        f"interfaces.reward.function={folder / 'reward.py'}:score",
        "interfaces.reward.workers=0",
        *shared,
    ]
    played = [
        "experiment=grpo_environment",
        f"interfaces.agent.environment={folder / 'mood.py'}:Mood",
        "interfaces.agent.max_episode_tokens=24",
        "models.actor.gradient_checkpointing=false",
        "models.actor.optimizer.schedule.warmup=0",
        *shared,
    ]
    return {"rewards": scored, "episodes": played, "folder": folder}


def test_a_resumed_run_leaves_no_calls_of_steps_that_it_repeats(words, tmp_path):
    overrides = [*words["rewards"], f"output_dir={tmp_path / 'run'}"]
    run(build_experiment(compose(overrides)))
    assert recorded_calls_path(tmp_path / "run", 5).is_file()
    start = tmp_path / "run" / "checkpoints" / "step_000002"
    for later in ("step_000004", "step_000005"):
        shutil.rmtree(start.with_name(later), ignore_errors=True)
    run(build_experiment(compose([*overrides, "resume=auto", "resume_allow=[records]", "records.calls=false"])))
    written = sorted(path.name for path in (tmp_path / "run" / "calls").iterdir())
    assert written == ["step_000001.safetensors", "step_000002.safetensors"]


CASES = {
    "rewards": ("rewards", []),
    "dynamic sampling": ("rewards", ["dynamic_sampling.max_batches=3"]),
    "asynchronous rollout": ("rewards", ["rollout=async", "rollout.max_staleness=1"]),
    "asynchronous rollout with dynamic sampling": (
        "rewards",
        ["rollout=async", "rollout.max_staleness=2", "dynamic_sampling.max_batches=3"],
    ),
    "asynchronous rollout with a curriculum": (
        "rewards",
        ["rollout=async", "rollout.max_staleness=1", "data.limit=6", "curriculum=pass_rate"],
    ),
    "episodes": ("episodes", []),
    "asynchronous episodes": ("episodes", ["rollout=async", "rollout.max_staleness=1"]),
}


def of_training(metrics):
    others = ("time/", "rollout/", "eval", "step", "seconds", "settings")
    return {k: v for k, v in metrics.items() if not k.startswith(others) and k[-2:] != "_s"}


@pytest.mark.parametrize("case", [c if c == "rewards" else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_a_step_with_rewards_that_nothing_can_repeat_is_replayed_bit_for_bit(case, words, tmp_path):
    kind, overrides = CASES[case]
    out = tmp_path / "run"
    run(build_experiment(compose([*words[kind], *overrides, f"output_dir={out}"])))
    experiment = build_experiment(compose([str(out / "config.yaml")]))
    for replayed in replay_steps(experiment, out, [3, 4]):
        assert of_training(replayed.metrics) == of_training(recorded(out, replayed.step))
    again = replay(build_experiment(compose([str(out / "config.yaml")])), out, 4, rescore=True)
    # not their means, which are equal by chance once in a thousand runs
    assert not torch.equal(again.batch["rewards"], replayed.batch["rewards"])


def test_a_replay_needs_no_reward_function_unless_it_scores_again(words, tmp_path):
    code, out = tmp_path / "score.py", tmp_path / "run"
    code.write_text(REWARD)
    run(build_experiment(compose([*words["rewards"], f"interfaces.reward.function={code}:score", f"output_dir={out}"])))
    code.unlink()
    experiment = build_experiment(compose([str(out / "config.yaml")]))
    assert of_training(replay(experiment, out, 2).metrics) == of_training(recorded(out, 2))
    with pytest.raises(ConfigError, match=r"score\.py"):
        replay(build_experiment(compose([str(out / "config.yaml")])), out, 2, rescore=True)


def test_rescoring_steps_whose_prompts_follow_from_the_rewards_says_so(words, tmp_path, monkeypatch):
    # as on a GPU, where a replay needs the samples
    monkeypatch.setattr("realign.records.recorded_calls.is_recorded", lambda rpc, *_, **__: rpc.method != "train_step")
    code, out, changed = tmp_path / "score.py", tmp_path / "run", tmp_path / "changed"
    condition = f"(response[:1] in '13579') != os.path.exists({str(changed)!r})"
    code.write_text(f"import os\n\ndef score(prompt, response, row):\n    return float({condition})\n")
    hard = ["data.limit=6", "curriculum=pass_rate", "curriculum.prefer=hard", "curriculum.min_weight=0.01"]
    function = f"interfaces.reward.function={code}:score"
    run(build_experiment(compose([*words["rewards"], *hard, function, f"output_dir={out}"])))
    changed.touch()
    experiment = build_experiment(compose([str(out / "config.yaml")]))
    with pytest.raises(CheckpointError, match=r"--rescore gave other rewards, by which the run chooses its prompts"):
        list(replay_steps(experiment, out, [1, 2, 3, 4, 5], rescore=True))


def test_a_run_that_records_no_calls_calls_again(words, tmp_path):
    out = tmp_path / "run"
    run(build_experiment(compose([*words["rewards"], "records.calls=false", f"output_dir={out}"])))
    assert not (out / "calls").exists()
    replayed, again = (replay(build_experiment(compose([str(out / "config.yaml")])), out, 2) for _ in range(2))
    assert not torch.equal(replayed.batch["rewards"], again.batch["rewards"])
    assert replayed.metrics["response_tokens"] == recorded(out, 2)["response_tokens"]


@pytest.mark.slow
def test_a_run_of_two_ranks_is_replayed_in_one_process(words, tmp_path):
    """Its samples are recorded, since sums of two ranks round differently; all else is equal up to that."""
    out = tmp_path / "run"
    Ranks(tmp_path, *words["rewards"], f"output_dir={out}").succeeded()
    for step in (2, 4):
        replayed = replay(build_experiment(compose([str(out / "config.yaml")])), out, step)
        now, then = of_training(replayed.metrics), of_training(recorded(out, step))
        for name in ("reward", "response_tokens", "rollout_tokens", "grad_norm", "loss", "entropy"):
            assert now[name] == pytest.approx(then[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_on_ray_is_replayed_in_one_process(devices, words, tmp_path):
    """Its samples and rewards are recorded. On one worker, training is the same bit for bit."""
    out = tmp_path / "run"
    overrides = ["runtime=ray", f"+runtime.placement.actor.devices={devices}", f"output_dir={out}"]
    run(build_experiment(compose([*words["rewards"], *overrides])))
    for replayed in replay_steps(build_experiment(compose([str(out / "config.yaml")])), out, [3, 4]):
        now, then = of_training(replayed.metrics), of_training(recorded(out, replayed.step))
        if devices == 1:
            assert {name: then[name] for name in now} == now
        else:
            for name in ("reward", "response_tokens", "rollout_tokens", "grad_norm", "loss", "entropy"):
                assert now[name] == pytest.approx(then[name], rel=1e-4, abs=1e-6), name


def test_calls_are_read_as_they_were_written(tmp_path):
    batch = SequenceSample.from_sequences(
        ["a", ("b", 1)], {"input_ids": [[[1, 2], [3]], [[4]]], "rewards": [[[0.5], [float("nan")]], [[2.0]]]}
    ).with_metadata(row=[{"x": [1, None]}, {}])
    write_calls(tmp_path, 7, {"reward/0": RecordedCall(batch, {"rollout/x": 1.5})})
    call = read_calls(tmp_path, 7)["reward/0"]
    assert call.batch.ids == batch.ids
    assert call.batch.metadata == batch.metadata
    assert call.batch.lengths == batch.lengths or all(call.batch.lengths[k] == v for k, v in batch.lengths.items())
    assert torch.equal(call.batch["input_ids"], batch["input_ids"])
    assert torch.equal(call.batch["rewards"].nan_to_num(9), batch["rewards"].nan_to_num(9))
    assert call.metrics == {"rollout/x": 1.5}
    assert read_calls(tmp_path, 8) == {}
    write_calls(tmp_path, 8, {})


def test_a_call_that_cannot_be_written_is_a_warning_and_a_damaged_file_an_error(tmp_path):
    batch = SequenceSample.from_sequences(["a"], {"input_ids": [[[1]]]}).with_metadata(row=[object()])
    with pytest.warns(UserWarning, match="makes its calls again"):
        write_calls(tmp_path, 1, {ROLLOUT: RecordedCall(batch, {})})
    assert not list((tmp_path / "calls").glob("*"))
    recorded_calls_path(tmp_path, 1).parent.mkdir(exist_ok=True)
    recorded_calls_path(tmp_path, 1).write_bytes(b"\x08" + b"\0" * 40)
    with pytest.raises(CheckpointError, match="Remove the file"):
        read_calls(tmp_path, 1)
