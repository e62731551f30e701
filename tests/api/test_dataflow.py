"""Test the dataflow graph: errors, suggestions and execution order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.api import RPC, DataflowGraph, MicroBatchSpec, Model, ModelInterface, SequenceSample, Stats, Sync
from realign.api.dataflow import nearest
from realign.errors import ConfigError, GraphError

GEN = RPC("actor_gen", "actor", "generate", inputs=("prompt_ids",), outputs=("input_ids", "logprobs"))
REWARD = RPC("reward_inf", "reward", "inference", inputs=("input_ids",), outputs=("rewards",))
REF = RPC(
    "ref_inf",
    "ref",
    "inference",
    inputs=("input_ids",),
    outputs=("ref_logprobs",),
    rename={"logprobs": "ref_logprobs"},
)
TRAIN = RPC("actor_train", "actor", "train_step", inputs=("input_ids", "logprobs", "ref_logprobs", "rewards"))


def graph(*rpcs: RPC, **fields: Any) -> DataflowGraph:
    return DataflowGraph(rpcs or (GEN, REWARD, REF, TRAIN), **{"dataset_keys": ("prompt_ids",), **fields})


def names(dataflow: DataflowGraph) -> list[str]:
    return [rpc.name for rpc in dataflow.order]


def test_edges_follow_from_keys() -> None:
    dataflow = graph()
    assert dataflow.producers == {
        "input_ids": "actor_gen",
        "logprobs": "actor_gen",
        "rewards": "reward_inf",
        "ref_logprobs": "ref_inf",
    }
    assert dataflow.edges == {
        "actor_gen": {},
        "reward_inf": {"actor_gen": ("input_ids",)},
        "ref_inf": {"actor_gen": ("input_ids",)},
        "actor_train": {
            "actor_gen": ("input_ids", "logprobs"),
            "ref_inf": ("ref_logprobs",),
            "reward_inf": ("rewards",),
        },
    }
    assert dataflow.unread() == []


@settings(deadline=None)
@given(st.integers(2, 7), st.data())
def test_any_graph_without_a_circle_is_ordered_by_first_come_among_the_ready(n: int, data: st.DataObject) -> None:
    after = {i: data.draw(st.sets(st.integers(0, i - 1))) if i else set() for i in range(n)}
    declared = data.draw(st.permutations(range(n)))
    rpcs = [RPC(str(i), "m", "inference", after=tuple(map(str, sorted(after[i])))) for i in declared]
    want: list[int] = []
    while len(want) < n:  # choose the first declared call whose predecessors are done
        want.append(next(i for i in declared if i not in want and after[i] <= set(want)))
    assert names(graph(*rpcs)) == [str(i) for i in want]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: graph(GEN, replace(TRAIN, inputs=("input_ids", "logprob"))),
            r"RPC 'actor_train' reads key 'logprob', which no RPC or dataset produces; did you mean 'logprobs'\? "
            r"\(valid: input_ids, logprobs, prompt_ids\)",
        ),
        (
            lambda: graph(replace(GEN, inputs=("prompt_id",))),
            r"RPC 'actor_gen' reads key 'prompt_id', .* did you mean 'prompt_ids'\?",
        ),
        (
            lambda: graph(GEN, replace(REWARD, outputs=("logprobs",))),
            "key 'logprobs' is produced twice: by RPC 'actor_gen' and by RPC 'reward_inf'",
        ),
        (
            lambda: graph(GEN, dataset_keys=("prompt_ids", "logprobs")),
            "key 'logprobs' is produced twice: by RPC 'actor_gen' and by the dataset",
        ),
        (lambda: graph(GEN, GEN), "Duplicate RPC name 'actor_gen'. Names must be unique"),
        (
            lambda: graph(GEN, replace(REWARD, after=("actor_genn",))),
            r"RPC 'reward_inf': after contains 'actor_genn', which is not an RPC; did you mean 'actor_gen'\?",
        ),
        (
            lambda: graph(results=("truncated",)),
            r"results: no RPC or dataset produces key 'truncated' \(valid: ",
        ),
        (
            lambda: graph(RPC("a", "m", "inference", ("y",), ("x",)), RPC("b", "m", "inference", ("x",), ("y",))),
            "The RPCs form a cycle: (a -> b -> a|b -> a -> b)",
        ),
        (lambda: graph(RPC("a", "m", "inference", ("x",), ("x",))), "form a cycle: a -> a"),
        (lambda: graph(replace(GEN, after=("actor_train",)), REWARD, REF, TRAIN), "form a cycle: .*actor_train"),
        (
            lambda: graph(sync={"reff": Sync("actor")}),
            r"sync.reff: no RPC of the graph uses role 'reff'; did you mean 'ref'\? \(valid: ref, reward\)",
        ),
        (
            lambda: graph(sync={"actor": Sync("actor")}),
            "sync.actor: role 'actor' is trained, and the sync would overwrite its",
        ),
        (
            lambda: graph(sync={"ref": Sync("reward")}),
            r"sync.ref.of=reward: no RPC of the graph trains this role \(valid: actor\)",
        ),
        (lambda: graph(sync={"ref": Sync("actor", weight=0.0)}), "weight=0.0: must be above 0 and at most 1"),
        (lambda: graph(sync={"ref": Sync("actor", every_steps=0)}), "every_steps=0: must be at least 1"),
    ],
)
def test_trap_g6_a_bad_graph_is_refused_with_a_suggestion(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build()
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"method": "train"},
            r"unknown method 'train'; did you mean 'train_step'\? \(valid: credit, generate, inference, train_step\)",
        ),
        (
            {"rename": {"logprobs": "ref_logprob"}},
            r"rename contains 'ref_logprob', which is not one of its inputs or outputs; did you mean 'ref_logprobs'\?",
        ),
        ({"rename": {"a": "ref_logprobs", "b": "ref_logprobs"}}, "rename maps two names to 'ref_logprobs'"),
        (
            {"inputs": ("logprobs", "values"), "rename": {"logprobs": "values"}},
            "rename=.* gives two of the keys logprobs, values the same name 'logprobs'",
        ),
        ({"inputs": "input_ids"}, "inputs must be a tuple of names, found 'input_ids'. Write "),
        ({"outputs": "x"}, "outputs must be a tuple of names"),
        ({"after": "actor_gen"}, "after must be a tuple of names"),
        ({"outputs": ("x", "x"), "rename": {}}, "outputs contains 'x' twice"),
        (
            {"method": "train_step", "outputs": ("values",), "rename": {}},
            "a train_step returns metrics and no keys. Remove outputs values",
        ),
    ],
)
def test_trap_g6_a_bad_rpc_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=f"RPC 'ref_inf':? {message}"):
        replace(REF, **change)


def test_a_key_may_be_read_and_written_under_one_inner_name() -> None:
    """The reference reads the graph's `logprobs` as it is and writes its own as `ref_logprobs`."""
    rpc = replace(REF, inputs=("input_ids", "logprobs"))
    assert names(graph(GEN, rpc)) == ["actor_gen", "ref_inf"]


def test_unread_keys_are_listed_unless_they_are_results() -> None:
    rpcs = (GEN, replace(REWARD, outputs=("rewards", "reward")), REF, TRAIN)
    assert graph(*rpcs).unread() == ["reward"]
    assert graph(*rpcs, results=("reward",)).unread() == []
    assert graph(GEN).unread() == ["input_ids", "logprobs"]


class Policy(ModelInterface):
    """Generates and trains."""

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        return data

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> Stats:
        return {}


class Scorer(ModelInterface):
    """Scores with an engine."""

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        return data


class Rule(Scorer):
    """Scores without an engine."""

    needs_engine = False


ROLES: dict[str, type[ModelInterface]] = {"actor": Policy, "ref": Scorer, "reward": Rule}


@pytest.mark.parametrize(
    ("interfaces", "models", "message"),
    [
        (
            {"actor": Policy, "ref": Scorer, "rewards": Rule},
            ["actor", "ref"],
            r"RPC 'reward_inf' uses role 'reward', which has no interface; did you mean 'rewards'\? "
            r"\(valid: actor, ref, rewards\)",
        ),
        (
            ROLES,
            ["actor", "reference"],
            r"RPC 'ref_inf' uses role 'ref', which has no model .*valid: actor, reference",
        ),
        ({**ROLES, "reward": Scorer}, ["actor", "ref"], "RPC 'reward_inf' uses role 'reward', which has no model"),
        (
            {**ROLES, "actor": Scorer},
            ["actor", "ref"],
            r"RPC 'actor_gen' calls generate, which Scorer does not implement. It implements \['inference'\]",
        ),
        (
            {**ROLES, "ref": Policy},
            ["actor", "ref"],
            r"inference, which Policy .* It implements \['generate', 'train_step'\]",
        ),
    ],
)
def test_trap_g6_a_role_that_cannot_is_refused_before_anything_loads(
    interfaces: dict[str, type[ModelInterface]], models: list[str], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        graph().check_roles(interfaces, models)


def test_trap_g6_a_sync_of_a_role_without_a_network_is_refused() -> None:
    synced = graph(sync={"reward": Sync("actor")})
    with pytest.raises(GraphError, match=r"sync.reward: role 'reward' has no model \(valid: actor, ref\)"):
        synced.check_roles(ROLES, ["actor", "ref"])


def test_the_nearest_name_is_suggested_and_all_are_listed() -> None:
    assert nearest("rewrd", ["values", "reward"]) == "; did you mean 'reward'? (valid: reward, values)"
    assert nearest("zzz", ["b", "a"]) == " (valid: a, b)"
    assert nearest("x", []) == " (valid: none)"
