"""A replayed step is the step of the run, bit for bit, whatever the algorithm, the rollout and what trains."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from realign.config import build_experiment, compose
from realign.errors import CheckpointError, ConfigError
from realign.runtime import run
from realign.time_machine.replay import differences, last_checkpoint, replay, write
from tests.small_task import recorded

REWARD = """def score(prompt, response, row):
    return len(response) / 5 + (response[:1] in "13579")
"""
CASES = {
    "grpo": [],
    "mini-batches and a reference": [
        "interfaces.actor.epochs=2",
        "interfaces.actor.n_minibatches=2",
        "interfaces.actor.kl.place=loss",
        "interfaces.actor.kl.coef=0.1",
    ],
    "lora": ["models.actor.trains=lora", "models.actor.trains.rank=4"],
    "dynamic sampling": ["dynamic_sampling.max_batches=3"],
    "curriculum": ["data.limit=6", "curriculum=pass_rate", "curriculum.prefer=hard"],
    "curriculum with dynamic sampling": [
        "data.limit=12",
        "curriculum.pass_reward=0.7",
        "dynamic_sampling={}",
        "dynamic_sampling.generation_prompts=2",
    ],
    "asynchronous rollout": ["rollout=async", "rollout.max_staleness=0"],
    "moments of rewards": ["interfaces.actor.reward.scale=running", "interfaces.actor.kl.place=reward"],
}


@pytest.fixture(scope="module")
def trained(task, tmp_path_factory):
    """Return a function that trains for 5 steps with a checkpoint after steps 2 and 4, and returns the folder."""
    finished = {}

    def train(*overrides):
        if overrides not in finished:
            folder = tmp_path_factory.mktemp("run")
            (folder / "reward.py").write_text(REWARD)
            out = folder / "run"
            words = [
                "experiment=grpo_arithmetic",
                f"models.actor.path={task.model}",
                f"data.path={task.prompts}",
                "evaluation=null",
                f"interfaces.reward.function={folder / 'reward.py'}:score",
                "interfaces.reward.workers=0",
                "interfaces.actor.generation.n=4",
                "batch_prompts=4",
                "steps=5",
                "checkpoint.every_steps=2",
                "checkpoint.keep=9",
                f"output_dir={out}",
                *overrides,
            ]
            run(build_experiment(compose(words)))
            finished[overrides] = out
        return finished[overrides]

    return train


def experiment_of(folder, *overrides):
    return build_experiment(compose([str(folder / "config.yaml"), *overrides]))


def of_training(metrics):
    others = ("time/", "eval", "step", "seconds", "settings")
    return {k: v for k, v in metrics.items() if not k.startswith(others) and k[-2:] != "_s"}


@pytest.mark.parametrize("case", [c if c == "grpo" else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_a_replayed_step_has_the_metrics_of_the_run(case, trained):
    folder = trained(*CASES[case])
    for step in (2, 4):  # from the start, and one step after a checkpoint
        replayed = replay(experiment_of(folder), folder, step)
        assert of_training(replayed.metrics) == of_training(recorded(folder, step)), case
    assert differences(replayed, replay(experiment_of(folder), folder, 4)) == []


def test_a_replay_shows_tokens_and_gradients_that_the_run_did_not_record(trained, tmp_path):
    folder = trained()
    replayed = replay(experiment_of(folder), folder, 3)
    (steps,) = replayed.gradients.values()
    norm = sum(x**2 for x in steps[0].values()) ** 0.5
    assert norm == pytest.approx(min(1.0, recorded(folder, 3)["grad_norm"]), rel=1e-4)  # clipped at 1
    write(replayed, folder, tmp_path / "step")
    tensors = load_file(tmp_path / "step" / "batch.safetensors")
    assert torch.equal(tensors["rewards"], replayed.batch["rewards"])
    assert len(tensors["actor/token/advantage"]) == len(tensors["input_ids"])
    tokens = [json.loads(line) for line in (tmp_path / "step" / "tokens.jsonl").read_text().splitlines()]
    assert len(tokens) == len(replayed.batch["rewards"]) == 16
    told = json.loads((tmp_path / "step" / "step.json").read_text())
    assert told["metrics"]["grad_norm"] == recorded(folder, 3)["grad_norm"]
    assert told["gradients"]["actor"][0].keys() == steps[0].keys()


def test_the_first_difference_names_the_response_and_the_token(trained):
    folder = trained()
    first = replay(experiment_of(folder), folder, 2)
    rewards = first.batch["rewards"].clone()
    rewards[6] += 0.5
    second = replace(first, batch=first.batch.with_sequences(rewards=rewards))
    (difference,) = differences(first, second)
    assert difference.what == "rewards of the batch"
    assert difference.where == f"prompt {first.batch.ids[1]}, response 2"
    assert difference.size == "1 of 16, at most 0.5"
    ids = first.batch["input_ids"].clone()
    start = int(first.batch.cu_seqlens()[6])
    ids[start + 4] += 1
    second = replace(first, batch=first.batch.with_data({"input_ids": ids}, lengths=first.batch.lengths["input_ids"]))
    (difference,) = differences(first, second)
    assert difference.where.startswith(f"prompt {first.batch.ids[1]}, response 2, token 4 (")


def test_a_tolerance_hides_rounding_but_not_a_change(trained):
    folder = trained()
    first = replay(experiment_of(folder), folder, 2)
    logprobs = first.batch["logprobs"] + 1e-6 * first.batch["loss_mask"]
    second = replace(first, batch=first.batch.with_tokens(logprobs=logprobs), weights={"actor": "of another device"})
    assert {difference.what for difference in differences(first, second)} == {
        "weights of actor before the step",
        "logprobs of the batch",
    }
    assert differences(first, second, tolerance=1e-5) == []


def test_a_gradient_that_is_not_finite_in_one_run_differs(trained):
    folder = trained()
    first = replay(experiment_of(folder), folder, 2)
    ((norms,),) = first.gradients.values()
    name = list(norms)[3]
    (difference,) = differences(first, replace(first, gradients={"actor": [norms | {name: float("nan")}]}))
    assert difference.where == f"optimizer step 1, {name}"
    assert difference.size == f"1 of {len(norms)} weights"


def test_a_step_that_the_run_has_not_taken_is_refused(trained):
    folder = trained()
    with pytest.raises(CheckpointError, match="step 6: the run has steps 1 to 5"):
        replay(experiment_of(folder), folder, 6)
    with pytest.raises(ConfigError, match=r"does not train\. Roles that do: actor"):
        replay(experiment_of(folder), folder, 2, break_in="reward")
    assert last_checkpoint(folder, 3).step == 2
    assert last_checkpoint(folder, 1) is None


def test_a_debugger_stops_in_the_loss_of_the_step(trained, monkeypatch):
    stopped = []

    class Debugger:
        def runcall(self, call, *args, **kwargs):
            stopped.append(call.__name__)
            return call(*args, **kwargs)

    monkeypatch.setattr("realign.time_machine.replay.pdb.Pdb", Debugger)
    folder = trained()
    replayed = replay(experiment_of(folder), folder, 4, break_in="actor")
    assert set(stopped) == {"loss"}
    assert of_training(replayed.metrics) == of_training(recorded(folder, 4))
