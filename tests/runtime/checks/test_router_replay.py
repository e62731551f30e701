"""Test checks of roles with router replay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from realign.api import GenerationConfig, ModelInterface
from realign.api.router_experts import ROUTER_EXPERTS
from realign.engines import OptimizerSpec, SharedModel, TransformersModel, Vllm
from realign.errors import ConfigError, GraphError
from realign.interfaces import ppo, raft
from realign.interfaces.agent import AgentInterface
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.decoupled_ppo import DecoupledPPOActorInterface
from realign.interfaces.environment import EnvironmentInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.raft import RAFTActorInterface
from realign.runtime import Async, run
from realign.runtime.checks.contract import check_keys
from realign.runtime.checks.router_replay import check_replay
from realign.runtime.models import load_models
from tests.runtime.test_step import Prompts
from tests.runtime.test_step import experiment as toy
from tests.tiny import save_tiny


@dataclass
class MeanToken(ModelInterface):
    """Reward that differs between almost all responses."""

    needs_engine = False

    def inference(self, model, data, mb_spec):
        return (
            data.select(["input_ids"])
            .with_sequences(rewards=torch.stack([ids.float().mean() for ids in data.sequences()]))
            .select(["rewards"])
        )


REPLAY = GenerationConfig(n=4, max_new_tokens=6, router_replay=True)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("policy"), "qwen3_moe", tie_word_embeddings=False)


def experiment(tmp_path: Path, policy: Path | str, actor=None, **changes):
    settings = {
        "steps": 2,
        "batch_prompts": 4,
        "interfaces": {"actor": actor or GRPOActorInterface(generation=REPLAY), "reward": MeanToken()},
        "models": {"actor": TransformersModel(str(policy), optimizer=OptimizerSpec(lr=1e-2))},
        "data": Prompts(11),
        "evaluation": None,
        "checkpoint": None,
        "strict_ratio": True,
    }
    return toy(tmp_path, **(settings | changes))


@pytest.mark.parametrize("kind", [GRPOActorInterface, DecoupledPPOActorInterface])
@pytest.mark.parametrize("rollout", [None, Async(max_staleness=1)], ids=["sync", "async"])
def test_a_run_replays_the_choices_of_its_rollouts(tmp_path, policy, kind, rollout):
    actor = kind(generation=REPLAY, n_minibatches=2)
    changes = {"rollout": rollout} if rollout is not None else {}
    made = experiment(tmp_path, policy, actor, **changes)
    check_replay(made)
    calls = {rpc.name: rpc for rpc in made.graph.rpcs}
    assert ROUTER_EXPERTS in calls["actor_gen"].outputs
    readers = {"actor_train"} | ({"actor_inf"} if kind is DecoupledPPOActorInterface else set())
    assert readers == {name for name, rpc in calls.items() if ROUTER_EXPERTS in rpc.inputs}
    result = run(made)
    changed = result.series("router_changes")
    assert len(changed) == 2
    assert all(0 <= x <= 1 for x in changed)
    assert max(result.series("router_changed_tokens")) >= max(changed)


@pytest.mark.parametrize(("critic", "replays"), [("shared", True), ("own", False)])
def test_a_critic_replays_only_with_the_model_of_the_actor(critic, replays):
    interfaces = {"actor": ppo.PPOActorInterface(REPLAY, critic=critic), "critic": PPOCriticInterface()}
    graph = ppo.dataflow({**interfaces, "reward": MeanToken()})
    check_keys(graph, {**interfaces, "reward": MeanToken()})
    (inference,) = (rpc for rpc in graph.rpcs if rpc.name == "critic_inf")
    assert (ROUTER_EXPERTS in inference.inputs) == replays


def test_without_the_setting_nothing_is_recorded(tmp_path, policy):
    made = experiment(tmp_path, policy, GRPOActorInterface(generation=GenerationConfig(n=4, max_new_tokens=6)))
    assert not any(ROUTER_EXPERTS in (*rpc.inputs, *rpc.outputs) for rpc in made.graph.rpcs)


def test_a_dense_model_is_rejected_when_it_is_loaded(tmp_path):
    dense = experiment(tmp_path, save_tiny(tmp_path / "dense"))
    with pytest.raises(ConfigError, match=r"models\.actor: .*'llama' has no routers.* Set generation\.router_replay"):
        load_models(dense)


def test_an_external_sampler_is_rejected(tmp_path):
    sampler = Vllm(urls=["http://127.0.0.1:1"])
    model = TransformersModel("m", optimizer=OptimizerSpec(), sampler=sampler)
    made = experiment(tmp_path, "m", models={"actor": model})
    with pytest.raises(ConfigError, match=r"models\.actor\.sampler=Vllm does not return the choices"):
        check_replay(made)


def test_an_algorithm_that_does_not_replay_is_rejected(tmp_path):
    actor = RAFTActorInterface(generation=REPLAY)
    interfaces = {"actor": actor, "reward": MeanToken()}
    made = experiment(tmp_path, "m", interfaces=interfaces, graph=raft.dataflow(interfaces))
    with pytest.raises(ConfigError, match=r"interfaces\.actor\.generation\.router_replay=true: RAFT"):
        check_replay(made)


def test_agents_behind_an_endpoint_are_rejected(tmp_path):
    agent = AgentInterface("m:run", generation=REPLAY)
    interfaces = {"actor": GRPOActorInterface(generation=REPLAY), "agent": agent}
    models = {"actor": TransformersModel("m", optimizer=OptimizerSpec()), "agent": SharedModel("actor")}
    graph = ppo.dataflow(interfaces)
    made = SimpleNamespace(graph=graph, interfaces=interfaces, models=models)
    with pytest.raises(ConfigError, match=r"interfaces\.agent\.generation\.router_replay=true: AgentInterface"):
        check_replay(made)


def test_an_actor_that_replays_needs_a_role_that_records():
    plain = EnvironmentInterface("m:E", generation=GenerationConfig(max_new_tokens=6))
    actor = GRPOActorInterface(generation=REPLAY)
    interfaces = {"actor": actor, "agent": plain}
    with pytest.raises(GraphError, match=r"actor\.generation\.router_replay=true needs key 'router_experts' in train"):
        check_keys(ppo.dataflow(interfaces), interfaces)
    interfaces = {"actor": actor, "agent": EnvironmentInterface("m:E", generation=REPLAY)}
    graph = ppo.dataflow(interfaces)
    check_keys(graph, interfaces)
    assert ROUTER_EXPERTS in graph.rpcs[0].outputs
