"""Test that a component in a file outside the package is short and works with all other features of the actor."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from realign.api import GenerationConfig, Keys, MicroBatchSpec, Model, ModelInterface, masked_mean, rl_graph
from realign.errors import GraphError
from realign.interfaces.components import (
    GAE,
    AdvantageEstimator,
    EntropyBonus,
    ImportanceCorrection,
    KLPenalty,
    Normalization,
    Objective,
    PolicyTokens,
)
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.runtime.checks.parts import check_keys
from realign.testing import BigramEngine, check_train_step, random_batch, train_once

EXAMPLES = Path(__file__).parents[3] / "examples"
ACTORS = pytest.mark.parametrize("actor", [PPOActorInterface, GRPOActorInterface])
KEYS = ("input_ids", "loss_mask", "logprobs", "truncated", "rewards", "ref_logprobs", "prox_logprobs", "versions")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a function that imports a class of an example from a copy of its file in a user folder."""

    def load(file: str, name: str):
        path = tmp_path / file
        path.write_text((EXAMPLES / file).read_text())
        spec = importlib.util.spec_from_file_location(f"my_lab_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return getattr(module, name)

    return load


@pytest.fixture
def topr(own):
    return own("topr.py", "Topr")


@pytest.fixture
def ranks(own):
    return own("rank_grpo.py", "RankRelative")


def lines_of_code(path: Path) -> int:
    """Count the lines of a file after `ruff format`, without blank lines, comments, imports and docstrings."""
    ruff = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length=120", "-"]
    source = subprocess.run(ruff, input=path.read_text(), capture_output=True, text=True, check=True).stdout
    tree, dropped = ast.parse(source), set[int]()
    for node in ast.walk(tree):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            dropped.update(range(node.lineno, node.end_lineno + 1))
    rows = enumerate(source.splitlines(), 1)
    return sum(1 for number, row in rows if number not in dropped and row.strip() and not row.strip().startswith("#"))


@pytest.mark.parametrize(("file", "most"), [("topr.py", 10), ("rank_grpo.py", 14)])
def test_a_new_component_takes_few_lines(file, most):
    assert 0 < lines_of_code(EXAMPLES / file) <= most


def batch(*more: str):
    return random_batch(3).select([*KEYS, *more])


def moved(interface, other, data=None) -> bool:
    """Return whether training steps with `interface` and `other` result in different weights."""
    data = batch() if data is None else data
    a, b = (train_once(x, data, MicroBatchSpec()).parameters[0] for x in (interface, other))
    assert a.isfinite().all()
    assert b.isfinite().all()
    return not torch.equal(a, b)


COMPONENTS = pytest.mark.parametrize("place", ["objective", "advantage"])


@pytest.fixture
def settings(place, topr, ranks):
    """Return the settings of an actor with the user's component at this place, and no further normalization."""
    own = {"objective": topr()} if place == "objective" else {"advantage": ranks()}
    return own | {"adv_norm": Normalization("none", "none"), "generation": GenerationConfig(n=4)}


@ACTORS
@COMPONENTS
def test_with_an_own_component_kl_in_the_loss_and_entropy_move_the_weights(actor, settings):
    plain = actor(**settings)
    assert moved(plain, actor(**settings, kl=KLPenalty("loss", 0.5)))
    assert moved(plain, actor(**settings, entropy=EntropyBonus(0.1)))
    assert moved(plain, actor())  # the component itself changes the weights, too


@ACTORS
def test_with_an_own_advantage_kl_in_the_reward_and_dense_rewards_move_the_weights(actor, ranks):
    def make(**more):
        unscaled = Normalization("none", "none")
        return actor(advantage=ranks(), adv_norm=unscaled, generation=GenerationConfig(n=4), **more)

    assert moved(make(), make(kl=KLPenalty("reward", 0.1)))
    a, b = (train_once(make(), batch(*dense), MicroBatchSpec()).parameters[0] for dense in ((), ("dense_rewards",)))
    assert not torch.equal(a, b)


class Saturating(Objective):
    """Objective that is not linear in the advantage."""

    def loss(self, tokens):
        return -tokens.advantages_T.tanh() * tokens.ratio_T


@ACTORS
def test_a_correction_weights_the_loss_of_an_objective_that_is_not_linear_in_the_advantage(actor):
    data = random_batch(1)
    weight_T = (data["prox_logprobs"] - data["logprobs"]).exp()
    output = BigramEngine().output(data)
    plain = actor(objective=Saturating(), recompute=True)
    corrected = actor(objective=Saturating(), correction=ImportanceCorrection())
    logprobs_T = output.logprobs(where_T=data["loss_mask"])

    def by_hand(of):
        loss_T = Saturating().loss(PolicyTokens.of(logprobs_T, of["prox_logprobs"], of))
        return loss_T, of["loss_mask"]

    loss_T, mask_T = by_hand(data)
    assert float(plain.loss(output, data)[0]) == pytest.approx(float(loss_T[mask_T].sum()))
    want = float((weight_T * loss_T)[mask_T].sum())
    assert float(corrected.loss(output, data)[0]) == pytest.approx(want)
    other_T, _ = by_hand(data.with_tokens(advantages=data["advantages"] * weight_T))
    assert float(other_T[mask_T].sum()) != pytest.approx(want, rel=1e-4)  # weighting the advantage gives another result


class Centered(Objective):
    """Objective that subtracts the mean advantage of the mini-batch, which `prepare` computes."""

    def __init__(self):
        self.prepared, self.seen = [], []

    def prepare(self, minibatch, reduce):
        self.prepared.append(minibatch.ids)
        mask_T, advantages_T = minibatch["loss_mask"], minibatch["advantages"].double()
        total, count = reduce(torch.stack([advantages_T[mask_T].sum(), mask_T.sum().double()])).tolist()
        return minibatch.with_tokens(center=torch.full_like(advantages_T, total / max(count, 1)))

    def loss(self, tokens):
        self.seen.append(tokens.data.ids)
        return -(tokens.advantages_T - tokens.data["center"]) * tokens.ratio_T


@pytest.mark.parametrize("more", [{}, {"credit_per_minibatch": True}, {"ptx_coef": 0.5}], ids=str)
def test_prepare_sees_each_minibatch_once_and_its_keys_reach_the_micro_batches(more):
    text = ("ptx_input_ids", "ptx_loss_mask") if "ptx_coef" in more else ()
    objective, data = Centered(), batch(*text)
    interface = PPOActorInterface(objective=objective, n_minibatches=2, epochs=2, **more)
    interface.train_step(Model("actor", BigramEngine()), data, MicroBatchSpec(n_microbatches=3))
    assert len(objective.prepared) == 4
    assert len(objective.seen) > 4
    policy = [i for ids in objective.seen for i in ids if not isinstance(i, tuple)]
    for epoch in (objective.prepared[:2], objective.prepared[2:]):
        ids = [i for part in epoch for i in part]
        assert len(ids) == len(set(ids))
        assert set(ids) == set(policy)


class ReadsReference(Objective):
    reads = frozenset({"ref_logprobs"})

    def loss(self, tokens):
        return (tokens.logprobs_T - tokens.data["ref_logprobs"]) * tokens.advantages_T


def calls(interface) -> dict[str, tuple[str, ...]]:
    return {rpc.name: rpc.inputs for rpc in rl_graph({"actor": interface}).rpcs}


def test_what_an_objective_reads_is_computed_by_the_graph_and_given_to_training():
    assert "ref_inf" not in calls(PPOActorInterface())
    called = calls(PPOActorInterface(objective=ReadsReference()))
    assert "ref_inf" in called
    assert "ref_logprobs" in called["actor_train"]
    assert PPOActorInterface(objective=ReadsReference()).keys("train_step").needs["ref_logprobs"] == (
        "objective=ReadsReference"
    )
    check_train_step(PPOActorInterface(objective=ReadsReference()), called["actor_train"])


class ReadsNamed(GAE):
    reads = frozenset({"rewards/format", "turns"})
    uses = frozenset({"novelty"})

    def needs(self):
        return AdvantageEstimator.needs(self)


class Rewards(ModelInterface):
    def inference(self, model, data, mb_spec):
        raise AssertionError("the graph is never run")


class Named(Rewards):
    KEYS: ClassVar = {"inference": Keys(writes=frozenset({"rewards", "turns"}), reports=frozenset({"rewards/format"}))}


class Novelty(Rewards):
    KEYS: ClassVar = {"inference": Keys(needs={"input_ids": "", "row": ""}, writes=frozenset({"novelty", "distance"}))}


@pytest.mark.parametrize("critic", ["none", "own"])
def test_a_component_gets_every_key_that_a_call_of_the_graph_writes(critic):
    actor = PPOActorInterface(advantage=ReadsNamed(), critic=critic)
    interfaces = {"actor": actor, "reward": Named(), "judge": Novelty(), "critic": PPOCriticInterface()}
    graph = rl_graph(interfaces)
    check_keys(graph, interfaces)
    read = {rpc.name: set(rpc.inputs) for rpc in graph.rpcs}["actor_credit" if critic == "own" else "actor_train"]
    assert {"rewards/format", "turns"} <= read
    # an optional key does not add a call, and a named reward stays a result of the run where nothing reads it
    assert "judge_inf" not in graph.edges
    assert "rewards/format" in rl_graph(interfaces | {"actor": PPOActorInterface()}).results


def test_a_role_is_called_for_a_key_that_only_it_declares():
    actor = PPOActorInterface(objective=ReadsNovelty())
    interfaces = {"actor": actor, "reward": Named(), "judge": Novelty()}
    graph = rl_graph(interfaces)
    check_keys(graph, interfaces)
    (call,) = (rpc for rpc in graph.rpcs if rpc.model == "judge")
    assert (call.inputs, call.outputs) == (("input_ids", "row"), ("distance", "novelty"))
    assert graph.edges["actor_train"]["judge_inf"] == ("novelty",)
    with pytest.raises(GraphError, match=r"objective=ReadsNovelty needs key 'novelty'"):
        check_keys(rl_graph({"actor": actor, "reward": Named()}), interfaces)


class ReadsNovelty(Objective):
    reads = frozenset({"novelty", "rewards/format", "row"})

    def loss(self, tokens):
        return -tokens.data["novelty"] * tokens.ratio_T

    def stats(self, loss, tokens):
        surprise_T = -tokens.logprobs_T.detach() * tokens.advantages_T
        return {"surprise_of_good": masked_mean(surprise_T, tokens.mask_T)}


def test_the_kit_fills_own_keys_and_metrics_of_an_objective_see_its_tokens():
    actor = PPOActorInterface(objective=ReadsNovelty())
    check_train_step(actor, [*KEYS, "rewards/format", "row"], own={"novelty": "T"})
    metrics = train_once(actor, batch().with_tokens(novelty=batch()["logprobs"]), MicroBatchSpec()).metrics
    assert metrics["surprise_of_good"] != 0
    with pytest.raises(ValueError, match=r"own\['novelty'\]='G'"):
        check_train_step(actor, KEYS, own={"novelty": "G"})
