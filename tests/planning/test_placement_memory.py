"""Test the memory of a placement on a network with round sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from realign.engines.sampling.decode import CACHE_BYTES
from realign.engines.sampling.in_process import InProcessSampling
from realign.planning.options import CPU_CORE, DEVICES, Accelerator, Assumed, Device
from realign.planning.placement_memory import ACTIVATION_NUMBERS, WEIGHT_BYTES, fits, in_process_slots, memory_of
from realign.planning.placements import PlannedGroup, PlannedPlacement, Sampling
from realign.planning.simulator import NetworkSizes, Tail, Work
from realign.planning.workload import CallLoad, RoleLoad, Workload

N = 1e9
NETWORK = NetworkSizes(weights=N, layers=10, kv_heads=2, head_size=64, hidden=1000, number_bytes=2)
LOAD = Workload(
    work=Work(4, 2, 0, 100, Tail(200, 0.0, 300)),
    roles={"actor": RoleLoad("actor", NETWORK, trained=1.0), "ref": RoleLoad("ref", NETWORK)},
    calls=(CallLoad("ref_inf", "ref", 2.0), CallLoad("actor_train", "actor", 6.0, 1, ("ref_inf",))),
    sampled="actor",
    sampling_calls=("actor_gen",),
    reward_calls=("reward_inf",),
    longest_prompt=200,
    budget=1000,
)
TOGETHER = PlannedGroup(("actor", "ref"), 1)
LAYER = ACTIVATION_NUMBERS * 1000 * 2 * 1000  # hidden units, bytes, tokens of the budget
CACHE = 8 * 500 * NETWORK.bytes_per_token  # 8 sequences of at most 500 tokens


def test_one_device_has_all_weights_and_a_concatenated_copy_for_sampling():
    memory = memory_of(PlannedPlacement((TOGETHER,)), LOAD, DEVICES["h100"])["actor"]
    assert memory.weights == pytest.approx(4 * N + 4 * N + 2 * N)
    assert memory.training == pytest.approx(12 * N)
    assert memory.activations == pytest.approx(10 * LAYER)
    assert memory.cache == pytest.approx(CACHE)
    assert memory.total == pytest.approx(22 * N + 10 * LAYER + CACHE)


def test_sharded_weights_are_gathered_for_sampling():
    memory = memory_of(PlannedPlacement((replace(TOGETHER, devices=4),)), LOAD, DEVICES["h100"])["actor"]
    layers = 2 * (2 * 4 * N / 10)  # for each role, one layer and the next one
    assert memory.weights == pytest.approx(8 * N / 4 + layers + 4 * N + 2 * N)
    assert memory.training == pytest.approx(12 * N / 4)
    assert memory.activations == pytest.approx(10 * LAYER * 600 / 1000)  # 8 sequences of 300 tokens on 4 ranks


def test_gradient_checkpointing_stores_the_inputs_of_layers():
    role = replace(LOAD.roles["actor"], checkpointing=True)
    load = replace(LOAD, roles={**LOAD.roles, "actor": role})
    memory = memory_of(PlannedPlacement((TOGETHER,)), load, DEVICES["h100"])["actor"]
    assert memory.activations == pytest.approx(LAYER + 10 * 1000 * 2 * 1000)


def test_a_rollout_worker_has_a_copy_of_its_own_and_the_trainer_has_none():
    placement = PlannedPlacement(
        (PlannedGroup(("actor",), 1), PlannedGroup(("ref",), 1)), Sampling.workers, 2, max_staleness=1
    )
    memory = memory_of(placement, LOAD, DEVICES["h100"])
    assert set(memory) == {"actor", "ref", "rollout"}
    assert memory["actor"].weights == pytest.approx(4 * N)
    assert (memory["actor"].cache, memory["actor"].training) == (0, pytest.approx(12 * N))
    assert (memory["ref"].weights, memory["ref"].training) == (pytest.approx(4 * N), 0)
    assert memory["ref"].activations == pytest.approx(LAYER)
    assert memory["rollout"].weights == pytest.approx(4 * N + 2 * N)
    copied = memory_of(PlannedPlacement((TOGETHER,), Sampling.copy, max_staleness=1), LOAD, DEVICES["h100"])["actor"]
    assert copied.weights == pytest.approx(8 * N + 4 * N + 2 * N)


def test_a_server_fills_its_memory_with_cache_and_must_hold_one_sequence():
    device = Device(Accelerator(memory=10e9), Assumed(memory_used=0.9))
    placement = PlannedPlacement((TOGETHER,), Sampling.servers, 2, server_parallel=2, max_staleness=1)
    memory = memory_of(placement, LOAD, device)["servers"]
    assert memory.weights == pytest.approx(N)
    assert memory.total == pytest.approx(9e9)
    small = Device(Accelerator(memory=1.111e9), Assumed(memory_used=0.9))
    assert not fits(memory_of(placement, LOAD, small), small)


def test_slots_are_limited_by_the_cache_the_setting_and_the_batch():
    slot = 500 * NETWORK.bytes_per_token
    core, h100 = CPU_CORE, DEVICES["h100"]
    assert in_process_slots(NETWORK, LOAD, core) == in_process_slots(NETWORK, LOAD, h100) == 8
    many = replace(LOAD, work=replace(LOAD.work, batch_prompts=10**6))
    assert in_process_slots(NETWORK, many, core) == int(CACHE_BYTES / slot)
    free = 0.9 * h100.accelerator.memory - WEIGHT_BYTES * NETWORK.weights
    assert in_process_slots(NETWORK, many, h100) == int(InProcessSampling.cache_fraction * free / slot)
    assert in_process_slots(NETWORK, replace(many, cache_fraction=0.1), h100) == int(0.1 * free / slot)
    assert in_process_slots(NETWORK, replace(many, max_slots=3), core) == 3


def test_a_placement_fits_if_every_device_has_the_memory():
    placement = PlannedPlacement((TOGETHER,))
    memory = memory_of(placement, LOAD, DEVICES["h100"])
    limit = memory["actor"].total / 0.9
    for factor, expected in ((1.001, True), (0.999, False)):
        device = Device(Accelerator(memory=factor * limit))
        assert fits(memory, device) is expected
