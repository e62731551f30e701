from __future__ import annotations

import json
import math

import pytest
import torch

from realign.api import MicroBatchSpec, Model, SequenceSample, stat_values
from realign.config import build_experiment, compose
from realign.errors import ConfigError
from realign.interfaces import dpo, ppo, reward_model, sft
from realign.interfaces.components import (
    Critic,
    KLPenalty,
    KLPlace,
    RewardScale,
    RewardShaping,
    score_logprobs,
)
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.reference import ReferenceInterface
from realign.runtime import Experiment, LocalRuntime, LossEvaluation, run
from realign.runtime.checks.parts import check_parts
from realign.runtime.evaluation.loss import ForwardOnly
from realign.testing import random_preferences
from tests.config_parts import Bigram, CountThrees, Prompts
from tests.tiny import save_tiny
from tests.toys import Judged

GRAPHS = {
    "reward": (reward_model.dataflow(), {"reward": reward_model.RewardModelInterface(n_minibatches=2)}),
    "sft": (sft.dataflow(), {"actor": sft.SFTInterface(n_minibatches=2)}),
    "dpo": (dpo.dataflow(), {"actor": dpo.DPOInterface(n_minibatches=2), "ref": ReferenceInterface()}),
}


def experiment(tmp_path, algorithm: str, **changes) -> Experiment:
    graph, interfaces = GRAPHS[algorithm]
    role = "reward" if algorithm == "reward" else "actor"
    settings = {
        "name": algorithm,
        "steps": 2,
        "batch_prompts": 4,
        "graph": graph,
        "interfaces": interfaces,
        "models": {name: Bigram(lr=0.1) for name in interfaces},
        "data": Judged(8),
        "output_dir": tmp_path / "run",
        "evaluation": LossEvaluation(Judged(7, seed=1), role=role, every_steps=1, batch_prompts=3),
    }
    return Experiment(**(settings | changes))


@pytest.mark.parametrize("algorithm", list(GRAPHS))
def test_held_out_metrics_are_those_of_a_training_step_on_all_rows_and_nothing_moves(tmp_path, algorithm):
    """Compare three batches of three prompts in small micro-batches with one training step of one mini-batch."""
    e = experiment(tmp_path, algorithm, microbatch=MicroBatchSpec(60))
    runtime = LocalRuntime(e)
    role = e.evaluation.role
    engine = runtime.models[role].engine
    before = [p.clone() for p in engine.parameters]
    values, shown = runtime.evaluate()
    assert shown == []
    assert all(torch.equal(p, q) for p, q in zip(before, engine.parameters, strict=True))
    assert runtime.models[role].version == 0

    rows = Judged(7, seed=1).sample([(0, row) for row in range(7)])
    if algorithm == "dpo":
        scored = score_logprobs(runtime.models["ref"], rows, MicroBatchSpec(), 1.0)
        rows = rows.with_tokens(ref_logprobs=scored["logprobs"])
    interface = type(runtime.interfaces[role])()
    stats = stat_values(interface.train_step(Model(role, engine), rows, MicroBatchSpec()))
    del stats["optimizer_steps"]
    assert {k: v for k, v in values.items() if k != "time/evaluation_s"} == {
        f"eval/{name}": pytest.approx(value, rel=1e-6, abs=1e-7) for name, value in stats.items()
    }


def test_a_run_has_held_out_metrics_before_during_and_after_training(tmp_path):
    history = run(experiment(tmp_path, "reward")).history
    assert [record["step"] for record in history if "eval/accuracy" in record] == [0, 1, 2]
    assert "eval/loss" in history[0]


def test_accuracy_by_hand(tmp_path):
    """The scores are 2 against 1 (right) and 5 against 3 (wrong)."""
    data = SequenceSample.from_sequences(["a", "b"], {"input_ids": [[[0, 1], [0, 2]], [[0, 3], [0, 4]]]})
    data = data.with_tokens(loss_mask=torch.arange(8) % 2 == 1, prompt_mask=torch.arange(8) % 2 == 0)
    data = data.with_sequences(labels=torch.tensor([1.0, 0.0, 0.0, 1.0]), margins=torch.zeros(4))

    class ByHand(Judged):
        def sample(self, rows):
            return data.take([row for _, row in rows])

    evaluation = LossEvaluation(ByHand(2), role="reward", batch_prompts=1)
    runtime = LocalRuntime(experiment(tmp_path, "reward", evaluation=evaluation))
    runtime.models["reward"].engine.values_V[1:5] = torch.tensor([2.0, 1.0, 5.0, 3.0], dtype=torch.float64)
    values = runtime.evaluate()[0]
    assert values["eval/accuracy"] == 0.5
    assert values["eval/loss"] == pytest.approx((math.log1p(math.exp(-1)) + math.log1p(math.exp(2))) / 2)


def test_state_of_an_interface_is_not_moved(tmp_path):
    """PPO's adaptive KL coefficient only follows the training batches, although the evaluation measures its training
    call."""
    kl = KLPenalty(KLPlace.reward, 0.1, target=0.01, horizon=10)
    actor = ppo.PPOActorInterface(kl=kl, epochs=2)
    interfaces = {"actor": actor, "ref": ReferenceInterface(), "reward": CountThrees()}
    e = experiment(
        tmp_path,
        "sft",
        graph=ppo.dataflow(interfaces),
        interfaces=interfaces,
        models={"actor": Bigram(), "ref": Bigram()},
        data=Prompts(8),
        evaluation=LossEvaluation(Prompts(4)),
    )
    runtime = LocalRuntime(e)
    state = actor.state_dict()
    values = runtime.evaluate()[0]
    assert values["eval/kl_coef"] == pytest.approx(0.1)
    assert "eval/loss" in values
    assert actor.state_dict() == state
    assert actor.epochs == 2


def test_credit_of_held_out_rows_moves_no_scale_of_scores(tmp_path):
    """Otherwise `scale=ref` would divide all rewards by the scale of the held-out rows, which are measured before
    training."""
    actor = ppo.PPOActorInterface(reward=RewardShaping(scale=RewardScale.ref), critic=Critic.own)
    interfaces = {"actor": actor, "critic": PPOCriticInterface(), "reward": CountThrees()}
    e = experiment(
        tmp_path,
        "sft",
        graph=ppo.dataflow(interfaces),
        interfaces=interfaces,
        models={"actor": Bigram(), "critic": Bigram()},
        data=Prompts(8),
        evaluation=LossEvaluation(Prompts(4), role="critic"),
    )
    state = actor.state_dict()
    assert "eval/value_loss" in LocalRuntime(e).evaluate()[0]
    assert actor.state_dict() == state


def test_rows_are_passed_once_whatever_the_training_makes_of_them(tmp_path):
    runtime = LocalRuntime(experiment(tmp_path, "reward"))  # training uses two mini-batches
    engine, passes = runtime.models["reward"].engine, []
    forward = engine.forward
    engine.forward = lambda data, *rest: passes.append(len(data)) or forward(data, *rest)
    runtime.evaluate()
    assert passes == [2, 1, 2, 1, 1]  # mini-batches of batches with 3, 3 and 1 prompts


@pytest.mark.parametrize("role", ["ref", "nobody"])
def test_a_role_that_is_not_trained_is_refused(tmp_path, role):
    with pytest.raises(ConfigError, match=rf"evaluation\.role={role}: "):
        check_parts(experiment(tmp_path, "dpo", evaluation=LossEvaluation(Judged(4), role=role)))


def test_rows_that_do_not_count_have_no_loss():
    class NoEngine:
        def forward(self, *_):
            raise AssertionError("nothing to measure")

    data = random_preferences().take([0])
    assert (
        ForwardOnly("reward", "reward", NoEngine()).train_batch(data, MicroBatchSpec(), None, lambda _: torch.zeros(()))
        == {}
    )


def test_config_chooses_it(tmp_path):
    rows = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": "?"} for i in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = "{_target_: realign.runtime.LossEvaluation, role: reward, every_steps: 1, data: ${data}}"
    settings = [f"models.reward.path={save_tiny(tmp_path / 'model')}", f"data.path={tmp_path / 'pairs.jsonl'}"]
    settings += ["steps=1", "batch_prompts=4", f"output_dir={tmp_path / 'run'}", f"evaluation={evaluation}"]
    history = run(build_experiment(compose(["experiment=reward_model", *settings]))).history
    # measured before the step, on the same rows
    assert history[0]["eval/loss"] == pytest.approx(history[1]["loss"], abs=1e-5)
    assert history[1]["eval/loss"] < history[0]["eval/loss"]
