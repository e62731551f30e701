"""Whole runs on the virtual device, or on a GPU: every tensor is where CUDA needs it, in bf16 and in fp32."""

from __future__ import annotations

import json
import math

import pytest
import torch

from realign.config import build_experiment, compose
from realign.engines.transformers_model import TransformersModel
from realign.errors import RunError
from realign.runtime import run
from realign.samplers.servers.weights import WeightFolders
from realign.samplers.servers.worker.realign_worker import map_folder

GRPO = "experiment=grpo_arithmetic"
POLICY = {
    "grpo": [],
    "grpo in fp32": ["models.actor.dtype=float32"],
    "greedy evaluation and a checkpoint": ["evaluation.every_steps=1", "checkpoint.every_steps=1"],
    "a reference in the loss": ["interfaces.actor.kl.place=loss", "interfaces.actor.kl.coef=0.1"],
    "a critic": [
        "interfaces.actor._target_=realign.interfaces.ppo.PPOActorInterface",
        "interfaces.actor.critic=own",
        "graph._target_=realign.interfaces.ppo.dataflow",
        "models.critic._target_=realign.engines.TransformersModel",
        "models.critic.path=${models.actor.path}",
        "models.critic.head._target_=realign.models.Value",
        "models.critic.optimizer.lr=1e-3",
        "interfaces.critic._target_=realign.interfaces.critic.PPOCriticInterface",
    ],
    "lora": ["models.actor.trains._target_=realign.models.Lora", "models.actor.trains.rank=4"],
    "gradient checkpointing": ["models.actor.gradient_checkpointing=true"],
    "modules of transformers": ["models.actor.fused_rollout=false"],
    "sdpa, deterministic": ["models.actor.attention=sdpa", "models.actor.deterministic=true"],
    "asynchronous rollout": ["rollout=async"],
    "recomputed log-probs": ["interfaces.actor.recompute=true"],
}


@pytest.mark.parametrize("case", POLICY)
def test_a_policy_trains_on_the_device(case, overrides, tmp_path):
    experiment = build_experiment(compose(overrides(GRPO, *POLICY[case])))
    result = run(experiment)
    assert all(math.isfinite(norm) for norm in result.series("grad_norm"))
    # the ratio is 1 before the first update, up to the rounding of bf16
    assert result.history[1]["first_logprob_diff_max"] < (1e-4 if "fp32" in case else 0.1)
    assert (tmp_path / "run" / "final" / "actor" / "config.json").exists()
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "cuda" in json.dumps(info)


def test_the_model_is_on_the_device_in_fp32_and_computes_in_bf16(task):
    model = TransformersModel(str(task.model)).load("actor", seed=0)
    weights = model.engine.weights()
    assert {weight.device.type for weight in weights.values()} == {"cuda"}
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_servers_get_the_weights_of_the_device(task, tmp_path):
    engine = TransformersModel(str(task.model)).load("actor", seed=0).engine
    folders = WeightFolders(str(tmp_path), deltas=True)
    folders.dtype = torch.bfloat16
    for number in range(2):
        sent = map_folder(folders.write(engine, number).folder)
        for name, x in engine.weights().items():
            assert torch.equal(sent[name], x.to(sent[name].dtype).cpu())
        engine.load_weights({name: 1.25 * x for name, x in engine.weights().items()})
        engine.save = None  # the first weights only
    folders.remove()


def test_a_run_resumes(overrides, tmp_path):
    straight = run(build_experiment(compose(overrides(GRPO, "steps=3", f"output_dir={tmp_path / 'straight'}"))))
    parts = [f"output_dir={tmp_path / 'parts'}", "checkpoint.every_steps=1"]
    run(build_experiment(compose(overrides(GRPO, "steps=2", *parts))))
    resumed = run(build_experiment(compose(overrides(GRPO, "steps=3", "resume=auto", *parts))))
    assert resumed.series("reward")[-1] == straight.series("reward")[-1]
    # on a GPU, the backward pass of flash attention sums in no fixed order
    rounding = 0 if torch.cuda.get_device_name() == "virtual device" else 1e-5
    assert resumed.series("grad_norm")[-1] == pytest.approx(straight.series("grad_norm")[-1], rel=rounding, abs=0)


@pytest.mark.parametrize(("experiment", "role"), [("dpo", "actor"), ("reward_model", "reward")])
def test_pairs_train_on_the_device(experiment, role, task, tmp_path):
    rows = [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": "0"} for a in range(10, 18)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ["steps=2", "batch_prompts=4", "save_every_steps=null", f"output_dir={tmp_path / 'run'}"]
    words = [f"experiment={experiment}", f"models.{role}.path={task.model}", f"data.path={pairs}", *sizes]
    result = run(build_experiment(compose(words)))
    assert len(result.series("grad_norm")) == 2


def test_a_full_device_ends_the_run_with_what_to_lower(overrides, limit):
    experiment = build_experiment(compose(overrides(GRPO)))
    with limit(100_000), pytest.raises(RunError, match="memory"):
        run(experiment)
