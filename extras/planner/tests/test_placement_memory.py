"""Test the memory of a placement: that of `realign check`, whose formula has tests against what torch counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from extras.planner.tests.cluster import SHAPE
from realign.api.memory import MemoryWork
from realign.engines.memory import MemoryModel
from realign.engines.training.optimizer import OptimizerSpec
from realign.models.model_shape import ModelShape
from realign.samplers.in_process.decode import CACHE_BYTES
from realign.samplers.in_process.settings import InProcessSampling
from realign_planner.options import CPU_CORE, DEVICES, Accelerator, Assumed, Device
from realign_planner.placement_memory import fits, in_process_slots, memory_of
from realign_planner.placements import PlannedGroup, PlannedMesh, PlannedPlacement, Sampling
from realign_planner.simulator import NetworkSizes, Tail, Work
from realign_planner.workload import AutoMemory, CallLoad, RoleLoad, Workload

N = 10**9
NETWORK = NetworkSizes(weights=N, layers=10, kv_heads=2, head_size=64, hidden=1000, number_bytes=2)
SIZES: ModelShape = replace(
    SHAPE, parameters=N, in_layers=N, matrices=N, trained=N, layers=10, hidden=1000, queries=512, keys=128, mlp=4000
)
MODEL = MemoryModel(SIZES, torch.device("cuda"), torch.bfloat16)
TRAINED = replace(MODEL, optimizer=OptimizerSpec())
LOAD = Workload(
    work=Work(4, 2, 0, 100, Tail(200, 0.0, 300)),
    roles={"actor": RoleLoad("actor", NETWORK, TRAINED, trained=1.0), "ref": RoleLoad("ref", NETWORK, MODEL)},
    calls=(CallLoad("ref_inf", "ref", 2.0), CallLoad("actor_train", "actor", 6.0, 2, ("ref_inf",))),
    sampled="actor",
    sampling_calls=("actor_gen",),
    reward_calls=("reward_inf",),
    longest_prompt=200,
    budget=1000,
)
TOGETHER = PlannedGroup(("actor", "ref"), 1)
H100 = DEVICES["h100"]
LIMIT = round(0.9 * 80e9)
TRAINS = MemoryWork(
    trains=True, scores=False, samples=False, tokens=1000, optimizer_step_tokens=1200, prompt=200, response=300
)
SAMPLES = replace(TRAINS, samples=True, prompts=4, sequences=8, free=LIMIT)


def scoring(ranks: int = 1, parts: int = 1) -> MemoryWork:
    prompts, tokens = -(-4 // parts), min(1000, 2400 // parts)
    return MemoryWork(False, True, False, tokens, 2400 // parts, prompts, -(-8 // parts), 200, 300, ranks=ranks)


def test_one_device_has_both_roles_and_the_larger_of_their_calls():
    peak = memory_of(PlannedPlacement((TOGETHER,)), LOAD, H100)["actor"]
    actor, ref = TRAINED.estimate(SAMPLES), MODEL.estimate(scoring())
    assert peak == actor.kept + ref.kept + max(actor.passing, ref.passing)
    assert actor.kept + ref.kept == 2 * 4 * N + 8 * N


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        (PlannedMesh(), 4),
        (PlannedMesh(replicate=2), 4),
        (PlannedMesh(context=4), 1),
        (PlannedMesh(tensor=2), 2),
        (PlannedMesh(context=2, tensor=2), 1),
        (PlannedMesh(expert=2), 4),
        (PlannedMesh(pipeline=2), 2),
    ],
)
def test_ranks_divide_prompts_and_what_the_mesh_says(mesh, parts):
    placement = PlannedPlacement((replace(TOGETHER, devices=4),), Sampling.workers, 1, mesh, max_staleness=1)
    sizes = vars(mesh)
    work = replace(TRAINS, tokens=min(1000, 2400 // parts), optimizer_step_tokens=1200 // parts, ranks=4)
    actor = replace(TRAINED, **sizes).estimate(work)
    ref = replace(MODEL, **sizes).estimate(scoring(4, parts))
    peak = memory_of(placement, LOAD, H100)["actor"]
    assert peak == actor.kept + ref.kept + max(actor.passing, ref.passing)


def test_auto_frees_the_copy_for_sampling_and_then_recomputes_layers_where_memory_is_scarce():
    settled = replace(LOAD.roles["actor"], model=replace(TRAINED, sampling=InProcessSampling(max_slots=8)))
    decides = replace(settled, auto=AutoMemory(keeps=True, checkpoints=True))
    placement = PlannedPlacement((PlannedGroup(("actor", "ref"), 4),))
    large = replace(LOAD, work=replace(LOAD.work, batch_prompts=400), budget=50_000)

    def peak(memory: float, role: RoleLoad) -> float:
        load = replace(large, roles={**LOAD.roles, "actor": role})
        return memory_of(placement, load, Device(Accelerator(memory=memory / 0.9)))["actor"]

    kept = peak(1e12, settled)
    freed = peak(kept - 1, decides)
    recomputed = peak(freed - 1, decides)
    assert peak(1e12, decides) == kept
    assert kept - freed == 4 * N
    assert recomputed < freed
    assert (peak(1.0, settled), peak(1.0, decides)) == (kept, recomputed)


def test_a_rollout_worker_has_a_copy_of_its_own_and_the_trainer_has_none():
    placement = PlannedPlacement(
        (PlannedGroup(("actor",), 1), PlannedGroup(("ref",), 1)), Sampling.workers, 2, max_staleness=1
    )
    memory = memory_of(placement, LOAD, H100)
    assert set(memory) == {"actor", "ref", "rollout"}
    worker = replace(SAMPLES, trains=False, tokens=0, optimizer_step_tokens=0)
    assert memory["rollout"] == TRAINED.estimate(worker).kept + TRAINED.estimate(worker).rollout
    trains = TRAINED.estimate(TRAINS)
    assert memory["actor"] == trains.kept + trains.training
    copied = memory_of(PlannedPlacement((TOGETHER,), Sampling.copy, max_staleness=1), LOAD, H100)["actor"]
    assert copied == memory["rollout"] + memory["actor"] + MODEL.estimate(scoring()).kept


def test_a_server_fills_its_memory_with_cache_and_must_hold_one_sequence():
    device = Device(Accelerator(memory=10e9), Assumed(memory_used=0.9))
    placement = PlannedPlacement((TOGETHER,), Sampling.servers, 2, server_parallel=2, max_staleness=1)
    assert memory_of(placement, LOAD, device)["servers"] == pytest.approx(9e9)
    small = Device(Accelerator(memory=1.111e9), Assumed(memory_used=0.9))
    sequence = 500 * NETWORK.bytes_per_token / 2
    assert memory_of(placement, LOAD, small)["servers"] == pytest.approx(N + sequence)
    assert not fits(memory_of(placement, LOAD, small), small)


def test_slots_are_limited_by_the_cache_the_setting_and_the_batch():
    slot = 500 * NETWORK.bytes_per_token
    core = CPU_CORE
    assert in_process_slots(NETWORK, LOAD, core) == in_process_slots(NETWORK, LOAD, H100) == 8
    many = replace(LOAD, work=replace(LOAD.work, batch_prompts=10**6))
    assert in_process_slots(NETWORK, many, core) == int(CACHE_BYTES / slot)
    free = 0.9 * H100.accelerator.memory - 4 * NETWORK.weights
    assert in_process_slots(NETWORK, many, H100) == int(InProcessSampling.cache_fraction * free / slot)
    assert in_process_slots(NETWORK, replace(many, cache_fraction=0.1), H100) == int(0.1 * free / slot)
    assert in_process_slots(NETWORK, replace(many, max_slots=3), core) == 3


def test_a_placement_fits_if_every_device_has_the_memory():
    placement = PlannedPlacement((PlannedGroup(("actor", "ref"), 1),), Sampling.workers, 1, max_staleness=1)
    memory = memory_of(placement, LOAD, H100)
    limit = max(memory.values()) / 0.9
    for factor, expected in ((1.001, True), (0.999, False)):
        assert fits(memory, Device(Accelerator(memory=factor * limit))) is expected
