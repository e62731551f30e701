from __future__ import annotations

import pytest

from extras.planner.tests.models import built, load_for, words_for, write_model
from realign.config import compose
from realign.config.experiment import build_experiment
from realign.runtime.processes.placement import plan_groups
from realign.runtime.rollout.spec import Async
from realign_planner.options import PlanOptions
from realign_planner.placements import (
    LAUNCHERS,
    PlannedGroup,
    PlannedMesh,
    PlannedPlacement,
    Sampling,
    groupings,
    launcher,
    meshes,
    notes,
    overrides,
    placements,
    widths,
)
from realign_planner.workload import workload_of

REF = "interfaces.actor.kl.place=loss"


@pytest.mark.parametrize(
    ("devices", "nodes", "device"), [(1, 1, "h100"), (2, 1, "cpu"), (2, 1, "h100"), (4, 2, "h100"), (24, 3, "h100")]
)
def test_every_placement_uses_all_devices_and_its_overrides_build_an_experiment(devices, nodes, device, tmp_path):
    options = PlanOptions(devices=devices, nodes=nodes, device=device, max_staleness=1)
    load = load_for(tmp_path / "model", REF)
    words = words_for(tmp_path / "model", REF)
    server = next(iter(LAUNCHERS))
    plans = list(placements(load, options, servers=True))
    assert len(set(plans)) == len(plans)
    for one in plans[:: max(1, len(plans) // 10)]:
        assert one.devices == devices
        made = build_experiment(compose([*words, *overrides(one, load, options, server)]))
        assert made.runtime.starts_workers == (one.runtime == "ray")
        expected = None if one.max_staleness is None else one.max_staleness
        assert (made.rollout.max_staleness if isinstance(made.rollout, Async) else None) == expected
        sharding = made.models["actor"].sharding
        assert {name: getattr(sharding, name) for name in vars(one.mesh)} == vars(one.mesh)
        if one.runtime == "ray":
            groups = {group.name: (set(group.roles), group.devices) for group in plan_groups(made)}
            wanted = {group.roles[0]: (set(group.roles), group.devices) for group in one.groups}
            if one.sampling is Sampling.workers:
                wanted["rollout"] = ({"rollout"}, one.samplers)
            elif one.max_staleness is not None:  # planned, but not started with an external sampler
                wanted["rollout"] = ({"rollout"}, 1)
            assert groups == wanted


def test_sampling_in_the_process_of_the_trainer_is_asynchronous_on_one_device_or_two_cores(tmp_path):
    load = load_for(tmp_path / "model")

    def copies(**options):
        plans = placements(load, PlanOptions(max_staleness=1, **options), servers=False)
        return [(one.trainers, one.samplers, one.max_staleness) for one in plans if one.sampling is Sampling.copy]

    assert copies(devices=1) == [(1, 0, 0), (1, 0, 1)]
    assert copies(devices=2, device="cpu") == [(1, 1, 0), (1, 1, 1)]
    assert copies(devices=2) == []


def test_roles_share_devices_or_have_their_own_in_proportion_to_their_operations(tmp_path):
    load = load_for(tmp_path / "model", REF)  # 2 operations of the reference, 6 of the actor
    assert list(groupings(load, 1)) == [(PlannedGroup(("actor", "ref"), 1),)]
    assert list(groupings(load, 8)) == [
        (PlannedGroup(("actor", "ref"), 8),),
        (PlannedGroup(("actor",), 6), PlannedGroup(("ref",), 2)),
    ]


def test_tensor_parallelism_stays_in_a_node():
    assert widths(8, PlanOptions(devices=8)) == [1, 2, 4, 8]
    assert widths(12, PlanOptions(devices=16, nodes=4)) == [1, 2, 4]
    assert widths(3, PlanOptions(devices=4)) == [1]
    assert widths(16, PlanOptions(devices=16)) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("placement", "command"),
    [
        (PlannedPlacement((PlannedGroup(("actor",), 1),)), "realign runtime=local rollout=sync"),
        (
            PlannedPlacement((PlannedGroup(("actor",), 8),), mesh=PlannedMesh(tensor=2)),
            "torchrun --standalone --nproc-per-node=8 -m realign runtime=local "
            "models.actor.sharding.tensor=2 rollout=sync",
        ),
        (
            PlannedPlacement((PlannedGroup(("actor",), 16),)),
            "torchrun --nnodes=2 --nproc-per-node=8 -m realign runtime=local rollout=sync",
        ),
        (
            PlannedPlacement((PlannedGroup(("actor",), 5),), Sampling.workers, 11, max_staleness=0),
            "realign runtime=ray runtime.address=auto "
            "runtime.placement={actor: {devices: 5}, rollout: {devices: 11}} rollout=async rollout.max_staleness=0",
        ),
        (
            PlannedPlacement((PlannedGroup(("actor",), 8),), Sampling.servers, 8, server_parallel=4),
            "torchrun --standalone --nproc-per-node=8 -m realign runtime=local models.actor.sampler=vllm "
            "models.actor.sampler.servers=2 models.actor.sampler.arguments='--tensor-parallel-size 4' rollout=sync",
        ),
        (
            PlannedPlacement((PlannedGroup(("actor",), 1),), Sampling.servers, 15, max_staleness=2),
            "realign runtime=local models.actor.sampler=vllm models.actor.sampler.servers=15 rollout=async "
            "rollout.max_staleness=2 interfaces.actor.correction=importance_correction",
        ),
    ],
)
def test_the_command_of_a_placement(placement, command, tmp_path):
    load = load_for(tmp_path / "model")
    options = PlanOptions(devices=16, nodes=2)
    assert " ".join([*launcher(placement, options), *overrides(placement, load, options, "vllm")]) == command


def test_what_overrides_do_not_contain_is_a_note(tmp_path):
    load, options = load_for(tmp_path / "model"), PlanOptions(devices=16, nodes=2)
    servers = PlannedPlacement((PlannedGroup(("actor",), 8),), Sampling.servers, 8)
    assert [note.split(".")[0] for note in notes(servers, load, options)] == [
        "The overrides assign no devices to servers",
        "Servers on other nodes need urls and weights_dir",
        "Run torchrun on every node, with --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT",
    ]
    one = PlannedPlacement((PlannedGroup(("actor",), 1),))
    assert notes(one, load, PlanOptions(devices=1)) == []


def test_staleness_adds_a_correction_only_if_the_interface_has_none(tmp_path):
    write_model(tmp_path / "model")
    stale = PlannedPlacement((PlannedGroup(("actor",), 1),), Sampling.copy, max_staleness=1)
    fresh = PlannedPlacement((PlannedGroup(("actor",), 1),), Sampling.copy, max_staleness=0)
    options = PlanOptions(devices=1)
    plain = load_for(tmp_path / "model")
    corrected = load_for(tmp_path / "model", "interfaces.actor.correction=importance_correction")
    added = "interfaces.actor.correction=importance_correction"
    assert added in overrides(stale, plain, options, "")
    assert added not in overrides(fresh, plain, options, "")
    assert added not in overrides(stale, corrected, options, "")


def test_meshes_divide_the_devices_and_the_heads_and_replicate_over_nodes_or_all(tmp_path):
    load = load_for(tmp_path / "model", REF)  # 4 heads, of which 2 for keys and values

    def of(devices, nodes):
        group = PlannedGroup(("actor", "ref"), devices)
        return {
            tuple(vars(mesh).values()) for mesh in meshes((group,), load, PlanOptions(devices=devices, nodes=nodes))
        }

    assert of(1, 1) == {(1, 1, 1, 1, 1)}
    assert of(2, 1) == {(1, 1, 1, 1, 1), (2, 1, 1, 1, 1), (1, 2, 1, 1, 1), (1, 1, 2, 1, 1), (1, 1, 1, 1, 2)}
    in_a_node = {(1, 2, 1, 1, 1), (2, 2, 1, 1, 1), (1, 1, 2, 1, 1), (2, 1, 2, 1, 1)}
    stages = {(1, 1, 1, 1, 2), (1, 2, 1, 1, 2), (1, 1, 2, 1, 2), (1, 1, 1, 1, 4)}  # one of each node, or two
    assert of(4, 2) == {(1, 1, 1, 1, 1), (2, 1, 1, 1, 1), (4, 1, 1, 1, 1), *in_a_node, *stages}
    assert {(context, tensor) for _, context, tensor, *_ in of(16, 2)} == {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)}
    apart = (PlannedGroup(("actor",), 2), PlannedGroup(("ref",), 2))
    assert meshes(apart, load, PlanOptions(devices=4)) == [PlannedMesh()]


def test_meshes_divide_experts(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    write_model(tmp_path / "model", model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], **experts)
    load = workload_of(built(words_for(tmp_path / "model")), PlanOptions())
    shape = load.roles["actor"].model.shape
    assert (shape.experts, shape.experts_per_token) == (4, 2)
    group = PlannedGroup(("actor",), 8)
    sizes = {tuple(vars(mesh).values())[1:4] for mesh in meshes((group,), load, PlanOptions(devices=8))}
    assert {(tensor, expert) for _, tensor, expert in sizes} == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)}
    assert (2, 1, 4) in sizes
    assert (4, 1, 4) not in sizes  # on 8 devices
