"""Train the tiny BART of the example end to end: SFT, GRPO, PPO with a shared critic, and an exact resume."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import BartForConditionalGeneration

from examples.tiny_bart import write
from realign.config import build_experiment, compose
from realign.runtime import run
from tests.small_task import small_task

REWARD = """
def score(prompt, response, row):
    return sum(letter in "02468" for letter in response) / 5
"""
SHARED_CRITIC = [
    "graph={_target_: realign.interfaces.ppo.dataflow}",
    "interfaces.actor={_target_: realign.interfaces.ppo.PPOActorInterface, critic: shared, value: {coef: 0.5}}",
    "interfaces.critic._target_=realign.interfaces.critic.PPOCriticInterface",
    "models.actor.head.value_head={}",
    "models.critic={_target_: realign.engines.SharedModel, of: actor}",
]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    made = small_task(tmp_path_factory.mktemp("task"))
    write(made.model, made.model.parent / "bart")
    (made.model.parent / "reward.py").write_text(REWARD)
    return made


def trained(task, out, experiment, *words):
    folder = task.model.parent
    data = {"sft_arithmetic": task.demonstrations, "grpo_arithmetic": task.prompts}[experiment]
    common = [f"models.actor.path={folder / 'bart'}", f"data.path={data}", f"output_dir={out}", "evaluation=null"]
    return run(build_experiment(compose([f"experiment={experiment}", *common, *words])))


def grpo(task, out, steps, *words):
    reward = [f"interfaces.reward.function={task.model.parent / 'reward.py'}:score", "interfaces.reward.workers=0"]
    sizes = ["batch_prompts=8", "interfaces.actor.generation={n: 8, max_new_tokens: 5}", f"steps={steps}"]
    optimizer = "models.actor.optimizer={lr: 1e-2, schedule: {kind: constant, warmup: 0}}"
    return trained(task, out, "grpo_arithmetic", *reward, *sizes, optimizer, *words)


def test_sft_learns_the_demonstrations_and_saves_a_bart(task, tmp_path):
    optimizer = "models.actor.optimizer={lr: 1e-2, schedule: {kind: constant, warmup: 0}}"
    result = trained(task, tmp_path / "run", "sft_arithmetic", "steps=12", "batch_prompts=32", optimizer)
    nll = result.series("nll")
    assert nll[-1] < nll[0] - 0.5
    saved = BartForConditionalGeneration.from_pretrained(tmp_path / "run" / "final" / "actor")
    start = BartForConditionalGeneration.from_pretrained(task.model.parent / "bart")
    assert not torch.equal(saved.model.shared.weight, start.model.shared.weight)


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(task, tmp_path):
    grpo(task, tmp_path / "whole", 4)
    half = ["checkpoint.every_steps=2"]
    grpo(task, tmp_path / "half", 2, *half)
    grpo(task, tmp_path / "half", 4, *half, "resume=auto")
    whole, resumed = (
        load_file(tmp_path / name / "final" / "actor" / "model.safetensors") for name in ("whole", "half")
    )
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(x, resumed[name]) for name, x in whole.items())


@pytest.mark.slow
def test_ppo_trains_a_critic_that_shares_the_decoder_with_a_penalty_to_a_reference(task, tmp_path):
    reference = f"models.ref={{_target_: realign.engines.TransformersModel, path: {task.model.parent / 'bart'}}}"
    words = [*SHARED_CRITIC, "interfaces.actor.kl={place: reward, coef: 0.01}", reference]
    result = grpo(task, tmp_path / "run", 3, *words)
    assert len(result.series("value_loss")) == 3
    kl = result.series("ref_kl_per_sequence")
    assert kl[0] == pytest.approx(0, abs=1e-4)
    assert abs(kl[-1]) > 1e-3
    assert (tmp_path / "run" / "final" / "actor" / "value_head.safetensors").is_file()
