from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from realign.engines import SharedModel, TransformersModel
from realign.engines.shared_model import Share
from realign.errors import ConfigError
from realign.interfaces import grpo, ppo
from realign.interfaces.components import Critic, KLPenalty, KLPlace
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.reference import ReferenceInterface
from realign.runtime import Async, Experiment, Ray
from realign.runtime.checks.before_loading import check_ready
from realign.runtime.processes.placement import RoleGroup, plan_groups
from tests.toys import BigramModel, CountToken, Prompts


def experiment(tmp_path: Path, placement: Any = None, **changes: Any) -> Experiment:
    """Build an experiment: actor and critic are trained, `ref` is not, and `twin` shares the
    weights of another role."""
    actor = ppo.PPOActorInterface(kl=KLPenalty(KLPlace.reward), critic=Critic.own)
    interfaces = {"actor": actor, "reward": CountToken(), "ref": ReferenceInterface(), "critic": PPOCriticInterface()}
    settings = {
        "name": "toy",
        "steps": 1,
        "batch_prompts": 2,
        "graph": ppo.dataflow(interfaces),
        "interfaces": interfaces,
        "models": {role: BigramModel() for role in ("actor", "ref", "critic")},
        "data": Prompts(),
        "output_dir": tmp_path,
        "runtime": Ray(placement={} if placement is None else placement),
    }
    return Experiment(**settings | changes)


def test_trained_roles_have_their_own_process_and_the_others_live_with_the_first(tmp_path):
    assert plan_groups(experiment(tmp_path)) == (RoleGroup(("actor", "ref")), RoleGroup(("critic",)))


def test_colocated_and_separate(tmp_path):
    assert plan_groups(experiment(tmp_path, "colocated")) == (RoleGroup(("actor", "ref", "critic")),)
    separate = plan_groups(experiment(tmp_path, "separate"))
    assert separate == (RoleGroup(("actor",)), RoleGroup(("ref",)), RoleGroup(("critic",)))


def test_roles_are_placed_by_name(tmp_path):
    named = {"actor": {"devices": 2}, "ref": {"with": "critic", "offload": True}}
    groups = plan_groups(experiment(tmp_path, named))
    assert groups == (RoleGroup(("actor",), 2), RoleGroup(("critic", "ref"), 1, frozenset({"ref"})))
    assert groups[0].describe() == "actor on 2 devices"
    assert groups[1].describe() == "critic + ref on 1 device, offloaded between calls: ref"
    own = plan_groups(experiment(tmp_path, {"ref": {"devices": 1}}))
    assert own == (RoleGroup(("actor",)), RoleGroup(("ref",)), RoleGroup(("critic",)))
    together = plan_groups(experiment(tmp_path, {"critic": {"with": "ref"}}))
    assert together == (RoleGroup(("actor",)), RoleGroup(("ref", "critic")))


def test_without_a_trained_role_the_first_one_hosts_the_others(tmp_path):
    actor = grpo.GRPOActorInterface(kl=KLPenalty(KLPlace.reward))
    interfaces = {"actor": actor, "reward": CountToken(), "ref": ReferenceInterface()}
    graph = grpo.dataflow(interfaces)
    graph = dataclasses.replace(graph, rpcs=graph.rpcs[:-1])
    e = experiment(tmp_path, graph=graph, interfaces=interfaces)
    assert plan_groups(e) == (RoleGroup(("actor", "ref")),)


def test_rollout_workers_are_a_group_of_their_own(tmp_path):
    ahead = Async()
    groups = plan_groups(experiment(tmp_path, {"rollout": {"devices": 2}}, rollout=ahead))
    assert groups[-1] == RoleGroup(("rollout",), 2)
    assert plan_groups(experiment(tmp_path, "colocated", rollout=ahead))[1:] == (RoleGroup(("rollout",)),)


def test_a_role_that_shares_a_model_is_not_placed(tmp_path):
    models = {"actor": BigramModel(), "critic": BigramModel(), "ref": SharedModel("actor", Share.reference)}
    assert plan_groups(experiment(tmp_path, models=models)) == (RoleGroup(("actor",)), RoleGroup(("critic",)))
    with pytest.raises(ConfigError, match=r"placement\.ref: it shares the model of role 'actor'"):
        plan_groups(experiment(tmp_path, {"ref": {"devices": 1}}, models=models))


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"actr": {}}, "no role 'actr' has a separate model; did you mean 'actor'"),
        ({"reward": {}}, "no role 'reward' has a separate model"),
        ({"actor": 2}, r"runtime.placement.actor=2: must be a mapping such as \{devices: 2\}"),
        ({"actor": {"device": 2}}, "actor: unknown key 'device'; did you mean 'devices'"),
        ({"actor": {"devices": 0}}, "actor.devices=0: must be an integer of at least 1"),
        ({"actor": {"devices": True}}, "actor.devices=True: must be an integer of at least 1"),
        ({"ref": {"with": "actor", "offload": "yes"}}, "ref.offload='yes': must be true or false"),
        ({"ref": {"with": "actor", "devices": 2}}, "ref: with and devices cannot be combined"),
        (
            {"ref": {"with": "critc"}},
            "ref.with=critc: no other role 'critc' has a separate model; did",
        ),
        ({"ref": {"with": "ref"}}, "ref.with=ref: no other role 'ref'"),
        ({"ref": {"with": None}}, "ref.with=None: must be the name of a role"),
        (
            {"ref": {"with": "critic"}, "critic": {"with": "actor"}},
            "'critic' shares the processes of 'actor'",
        ),
        ({"critic": {"offload": True}}, "critic.offload has no effect, since no other role shares its devices"),
        (
            {"actor": {"devices": 2}, "ref": {"with": "actor", "offload": True}},
            "Set models.ref.sharding",
        ),
        ({"rollout": {}}, "runtime.placement.rollout has no effect without rollout=async"),
    ],
)
def test_a_mistake_is_named_before_anything_is_started(tmp_path, placement, message):
    with pytest.raises(ConfigError, match=message):
        check_ready(experiment(tmp_path, placement))


def test_a_device_has_no_number_where_each_process_has_one_of_its_own(tmp_path):
    models = {role: TransformersModel("nowhere", device="cuda:1") for role in ("actor", "ref", "critic")}
    with pytest.raises(
        ConfigError, match=r"models\.actor\.device=cuda:1: with runtime=ray each process sees only its own GPU"
    ):
        check_ready(experiment(tmp_path, models=models))
