"""Test the graphs that result from the settings of an actor."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from realign.api import RPC, SAMPLED, DataflowGraph, Keys, ModelInterface, rl_graph
from realign.interfaces import decoupled_ppo, grpo, ppo
from realign.interfaces.components import KLPenalty, RewardShaping, Truncation
from realign.interfaces.decoupled_ppo import DecoupledPPOActorInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import PPOActorInterface

REWARDED = ("rewards", "turns")


@dataclass
class Reward(ModelInterface):
    """Declares the keys that a reward writes."""

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
CALLS = """
actor_gen: actor.generate prompt_ids -> input_ids prompt_mask loss_mask logprobs versions truncated
reward_inf: reward.inference input_ids prompt_mask row -> rewards dense?dense_rewards
greedy_baseline?baseline_gen: baseline.generate prompt_ids -> input_ids=greedy_input_ids prompt_mask=greedy_prompt_mask
greedy_baseline?baseline_inf: reward.inference input_ids=greedy_input_ids prompt_mask=greedy_prompt_mask row
    -> rewards=baseline_rewards
kl?ref_inf: ref.inference input_ids loss_mask -> logprobs=ref_logprobs
recompute?actor_inf: actor.inference input_ids loss_mask -> logprobs=prox_logprobs
critic?critic_inf: critic.inference input_ids loss_mask -> values bootstrap_values
own?actor_credit: actor.credit input_ids loss_mask logprobs truncated rewards dense?dense_rewards
    greedy_baseline?baseline_rewards kl?ref_logprobs recompute?prox_logprobs values bootstrap_values
    -> advantages returns loss_mask=train_mask
own?critic_train: critic.train_step input_ids loss_mask=train_mask values returns ->
actor_train: actor.train_step input_ids not_own?loss_mask logprobs truncated rewards dense?dense_rewards
    greedy_baseline?baseline_rewards kl?ref_logprobs recompute?prox_logprobs critic?values critic?bootstrap_values
    own?advantages own?returns own?loss_mask=train_mask ptx?ptx_input_ids ptx?ptx_loss_mask decoupled?versions ->
"""
"""All calls, in the order of execution. `flag?x` is present only with the flag. `a=b` renames the key `a` of the
method to `b` in the graph."""
DATASET = "prompt_ids row ptx?ptx_input_ids ptx?ptx_loss_mask"


def present(words: str, true: set[str]) -> list[str]:
    """Return the words without a flag, and those whose flag is true."""
    split = [word.rpartition("?") for word in words.split()]
    return [word for flag, _, word in split if not flag or flag in true]


def expected_graph(flags, *, decoupled: bool = False) -> DataflowGraph:
    """Build the graph that `CALLS` describes for these flags."""
    true = {name for name, value in flags.items() if value is True}
    true |= {"none": {"not_own"}, "own": {"critic", "own"}, "shared": {"critic", "not_own"}}[flags["critic"]]
    true |= {"decoupled"} if decoupled else set()
    rpcs = []
    for line in CALLS.strip().replace("\n    ", " ").splitlines():
        reads, writes = (present(words, true) for words in line.split("->"))
        if reads[0].endswith(":"):  # without its name, the call is absent
            role, method = reads[1].split(".")
            inputs, outputs = ([word.rpartition("=")[2] for word in words] for words in (reads[2:], writes))
            rename = dict(word.split("=") for word in [*reads, *writes] if "=" in word)
            rpcs.append(RPC(reads[0].removesuffix(":"), role, method, tuple(inputs), tuple(outputs), rename))
    return DataflowGraph(tuple(rpcs), tuple(present(DATASET, true)), results=("versions", "truncated"))


def settings_of(flags) -> dict:
    """Return the settings of an actor that need the calls of these flags."""
    return {
        "kl": KLPenalty("loss" if flags["kl"] else "none"),
        "recompute": flags["recompute"],
        "critic": flags["critic"],
        "reward": RewardShaping(baseline="greedy" if flags["greedy_baseline"] else "none"),
        "ptx_coef": float(flags["ptx"]),
    }


def assert_graph(actual: DataflowGraph, expected: DataflowGraph) -> None:
    """Assert equal calls and keys, the same order of execution, and that all keys are read."""
    assert actual == expected
    assert actual.order == expected.rpcs
    assert actual.unread() == []


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_the_settings_of_ppo_determine_every_call_and_key_of_its_graph(flags):
    interfaces = {"actor": PPOActorInterface(**settings_of(flags)), "reward": Reward(flags["dense"])}
    assert_graph(rl_graph(interfaces), expected_graph(flags))


@pytest.mark.parametrize("flags", [flags for flags in FLAGS if flags["recompute"]], ids=str)
def test_the_graph_of_decoupled_ppo_also_reads_the_versions_of_tokens(flags):
    interfaces = {"actor": DecoupledPPOActorInterface(**settings_of(flags)), "reward": Reward(flags["dense"])}
    assert_graph(rl_graph(interfaces), expected_graph(flags, decoupled=True))
    settings = settings_of(flags) | {"recompute": False}
    assert rl_graph(interfaces | {"actor": DecoupledPPOActorInterface(**settings)}) == rl_graph(interfaces)


@pytest.mark.parametrize("flags", [flags for flags in FLAGS if not flags["greedy_baseline"]], ids=str)
def test_an_agent_takes_the_place_of_sampling_and_reward(flags):
    actor, agent = PPOActorInterface(**settings_of(flags)), Agent(flags["dense"])
    graph, expected = rl_graph({"actor": actor, "agent": agent}), expected_graph(flags)
    outputs = (*SAMPLED, *sorted(agent.keys("generate").writes - set(SAMPLED)))
    generate = RPC("agent_gen", "agent", "generate", ("prompt_ids", "row"), outputs)
    kept = [rpc for rpc in expected.rpcs if rpc.name not in ("actor_gen", "reward_inf")]
    assert graph.rpcs == (generate, *kept)
    assert graph.dataset_keys == expected.dataset_keys
    assert graph.results == ("versions", "truncated", "prompt_mask", "turns")
    assert graph.unread() == []


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
