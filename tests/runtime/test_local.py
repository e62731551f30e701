from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from realign.api import (
    RPC,
    DataflowGraph,
    GenerationConfig,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelSpec,
    SequenceSample,
    Sum,
    stat_values,
)
from realign.engines import SharedModel
from realign.errors import ConfigError, RunError
from realign.functional import Scope
from realign.interfaces.components import GAE, Critic, KLPenalty, KLPlace, Normalization, ValueObjective
from realign.interfaces.components.response_cut import ResponseCut
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.interfaces.reference import ReferenceInterface
from realign.interfaces.reward_model import RewardModelInterface
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.runtime import Evaluation, run
from realign.runtime.checks.parts import check_parts
from realign.runtime.evaluation.scores import sequence_stats
from realign.runtime.local import LocalRuntime
from realign.testing import BigramEngine
from tests.toys import GENERATION, BigramModel, CountToken, Digits, Prompts, experiment


@pytest.mark.parametrize("shuffle", [False, True])
def test_trap_g9_reward_rises_and_does_not_when_rewards_are_shuffled(tmp_path, shuffle):
    run_ = experiment(
        tmp_path,
        steps=40,
        interfaces={"actor": GRPOActorInterface(generation=GENERATION), "reward": CountToken(shuffle=shuffle)},
        evaluation=None,
        models={"actor": BigramModel(lr=10.0)},
    )
    # Training uses the shuffled rewards. The mean of a batch is the same with and without shuffling.
    rewards = run(run_).series("reward")
    start, end = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    if shuffle:
        assert end < start + 0.5
    else:
        assert end > start + 2


def learning_with_a_critic(tmp_path: Path, place: Critic, *, shuffle: bool) -> tuple[list[float], list[float]]:
    """Return rewards and explained variances of PPO with a separate critic, or with values of the actor."""
    own = place is Critic.own
    freely = ValueObjective(clip=None)
    run_ = experiment(
        tmp_path,
        interfaces={
            "actor": PPOActorInterface(
                generation=GENERATION,
                advantage=GAE(gamma=0.5),
                critic=place,
                value=None if own else replace(freely, coef=0.1),
            ),
            "critic": PPOCriticInterface(objective=freely),
            "reward": CountToken(shuffle=shuffle),
        },
        models={"actor": BigramModel(lr=20.0), "critic": BigramModel(lr=2.0) if own else SharedModel("actor")},
        evaluation=None,
    )
    runtime = LocalRuntime(run_)
    history = [runtime.step(step)[0] for step in range(1, 31)]
    explained = "critic/explained_variance" if own else "explained_variance"
    return [record["reward"] for record in history], [record[explained] for record in history]


def test_trap_g9_with_a_critic_reward_rises_values_explain_returns_and_neither_does_when_rewards_are_shuffled(tmp_path):
    own, own_explained = learning_with_a_critic(tmp_path / "own", Critic.own, shuffle=False)
    assert sum(own[-5:]) / 5 > sum(own[:5]) / 5 + 1.5
    assert own_explained[0] < 0 < 0.1 < min(own_explained[-5:])
    # The value table of a bigram shares no parameters with its logits, so a shared trunk gives the same results.
    shared, shared_explained = learning_with_a_critic(tmp_path / "shared", Critic.shared, shuffle=False)
    assert shared == own
    assert shared_explained == pytest.approx(own_explained, rel=1e-6)
    shuffled, explained = learning_with_a_critic(tmp_path / "shuffled", Critic.own, shuffle=True)
    assert sum(shuffled[-5:]) / 5 < sum(shuffled[:5]) / 5 + 0.5
    assert max(explained[-5:]) < 0.1


def test_a_run_leaves_metrics_samples_curves_and_the_model(drawn_curves, tmp_path):
    result = run(experiment(tmp_path, save_every_steps=2, sample_prompts=2))
    out = result.output_dir
    assert out == tmp_path / "run"
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [0, 1, 2, 3]
    assert {"reward", "loss", "response_tokens", "step_s", "rollout_tokens_per_s"} <= records[1].keys()
    assert [r["step"] for r in records if "eval/reward" in r] == [0, 2, 3]
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 3 * 2 * 8
    assert {"step", "id", "response_index", "prompt", "response", "reward", "tokens"} == samples[0].keys()
    held_out = [json.loads(line) for line in (out / "eval_samples.jsonl").read_text().splitlines()]
    assert {r["step"] for r in held_out} == {0, 2, 3}
    assert [r for r in held_out if r["step"] == 3] == [{"step": 3, **record} for record in result.samples]
    assert (out / "curves.png").stat().st_size > 10_000
    assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*.npz")) == [
        "final/actor/bigram.npz",
        "step_000002/actor/bigram.npz",
    ]


class FrozenModel(BigramModel):
    def load(self, name, *, seed):
        model = super().load(name, seed=seed)
        model.engine.trainable = False
        return model


def test_a_frozen_model_is_not_saved(tmp_path):
    actor = GRPOActorInterface(generation=GENERATION, kl=KLPenalty(KLPlace.loss))
    parts = {"actor": actor, "ref": ReferenceInterface(), "reward": CountToken()}
    models = {"actor": BigramModel(), "ref": FrozenModel()}
    out = run(experiment(tmp_path, interfaces=parts, models=models)).output_dir
    assert [p.name for p in (out / "final").iterdir()] == ["actor"]


def test_two_runs_of_one_seed_are_equal_and_of_two_seeds_are_not(tmp_path):
    def rewards(name: str, seed: int) -> list[float]:
        return run(experiment(tmp_path, output_dir=tmp_path / name, seed=seed)).series("reward")

    assert rewards("a", 1) == rewards("b", 1)
    assert rewards("c", 2) != rewards("a2", 1)


def test_every_call_of_a_step_gets_the_micro_batch_limit_of_the_run(tmp_path):
    seen: list[tuple[str, MicroBatchSpec]] = []

    class Reward(CountToken):
        def inference(self, model, data, mb_spec):
            seen.append(("inference", mb_spec))
            return super().inference(model, data, mb_spec)

    class Actor(GRPOActorInterface):
        def train_step(self, model, data, mb_spec):
            seen.append(("train_step", mb_spec))
            return super().train_step(model, data, mb_spec)

    interfaces = {"actor": Actor(generation=GENERATION), "reward": Reward()}
    limit = MicroBatchSpec(max_tokens_per_microbatch=77)
    LocalRuntime(experiment(tmp_path, interfaces=interfaces, microbatch=limit)).step(1)
    assert seen == [("inference", limit), ("train_step", limit)]


def test_the_version_counts_training_calls(tmp_path):
    runtime = LocalRuntime(experiment(tmp_path))
    for step in (1, 2):
        _, batch = runtime.step(step)
        assert int(batch["versions"].max()) == step - 1
    assert runtime.models["actor"].version == 2


class Stale(BigramEngine):
    def generate(self, data, config, *, seed):
        return BigramEngine(seed=99).generate(data, config, seed=seed)


class StaleModel(BigramModel):
    def load(self, name, *, seed):
        return Model(name, Stale(seed=seed), Digits(), seed)


def test_trap_b1_the_first_step_reports_a_sampler_that_is_not_the_trainer(tmp_path):
    with pytest.warns(UserWarning, match="log-probs of sampler and trainer differ"):
        run(experiment(tmp_path, models={"actor": StaleModel()}))
    with pytest.raises(RunError, match="ratio_tolerance"):
        run(experiment(tmp_path, models={"actor": StaleModel()}, strict_ratio=True, overwrite=True))


def test_trap_b1_the_ratio_is_checked_with_an_overridden_loss(tmp_path):
    class Likelihood(GRPOActorInterface):
        def loss(self, output, minibatch):
            mask_T = minibatch["loss_mask"]
            return self.aggregation.total(-output.logprobs(where_T=mask_T), mask_T, minibatch.cu_seqlens()), {}

    parts = {"actor": Likelihood(generation=GENERATION), "reward": CountToken()}
    with pytest.raises(RunError, match="ratio_tolerance"):
        run(experiment(tmp_path, interfaces=parts, models={"actor": StaleModel()}, strict_ratio=True))


def test_trap_b1_the_ratio_is_checked_on_the_first_step_that_trains(tmp_path):
    class LateReward(CountToken):
        def inference(self, model, data, mb_spec):
            out = super().inference(model, data, mb_spec)
            self.closed.append(False)  # counts the calls
            missing = torch.full_like(out["rewards"], math.nan)
            return out if len(self.closed) > 1 else out.with_data({"rewards": missing}, like="rewards")

    parts = {"actor": GRPOActorInterface(generation=GENERATION), "reward": LateReward()}
    runtime = LocalRuntime(experiment(tmp_path, interfaces=parts, models={"actor": StaleModel()}, strict_ratio=True))
    runtime.step(1)  # this step trains nothing
    with pytest.raises(RunError, match="ratio_tolerance"):
        runtime.step(2)


def test_tokens_per_second_are_those_of_their_role(tmp_path):
    class Counting(ModelInterface):
        def __init__(self, tokens: float) -> None:
            self.tokens = tokens

        def train_step(self, model, data, mb_spec):
            return {"tokens": Sum(torch.tensor(self.tokens)), "optimizer_steps": Sum(torch.tensor(1.0))}

    class Sized(BigramModel):
        def load(self, name, *, seed):
            return Model(name, BigramEngine(products=5_000_000), None, seed)

    rpcs = tuple(RPC(f"{role}_train", role, "train_step", ("prompt_ids",)) for role in ("actor", "critic"))
    graph = DataflowGraph(rpcs, dataset_keys=("prompt_ids", "row"))
    parts = {"actor": Counting(1e6), "critic": Counting(0.0)}
    models = {"actor": Sized(), "critic": BigramModel()}
    values, _ = LocalRuntime(experiment(tmp_path, graph=graph, interfaces=parts, models=models, evaluation=None)).step(
        1
    )
    assert values["train_tokens_per_s"] > 0
    assert values["critic/train_tokens_per_s"] == 0
    assert values["train_tflop_per_s"] == pytest.approx(3e-5 * values["train_tokens_per_s"])
    assert "critic/train_tflop_per_s" not in values


def test_trap_e13_a_run_in_which_nothing_was_trained_does_not_end_well(tmp_path):
    class Silent(CountToken):
        def inference(self, model, data, mb_spec):
            out = super().inference(model, data, mb_spec)
            return out.with_data({"rewards": torch.full_like(out["rewards"], math.nan)}, like="rewards")

    with pytest.raises(RunError, match=r"^steps=3: the run made no optimizer step\. Every reward was missing"):
        run(experiment(tmp_path, interfaces={"actor": GRPOActorInterface(generation=GENERATION), "reward": Silent()}))


def test_roles_that_do_not_fit_are_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="RPC 'reward_inf' uses role 'reward', which has no interface"):
        check_parts(experiment(tmp_path, interfaces={"actor": GRPOActorInterface()}))
    with pytest.raises(ValueError, match=r"uses role 'actor', which has no model; did you mean 'actr'\?"):
        check_parts(experiment(tmp_path, models={"actr": BigramModel()}))


def test_an_evaluation_of_a_role_without_model_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluation\.role=critic: this role has no model\. Roles with one: actor"):
        check_parts(experiment(tmp_path, evaluation=Evaluation(Prompts(4), CountToken(), GENERATION, role="critic")))


def test_a_model_without_a_role_is_not_loaded(tmp_path):
    class Unloadable(ModelSpec):
        def load(self, name, *, seed):
            raise AssertionError("loaded")

    runtime = LocalRuntime(experiment(tmp_path, models={"idle": Unloadable(), "actor": BigramModel()}))
    assert set(runtime.models) == {"actor", "reward"}


def test_a_trained_role_without_an_optimizer_is_refused_before_anything_is_sampled(tmp_path):
    with pytest.raises(
        ConfigError, match=r"models\.actor: RPC 'actor_train' trains this model, which has no optimizer"
    ):
        LocalRuntime(experiment(tmp_path, models={"actor": FrozenModel()}))


def test_interfaces_are_closed_when_a_run_ends_or_fails(tmp_path):
    good, bad = CountToken(), CountToken()
    run(experiment(tmp_path, interfaces={"actor": GRPOActorInterface(generation=GENERATION), "reward": good}))

    class Broken(GRPOActorInterface):
        def train_step(self, model, data, mb_spec):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        run(experiment(tmp_path, overwrite=True, interfaces={"actor": Broken(generation=GENERATION), "reward": bad}))
    assert (good.closed, bad.closed) == ([True], [True])


def test_interfaces_are_opened_before_models_are_loaded_and_closed_when_loading_fails(tmp_path):
    class Unloadable(ModelSpec):
        def load(self, name, *, seed):
            raise ValueError("no such model")

    class Missing(CountToken):
        def open(self):
            raise ValueError("no such reward function")

    reward = CountToken()
    parts = {"actor": GRPOActorInterface(generation=GENERATION), "reward": reward}
    with pytest.raises(ValueError, match="no such model"):
        LocalRuntime(experiment(tmp_path, interfaces=parts, models={"actor": Unloadable()}))
    assert reward.closed == [True]
    with pytest.raises(ValueError, match="no such reward function"):
        LocalRuntime(experiment(tmp_path, interfaces=parts | {"reward": Missing()}, models={"actor": Unloadable()}))


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class FailingAt(CountToken):
    """Reward that raises an error at the n-th call."""

    def __init__(self, call: int, error: BaseException) -> None:
        super().__init__()
        self.calls, self.call, self.error = 0, call, error

    def inference(self, model, data, mb_spec):
        self.calls += 1
        if self.calls == self.call:
            raise self.error
        return super().inference(model, data, mb_spec)


def test_an_interrupted_run_keeps_its_finished_steps_and_its_curves(tmp_path):
    reward = FailingAt(3, KeyboardInterrupt())
    parts = {"actor": GRPOActorInterface(generation=GENERATION), "reward": reward}
    with pytest.raises(KeyboardInterrupt):
        run(experiment(tmp_path, interfaces=parts))
    assert [r["step"] for r in records(tmp_path / "run")] == [0, 1, 2]
    assert (tmp_path / "run" / "curves.png").exists()
    assert not (tmp_path / "run" / "final").exists()
    assert reward.closed == [True]


def test_a_step_whose_evaluation_fails_is_on_record(tmp_path):
    judge = FailingAt(3, RuntimeError("no verdict"))  # two batches before training, then the batch after step 2
    evaluation = Evaluation(Prompts(4), judge, GENERATION, every_steps=2, batch_prompts=3)
    with pytest.raises(RuntimeError, match="no verdict"):
        run(experiment(tmp_path, evaluation=evaluation))
    written = records(tmp_path / "run")
    assert [r["step"] for r in written] == [0, 1, 2]
    assert "loss" in written[2]
    assert "eval/reward" not in written[2]
    assert judge.closed == [True]


def test_a_picture_that_cannot_be_drawn_neither_ends_a_run_nor_hides_what_did(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("no metric to draw")

    monkeypatch.setattr("realign.runtime.training.draw_curves", broken)
    with pytest.warns(UserWarning, match=r"curves\.png was not drawn \(no metric to draw\)"):
        assert len(run(experiment(tmp_path)).history) == 4
    parts = {"actor": GRPOActorInterface(generation=GENERATION), "reward": FailingAt(3, RuntimeError("the reason"))}
    with pytest.warns(UserWarning, match="was not drawn"), pytest.raises(RuntimeError, match="the reason"):
        run(experiment(tmp_path, interfaces=parts, overwrite=True))


def test_one_interface_that_fails_to_close_keeps_no_other_from_it(tmp_path):
    class Stuck(GRPOActorInterface):
        def close(self):
            raise RuntimeError("stuck")

    reward, judge = CountToken(), CountToken()
    runtime = LocalRuntime(
        experiment(
            tmp_path,
            interfaces={"actor": Stuck(generation=GENERATION), "reward": reward},
            evaluation=Evaluation(Prompts(4), judge, GENERATION),
        )
    )
    with pytest.raises(RuntimeError, match="stuck"):
        runtime.close()
    assert (reward.closed, judge.closed) == ([True], [True])


def test_a_response_has_one_length_in_training_and_in_evaluation():
    """Tool tokens count in both. The mean reward is over responses that have a reward."""
    batch = SequenceSample.from_sequences(["a"], {"input_ids": [[[1, 2, 3, 4], [1, 2]]]})
    batch = batch.with_tokens(
        prompt_mask=torch.tensor([True, False, False, False, True, False]),
        loss_mask=torch.tensor([False, True, False, True, False, True]),
    ).with_sequences(rewards=torch.tensor([3.0, math.nan]), truncated=torch.tensor([True, False]))
    want = {"reward": 3.0, "missing_rewards": 0.5, "response_tokens": 2.0, "truncated_fraction": 0.5}
    assert stat_values(sequence_stats(batch)) == want


@pytest.mark.parametrize("kind", ["rule", "model"])
def test_dense_rewards_are_the_credit_of_their_tokens(tmp_path, kind):
    """Without discount, critic and normalization, the advantage of a token is the remaining reward of its response."""
    (tmp_path / "third.py").write_text(
        "def third(prompt, response, row, tokens):\n    return [float(token == '3') for token in tokens]\n"
    )
    reward = RuleRewardInterface(f"{tmp_path}/third.py:third", workers=0, dense=True)
    if kind == "model":
        reward = RewardModelInterface(dense=True, cut=ResponseCut([3], penalty=-2.0))
    plain = Normalization(Scope.none, Scope.none)
    actor = PPOActorInterface(generation=GENERATION, advantage=GAE(lam=1.0), adv_norm=plain)
    parts, models = {"actor": actor, "reward": reward}, {"actor": BigramModel(), "reward": BigramModel()}
    e = experiment(tmp_path, interfaces=parts, models=models, evaluation=None)
    runtime = LocalRuntime(e)
    values, batch = runtime.step(1)
    credited = actor.credit(runtime.models["actor"], batch, MicroBatchSpec())
    table, totals = BigramEngine(seed=0).values_V, []
    for ids, given, advantages in zip(
        batch.sequences(), batch.sequences("prompt_mask"), credited.sequences("advantages"), strict=True
    ):
        response = ids[~given].tolist()
        earned = [float(token == 3) for token in response]
        if kind == "model":
            end = response.index(3) if 3 in response else None
            earned = [0.0 if end is None or i > end else float(table[token]) for i, token in enumerate(response)]
            earned[-1] += 0.0 if end is not None else -2.0
        totals.append(sum(earned))
        assert advantages[~given].tolist() == pytest.approx([sum(earned[i:]) for i in range(len(earned))], abs=1e-6)
    assert values["reward"] == pytest.approx(sum(totals) / len(totals), abs=1e-6)


def test_dense_rewards_add_up_to_the_reward_of_a_response(tmp_path):
    batch = SequenceSample.from_sequences(["a"], {"input_ids": [[[1, 2, 3], [1, 2], [1]]]})
    batch = batch.with_tokens(
        prompt_mask=torch.tensor([True, False, False, True, False, True]),
        dense_rewards=torch.tensor([0.0, 0.5, 2.0, 0.0, 0.0, 0.0]),
    ).with_sequences(rewards=torch.tensor([0.0, math.nan, -1.0]))
    assert stat_values(sequence_stats(batch)) == {
        "reward": 0.75,
        "missing_rewards": pytest.approx(1 / 3),
        "response_tokens": 1.0,
    }
    shown = LocalRuntime(experiment(tmp_path)).readable(batch, 1)
    assert [record["reward"] for record in shown] == [2.5, None, -1.0]


def test_evaluation_answers_every_prompt_once(tmp_path):
    runtime = LocalRuntime(experiment(tmp_path))
    values, samples = runtime.evaluate()
    assert values["eval/response_tokens"] == 6
    assert values["eval/truncated_fraction"] == 0
    assert 0 < len(samples) <= 8 * 8
    assert runtime.models["actor"].version == 0


def test_rollouts_and_evaluations_have_separate_sampling_settings(tmp_path):
    generation = GenerationConfig(n=4, max_new_tokens=3, fixed_length=True)
    interfaces = {"actor": GRPOActorInterface(generation=generation), "reward": CountToken()}
    runtime = LocalRuntime(experiment(tmp_path, interfaces=interfaces))
    _, batch = runtime.step(1)
    assert [int(mask.sum()) for mask in batch.sequences("loss_mask")] == [3] * (8 * 4)
    assert runtime.evaluate()[0]["eval/response_tokens"] == 6


def test_samples_of_an_evaluation_are_its_first_prompts(tmp_path):
    shown = LocalRuntime(experiment(tmp_path)).evaluate()[1]  # 4 prompts in batches of 3
    assert list(dict.fromkeys(record["id"] for record in shown)) == ["0@0", "1@0", "2@0"]


def test_the_first_epoch_comes_first_and_in_file_order_if_not_shuffled(tmp_path):
    settings = {"data": Prompts(16), "steps": 2}
    shuffled, plain = (LocalRuntime(experiment(tmp_path, shuffle=s, **settings)) for s in (True, False))
    batches = [runtime.batch(step).ids for runtime in (shuffled, plain) for step in (1, 2)]
    everything = [f"{row}@0" for row in range(16)]
    assert sorted(batches[0] + batches[1]) == sorted(everything)
    assert list(batches[0] + batches[1]) != everything
    assert list(batches[2] + batches[3]) == everything


def test_rollout_tokens_per_second_are_of_sampled_tokens(tmp_path):
    values, batch = LocalRuntime(experiment(tmp_path)).step(1)
    assert values["rollout_tokens_per_s"] * values["time/actor_gen_s"] == pytest.approx(int(batch["loss_mask"].sum()))
    assert int(batch["loss_mask"].sum()) < len(batch["loss_mask"])


def test_a_graph_of_another_shape_runs(tmp_path):
    class Score(ModelInterface):
        def train_step(self, model, data, mb_spec):
            return {}

    graph = DataflowGraph((RPC("t", "actor", "train_step", ("prompt_ids",)),), dataset_keys=("prompt_ids", "row"))
    runtime = LocalRuntime(experiment(tmp_path, graph=graph, interfaces={"actor": Score()}, evaluation=None))
    values, batch = runtime.step(1)
    assert batch.keys == {"prompt_ids", "row"}
    assert "time/t_s" in values


def test_a_run_keeps_its_best_and_last_saves_shows_samples_and_feeds_trackers(tmp_path):
    @dataclass
    class Listener:
        heard: list = field(default_factory=list)

        def open(self, name, output_dir):
            self.heard.append((name, output_dir))
            return SimpleNamespace(
                log=lambda step, metrics: self.heard.append(step), close=lambda: self.heard.append(".")
            )

    listener, console = Listener(), Console(file=io.StringIO(), width=200)
    settings = {"save_every_steps": 1, "keep_saves": 1, "save_best": "eval/reward", "print_samples_every_steps": 2}
    result = run(experiment(tmp_path, steps=4, trackers={"mine": listener}, **settings), console=console)
    assert sorted(p.name for p in result.output_dir.iterdir() if p.is_dir()) == [
        "best",
        "calls",
        "checkpoints",
        "final",
        "step_000003",
    ]
    assert listener.heard == [("toy", result.output_dir), 0, 1, 2, 3, 4, "."]
    shown = [line for line in console.file.getvalue().splitlines() if " -> " in line]
    assert [line.split(":")[0] for line in shown] == ["step 2"] * 3 + ["step 4"] * 3
    rewards, smooth = result.series("reward"), result.series("reward_ema")
    assert smooth[0] == pytest.approx(rewards[0])
    assert smooth[2] == pytest.approx(0.81 * rewards[0] + 0.09 * rewards[1] + 0.1 * rewards[2])
