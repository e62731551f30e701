"""The graph that follows from the settings of an actor."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest

from realign.api import RPC, SAMPLED, DataflowGraph, Keys, ModelInterface, rl_graph
from realign.interfaces import decoupled_ppo, grpo, ppo
from realign.interfaces.components import KLPenalty, RewardShaping, Truncation
from realign.interfaces.decoupled_ppo import DecoupledPPOActorInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import PPOActorInterface
from tests.frozen import decoupled_ppo as old_decoupled
from tests.frozen import ppo as old_ppo

REWARDED = ("rewards", "turns")


@dataclass
class Reward(ModelInterface):
    """Declares what a reward writes."""

    dense: bool = False

    def inference(self, model, data, mb_spec):
        raise AssertionError("the graph is never run")

    def keys(self, method):
        return Keys(writes=frozenset({"rewards", "dense_rewards"} if self.dense else {"rewards"}))


@dataclass
class Agent(ModelInterface):
    """Declares that it samples and rewards."""

    dense: bool = False

    def generate(self, model, data, mb_spec):
        raise AssertionError("the graph is never run")

    def keys(self, method):
        rewards = {*REWARDED, "dense_rewards"} if self.dense else set(REWARDED)
        return Keys(writes=frozenset({*SAMPLED, *rewards}))


FLAGS = [
    dict(zip(("kl", "recompute", "critic", "dense", "greedy_baseline", "ptx"), values, strict=True))
    for values in itertools.product(
        (False, True), (False, True), ("none", "own", "shared"), (False, True), (False, True), (False, True)
    )
]


def settings_of(flags) -> dict:
    """The settings of an actor that ask for the calls of these flags of version 0.1."""
    return {
        "kl": KLPenalty("loss" if flags["kl"] else "none"),
        "recompute": flags["recompute"],
        "critic": flags["critic"],
        "reward": RewardShaping(baseline="greedy" if flags["greedy_baseline"] else "none"),
        "ptx_coef": float(flags["ptx"]),
    }


def assert_same(new: DataflowGraph, old: DataflowGraph) -> None:
    """The same calls with the same keys, in the same order."""
    assert new.rpcs == old.rpcs
    assert [rpc.name for rpc in new.order] == [rpc.name for rpc in old.order]
    assert new.dataset_keys == old.dataset_keys
    assert new.results == old.results
    assert new.unread() == old.unread()


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_the_graph_of_ppo_is_that_of_the_flags_of_version_0_1(flags):
    interfaces = {"actor": PPOActorInterface(**settings_of(flags)), "reward": Reward(flags["dense"])}
    assert_same(rl_graph(interfaces), old_ppo.dataflow(**flags))


@pytest.mark.parametrize("flags", [flags for flags in FLAGS if flags["recompute"]], ids=str)
def test_the_graph_of_decoupled_ppo_also_reads_the_versions_of_tokens(flags):
    interfaces = {"actor": DecoupledPPOActorInterface(**settings_of(flags)), "reward": Reward(flags["dense"])}
    more = {name: value for name, value in flags.items() if name != "recompute"}
    old = old_decoupled.dataflow(**more)
    assert_same(rl_graph(interfaces), old)
    settings = settings_of(flags) | {"recompute": False}
    assert rl_graph(interfaces | {"actor": DecoupledPPOActorInterface(**settings)}) == rl_graph(interfaces)
    assert "versions" in next(rpc for rpc in old.rpcs if rpc.name == "actor_train").inputs


@pytest.mark.parametrize("flags", [flags for flags in FLAGS if not flags["greedy_baseline"]], ids=str)
def test_an_agent_takes_the_place_of_sampling_and_reward(flags):
    actor, agent = PPOActorInterface(**settings_of(flags)), Agent(flags["dense"])
    new = rl_graph({"actor": actor, "agent": agent})
    old = old_ppo.dataflow(**flags)
    outputs = (*SAMPLED, *sorted(agent.keys("generate").writes - set(SAMPLED)))
    generate = RPC("agent_gen", "agent", "generate", ("prompt_ids", "row"), outputs)
    kept = [rpc for rpc in old.rpcs if rpc.name not in ("actor_gen", "reward_inf")]
    assert new.rpcs == (generate, *kept)
    assert new.dataset_keys == old.dataset_keys
    assert new.results == ("versions", "truncated", "prompt_mask", "turns")
    assert not {*new.unread()} - {"values", "bootstrap_values"}


@pytest.mark.parametrize("build", [ppo.dataflow, grpo.dataflow, decoupled_ppo.dataflow])
def test_every_file_of_the_family_builds_the_graph_of_its_interfaces(build):
    interfaces = {"actor": GRPOActorInterface(kl=KLPenalty("reward")), "reward": Reward()}
    assert build(interfaces) == rl_graph(interfaces)


@pytest.mark.parametrize(
    "actor",
    [
        PPOActorInterface(),
        PPOActorInterface(truncation=Truncation(mask=True), kl=KLPenalty("reward"), recompute=True),
        PPOActorInterface(critic="own", critic_warmup_steps=2, kl=KLPenalty("reward")),
        PPOActorInterface(critic="shared", credit_per_minibatch=True, ptx_coef=1.0),
        GRPOActorInterface(),
        DecoupledPPOActorInterface(critic="own"),
    ],
    ids=range(6),
)
def test_every_call_of_the_actor_gets_the_keys_that_it_needs_and_none_that_it_does_not_know(actor):
    for rpc in rl_graph({"actor": actor, "reward": Reward()}).rpcs:
        if rpc.model == "actor":
            ours = {graph: name for name, graph in rpc.rename.items()}
            inputs = {ours.get(key, key) for key in rpc.inputs}
            keys = actor.keys(rpc.method)
            assert set(keys.needs) <= inputs
            assert inputs - set(keys.needs) - keys.uses <= {"bootstrap_values", "truncated"}
            if keys.writes is not None:
                assert {ours.get(key, key) for key in rpc.outputs} == keys.writes


def test_a_graph_without_an_actor_raises():
    with pytest.raises(ValueError, match=r"interfaces\.actor is missing"):
        rl_graph({"reward": Reward()})


def test_a_greedy_baseline_of_conversations_raises():
    actor = PPOActorInterface(reward=RewardShaping(baseline="greedy"))
    with pytest.raises(ValueError, match=r"interfaces\.actor\.reward\.baseline=greedy: role 'agent' rewards whole"):
        rl_graph({"actor": actor, "agent": Agent()})


def test_the_calls_of_a_reference_and_of_a_baseline_have_default_roles():
    actor = PPOActorInterface()
    actor.generation = replace(actor.generation, temperature=0.7)
    roles = actor.roles()
    assert roles.keys() == {"ref", "baseline"}
    assert roles["ref"].interface.temperature == 0.7
    assert roles["baseline"].interface.generation == actor.generation
