"""Test complete runs with a tiny transformers model: configs, engine, rollout, rewards, training and saving."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from examples.demos.addition import main as demo
from realign.api import GenerationConfig, MicroBatchSpec
from realign.config import build_experiment, compose
from realign.demo.arithmetic import add_without_carry
from realign.functional import KLEstimator
from realign.interfaces.components import KLPenalty, KLPlace
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.reference import ReferenceInterface
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.runtime import run
from realign.runtime.local import LocalRuntime

REWARD = """
def score(prompt, response, row):
    return len(response) / 5 + (response[:1] in "13579")
"""
HERE = "interfaces.reward.workers=0"  # scores in this process
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def reward(tmp_path_factory) -> str:
    """Return a reward that differs between untrained answers. Equal rewards would not train."""
    path = tmp_path_factory.mktemp("reward") / "some_reward.py"
    path.write_text(REWARD)
    return f"interfaces.reward.function={path}:score"


def overrides(task, out: Path, *more: str) -> list[str]:
    return [
        "experiment=grpo_arithmetic",
        f"models.actor.path={task.model}",
        f"data.path={task.prompts}",
        f"evaluation.data.path={task.held_out}",
        f"output_dir={out}",
        "steps=2",
        "batch_prompts=8",
        *more,
    ]


def built(task, out: Path, *more: str):
    return build_experiment(compose(overrides(task, out, *more)))


OWN_CRITIC = [
    "interfaces.actor.critic=own",
    "models.critic._target_=realign.engines.TransformersModel",
    "models.critic.path=${models.actor.path}",
    "models.critic.head._target_=realign.models.Value",
    "models.critic.optimizer.lr=1e-3",
    "interfaces.critic._target_=realign.interfaces.critic.PPOCriticInterface",
]


@pytest.mark.parametrize(
    ("algorithm", "critic"),
    [
        ("grpo.GRPOActorInterface", []),
        pytest.param("ppo.PPOActorInterface", [], marks=pytest.mark.slow),
        ("ppo.PPOActorInterface", OWN_CRITIC),
    ],
    ids=["grpo", "ppo", "ppo with a critic"],
)
def test_trap_g8_cpu_training_end_to_end_without_flash_attn_or_vllm(
    task, reward, tmp_path, monkeypatch, algorithm, critic
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for absent in ("flash_attn", "vllm"):
        monkeypatch.setitem(sys.modules, absent, None)
    result = run(
        built(
            task,
            tmp_path / "run",
            reward,
            f"interfaces.actor._target_=realign.interfaces.{algorithm}",
            "interfaces.actor.recompute=true",
            "interfaces.actor.kl={place: loss, estimator: k3, coef: 0.01}",
            "interfaces.actor.n_minibatches=2",
            *critic,
        )
    )
    assert [r["step"] for r in result.history] == [0, 1, 2]
    assert result.series("optimizer_steps")
    assert ("critic/explained_variance" in result.history[-1]) == bool(critic)
    folder = tmp_path / "run" / "final" / "actor"
    start, end = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (task.model, folder))
    assert any(not torch.equal(start[k], end[k]) for k in start)
    assert AutoTokenizer.from_pretrained(folder)("12+34=")["input_ids"]


def test_dynamic_sampling_with_a_real_model_trains_on_groups_with_spread(task, reward, tmp_path):
    experiment = built(task, tmp_path / "run", reward, HERE, "dynamic_sampling.max_batches=3", "steps=1")
    values, batch = LocalRuntime(experiment).step(1)
    assert values["zero_std_fraction"] == 0
    assert values["dynamic_sampling/accepted_fraction"] > 0
    assert values["first_logprob_diff_max"] == pytest.approx(0, abs=1e-5)
    assert len(batch) == 8 - values["dynamic_sampling/missing_prompts"]


@pytest.mark.parametrize("recompute", [False, True])
def test_trap_b1_the_ratio_is_one_with_a_real_model(task, tmp_path, recompute):
    runtime = LocalRuntime(
        built(
            task,
            tmp_path / "run",
            f"interfaces.actor.recompute={recompute}",
            "interfaces.actor.generation.temperature=0.7",
            "microbatch.max_tokens_per_microbatch=200",
        )
    )
    values, _ = runtime.step(1)
    assert values["first_logprob_diff_max"] == pytest.approx(0, abs=1e-5)
    assert values["clip_fraction"] == 0


def test_trap_b7_the_reference_is_another_model_frozen_and_left_behind(task, reward, tmp_path):
    runtime = LocalRuntime(
        built(
            task,
            tmp_path / "run",
            reward,
            "interfaces.actor.kl={place: loss, estimator: k3, coef: 0.01}",
            "models.actor.optimizer={lr: 0.01, schedule: {kind: constant}}",
        )
    )
    actor, ref = (runtime.models[role].engine.module for role in ("actor", "ref"))
    assert not {p.data_ptr() for p in actor.parameters()} & {p.data_ptr() for p in ref.parameters()}
    assert not any(p.requires_grad for p in ref.parameters())
    frozen = [p.clone() for p in ref.parameters()]
    first, _ = runtime.step(1)
    second, _ = runtime.step(2)
    assert first["ref_kl_per_sequence"] == pytest.approx(0, abs=1e-4)
    assert second["ref_kl_per_sequence"] > 0.01
    assert all(torch.equal(p, q) for p, q in zip(frozen, ref.parameters(), strict=True))


def test_two_runs_of_one_seed_are_bitwise_equal(task, reward, tmp_path):
    first, second = (run(built(task, tmp_path / name, reward, "seed=3")).history for name in ("a", "b"))
    timed = ("time/", "_s")
    for a, b in zip(first, second, strict=True):
        assert {k: v for k, v in a.items() if not k.startswith("time/") and not k.endswith(timed)} == {
            k: v for k, v in b.items() if not k.startswith("time/") and not k.endswith(timed)
        }


def test_an_example_runs_as_documented_with_nothing_edited(task, reward, tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.syspath_prepend(str(EXAMPLES.parent))
    advantage = "interfaces.actor.advantage._target_=examples.rank_grpo.RankRelative"
    result = run(built(task, tmp_path / "run", reward, advantage, "interfaces.actor.advantage.min_group_size=2"))
    assert len(result.series("loss")) == 2


def test_the_demo_ends_with_a_line_of_json_and_its_picture_and_shows_a_response_without_a_verdict(
    reward, tmp_path, capsys
):
    mute = tmp_path / "mute.py"
    mute.write_text("def score(prompt, response, row):\n    return 1.0 if row['answer'] < '5' else None\n")
    settings = ["seed=1", "steps=2", "sft.steps=21", "sft.batch_prompts=16", "batch_prompts=4", reward]
    assert demo([f"output_dir={tmp_path / 'demo'}", *settings, f"evaluation.reward.function={mute}:score"]) == 0
    shown = capsys.readouterr().out
    assert "reward none" in shown
    lines = (tmp_path / "demo" / "grpo" / "eval_samples.jsonl").read_text().splitlines()
    answered = [one for one in map(json.loads, lines) if one["step"] == 2]
    assert sum(f"\n  {one['prompt']}{one['response']} " in shown for one in answered) >= 3
    last = json.loads(shown.splitlines()[-1])
    assert last.keys() >= {"task", "seed", "accuracy_before", "accuracy_after", "reward_curve", "seconds"}
    assert (last["seed"], len(last["reward_curve"])) == (1, 2)
    assert Path(last["curves"]).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("argument", ["seed=x", "shuffle=maybe"])
def test_the_demo_says_what_it_does_not_understand(capsys, argument):
    assert demo([argument]) == 2
    assert argument.split("=")[0] in capsys.readouterr().err


def test_the_task_holds_out_both_orders_and_spoils_demonstrations(task):
    def pairs(path: Path) -> set[tuple[int, int]]:
        prompts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
        return {tuple(map(int, p.rstrip("=").split("+"))) for p in prompts}

    held_out = pairs(task.held_out)
    assert {(b, a) for a, b in held_out} == held_out
    assert not held_out & pairs(task.prompts)
    worked = [json.loads(line) for line in task.demonstrations.read_text().splitlines()]
    assert not held_out & pairs(task.demonstrations)
    right = [str(sum(map(int, row["prompt"].rstrip("=").split("+")))) == row["response"] for row in worked]
    # a quarter of the answers are right on purpose, plus those without a carry
    assert 0.25 <= sum(right) / len(right) < 0.75
    assert add_without_carry(37, 45) == 72
    assert add_without_carry(87, 45) == 22


def test_the_same_run_without_hydra(task, reward, tmp_path):
    from realign.data import PromptData
    from realign.engines import OptimizerSpec, TransformersModel
    from realign.interfaces.grpo import dataflow
    from realign.runtime import Experiment

    generation = GenerationConfig(n=4, max_new_tokens=5)
    interfaces = {
        "actor": GRPOActorInterface(generation=generation, kl=KLPenalty(KLPlace.loss, 0.1, KLEstimator.k2)),
        "ref": ReferenceInterface(),
        "reward": RuleRewardInterface(reward.partition("=")[2], workers=2),
    }
    result = run(
        Experiment(
            name="library",
            steps=1,
            batch_prompts=4,
            graph=dataflow(interfaces),
            models={
                "actor": TransformersModel(str(task.model), optimizer=OptimizerSpec(lr=1e-4)),
                "ref": TransformersModel(str(task.model)),
            },
            interfaces=interfaces,
            data=PromptData(str(task.prompts)),
            output_dir=tmp_path / "run",
            microbatch=MicroBatchSpec(max_tokens_per_microbatch=64),
        )
    )
    assert "ref_kl" in result.history[1]
