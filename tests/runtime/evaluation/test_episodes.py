from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass, replace

import pytest
import torch

from realign.api import DataflowGraph, GenerationConfig, MicroBatchSpec, Model, ModelFacts, Sync
from realign.engines import SharedModel, TransformersModel
from realign.engines.training.optimizer import OptimizerSpec
from realign.errors import ConfigError
from realign.interfaces.agent import AgentInterface
from realign.interfaces.components import Truncation
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.decoupled_ppo import DecoupledPPOActorInterface
from realign.interfaces.environment import EnvironmentInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import PPOActorInterface, dataflow
from realign.runtime import Async, DynamicSampling, EpisodeEvaluation, Experiment, RolloutSpec, run
from realign.runtime.checks.before_loading import check_ready
from realign.runtime.checks.parts import check_parts
from realign.runtime.local import LocalRuntime
from realign.runtime.rollout.spec import Sync as SyncRollout
from realign.testing import BigramEngine
from tests.tiny import save_tiny
from tests.toys import BigramModel, Digits, Prompts

TURN = GenerationConfig(n=6, max_new_tokens=3)
NAME = "tests.runtime.evaluation.test_episodes:Threes"


class Threes:
    """Environment with two turns. Its reward per turn is the number of sampled tokens 3, and its observation is 9 9."""

    async def reset(self, row):
        self.offset = row["n"]
        return [1], {}

    async def step(self, response):
        return [9, 9], float(response.token_ids.count(3)), response.turn == 1, False, {}


class Numbers(Digits):
    """`Digits` with a known vocabulary size."""

    def __len__(self) -> int:
        return 11


@dataclass
class Small(BigramModel):
    """Bigram model with 40 positions."""

    path: str = "somewhere"

    def load(self, name: str, *, seed: int) -> Model:
        return Model(name, BigramEngine(seed=seed, lr=self.lr, positions=40), Numbers(), seed)

    def facts(self) -> ModelFacts:
        return ModelFacts(path=self.path)


class Rows(Prompts):
    """`Prompts` with a known longest length."""

    longest_sequence = 2


def episodes(**changes) -> EnvironmentInterface:
    return EnvironmentInterface(NAME, **({"generation": TURN, "max_turns": 3, "max_episode_tokens": 20} | changes))


def experiment(tmp_path, **changes) -> Experiment:
    interfaces = changes.pop("interfaces", {"actor": GRPOActorInterface(generation=TURN), "agent": episodes()})
    settings = {
        "name": "threes",
        "steps": 3,
        "batch_prompts": 4,
        "graph": dataflow(interfaces),
        "interfaces": interfaces,
        "models": {"actor": Small(lr=3.0), "agent": SharedModel("actor")},
        "data": Rows(8),
        "output_dir": tmp_path / "run",
        "checkpoint": None,
        "strict_ratio": True,
    }
    return Experiment(**(settings | changes))


def test_a_policy_learns_in_conversation_and_is_measured_in_it(tmp_path):
    measured = EpisodeEvaluation(Rows(5), every_steps=2, batch_prompts=3, episodes=episodes())
    result = run(experiment(tmp_path, steps=20, evaluation=measured))
    rewards = result.series("eval/reward")
    assert rewards[-1] > rewards[0] + 0.4
    assert result.series("turns") == [2.0] * 20
    assert set(result.series("eval/turns")) == {2.0}
    assert {f"eval/{m}" for m in ("reward", "turns", "response_tokens")} <= measured.metric_names(DataflowGraph(()))
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].endswith(" 1")
    assert (len(sample["turns"]), sample["turns"][1]) == (3, "9 9")


@pytest.mark.parametrize(
    ("actor", "by_turn"),
    [(DecoupledPPOActorInterface(generation=TURN), False), (PPOActorInterface(generation=TURN, critic="own"), True)],
    ids=["decoupled", "ppo with a critic and rewards of turns"],
)
def test_other_algorithms_learn_from_the_same_conversations(tmp_path, actor, by_turn):
    interfaces = {"actor": actor, "agent": episodes(dense=by_turn), "critic": PPOCriticInterface()}
    models = {"actor": Small(), "critic": Small(), "agent": SharedModel("actor")}
    values, batch = LocalRuntime(experiment(tmp_path, interfaces=interfaces, models=models)).step(1)
    dense = batch.get("dense_rewards")
    assert (dense is not None) == by_turn
    if dense is not None:
        assert bool((batch["loss_mask"] | (dense == 0)).all())
    assert values["reward"] == pytest.approx(float((batch["input_ids"][batch["loss_mask"]] == 3).sum()) / 24)
    assert values["optimizer_steps"] == 1


@pytest.mark.filterwarnings("ignore:rollout.max_staleness=1")
def test_conversations_may_run_ahead_of_training(tmp_path):
    """With max_staleness=0, episodes equal those of a synchronous run bit by bit. Above 0, they record their
    versions."""
    path = str(save_tiny(tmp_path / "model"))

    def trained(name: str, rollout: RolloutSpec) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        models = {"actor": TransformersModel(path, optimizer=OptimizerSpec(lr=1e-2)), "agent": SharedModel("actor")}
        made = experiment(tmp_path / name, models=models, rollout=rollout, data=Rows(12))
        with closing(LocalRuntime(made)) as runtime:
            batches = [runtime.step(step)[1] for step in (1, 2, 3)]
            weights = runtime.models["actor"].engine.weights()
        return list(weights.values()), [batch["versions"][batch["loss_mask"]] for batch in batches]

    plain, _ = trained("sync", SyncRollout())
    same, _ = trained("same", Async(max_staleness=0))
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
    _, versions = trained("ahead", Async(max_staleness=1))
    for step, versions_T in enumerate(versions):
        assert set(versions_T.tolist()) <= {max(0, step - 1), step}


def test_dynamic_sampling_converses_until_the_batch_is_full(tmp_path):
    filtered = experiment(tmp_path, dynamic_sampling=DynamicSampling(max_batches=3), batch_prompts=3)
    values, batch = LocalRuntime(filtered).step(1)
    assert values["dynamic_sampling/batches"] >= 1
    assert "turns" in batch


def test_the_length_of_a_whole_episode_is_compared_with_budget_and_positions(tmp_path):
    long = {"agent": episodes(max_episode_tokens=39), "actor": GRPOActorInterface(generation=TURN)}
    with pytest.raises(
        ConfigError,
        match=r"window has 40 positions, but .* up to 39\. .* set interfaces\.agent\.max_episode_tokens to at most 38",
    ):
        LocalRuntime(experiment(tmp_path, interfaces=long))
    with pytest.raises(
        ConfigError,
        match=r"up to 20 tokens \(interfaces\.agent\.max_episode_tokens\)\. .*or lower interfaces\.agent\.max_epi",
    ):
        check_ready(experiment(tmp_path, microbatch=MicroBatchSpec(20)))
    measured = EpisodeEvaluation(Rows(5), episodes=episodes(max_episode_tokens=39))
    with pytest.raises(
        ConfigError,
        match=r"evaluation\.data has 2 tokens .* set evaluation\.episodes\.max_episode_tokens to at most 38",
    ):
        LocalRuntime(experiment(tmp_path, evaluation=measured))


def test_an_agent_may_fill_the_whole_window(tmp_path):
    """Its limit counts the prompt too, and is compared before rows are read."""

    class Unread(Rows):
        def load(self, tokenizer=None):
            raise AssertionError("the rows were read")

    def runtime(tokens, data):
        agent = AgentInterface(f"{__name__}:idle", generation=TURN, max_sequence_tokens=tokens)
        interfaces = {"agent": agent, "actor": GRPOActorInterface(generation=TURN)}
        return LocalRuntime(experiment(tmp_path, interfaces=interfaces, data=data))

    with closing(runtime(40, Rows(8))):
        pass
    with pytest.raises(ConfigError, match=r"40 positions, but interfaces\.agent\.max_sequence_tokens=41"):
        runtime(41, Unread(8))


async def idle(base_url, api_key, row):
    """Agent that calls no model."""


def test_an_environment_that_is_not_there_is_refused_at_the_start(tmp_path):
    gone = {"agent": episodes(), "actor": GRPOActorInterface(generation=TURN)}
    gone["agent"].environment = "tests.runtime.evaluation.test_episodes:Threees"
    with pytest.raises(ConfigError, match=r"environment .* has no 'Threees'; .*mean 'Threes'"):
        LocalRuntime(experiment(tmp_path, interfaces=gone))


def test_a_copy_that_stays_as_it_is_may_not_sample(tmp_path):
    copied = {"actor": Small(), "agent": Small()}
    with pytest.raises(ConfigError, match=r"models\.agent\.path='somewhere': .*this copy is never updated"):
        check_ready(experiment(tmp_path, models=copied))
    check_ready(experiment(tmp_path, models=copied, sync={"agent": Sync("actor")}))


def test_a_sampler_under_which_probability_ratios_would_be_wrong_is_refused(tmp_path):
    greedy = {"actor": GRPOActorInterface(generation=TURN), "agent": episodes(generation=replace(TURN, greedy=True))}
    with pytest.raises(
        ConfigError, match=r"interfaces\.agent samples with greedy=True, .* ratios of RPC 'actor_train'"
    ):
        check_parts(experiment(tmp_path, interfaces=greedy))


def test_what_the_learner_is_told_of_episodes_must_agree_with_them(tmp_path):
    other = {"actor": GRPOActorInterface(generation=replace(TURN, n=4)), "agent": episodes()}
    with pytest.raises(ConfigError, match=r"interfaces\.agent\.generation\.n=6: .*interfaces\.actor\.generation\.n=4"):
        check_ready(experiment(tmp_path, interfaces=other))
    late = Truncation(overlong_buffer=2)
    per_turn = {"actor": GRPOActorInterface(generation=TURN, truncation=late), "agent": episodes()}
    with pytest.raises(ConfigError, match=r"responses of 3 tokens .*up to 20 \(interfaces\.agent\.max_ep"):
        check_ready(experiment(tmp_path, interfaces=per_turn))
    whole = GRPOActorInterface(generation=replace(TURN, max_new_tokens=20), truncation=late)
    check_ready(experiment(tmp_path, interfaces={"actor": whole, "agent": episodes()}))


def test_evaluations_of_one_version_are_equal_and_batches_differ_in_their_random_numbers(tmp_path):
    measured = EpisodeEvaluation(Rows(6), batch_prompts=3, episodes=episodes())
    runtime = LocalRuntime(experiment(tmp_path, evaluation=measured))
    first, again = runtime.evaluate(), runtime.evaluate()
    assert {k: v for k, v in first[0].items() if "time" not in k} == {
        k: v for k, v in again[0].items() if "time" not in k
    }
    assert first[1] == again[1]
