"""Test the costs of placements on devices with round rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from extras.planner.tests.cluster import CLUSTER, DEVICE, LOAD, NETWORK
from realign_planner.options import PlanOptions
from realign_planner.placements import PlannedGroup, PlannedMesh, PlannedPlacement, Sampling
from realign_planner.predict import (
    Cluster,
    Scale,
    collectives_s,
    costs_of,
    engines,
    microbatches,
    predict,
    schedule,
    token_s,
)
from realign_planner.simulator import Costs

TOGETHER = PlannedGroup(("actor", "ref"), 1)
APART = (PlannedGroup(("actor",), 1), PlannedGroup(("ref",), 1))


def test_costs_of_one_device_by_hand():
    costs = costs_of(PlannedPlacement((TOGETHER,)), LOAD, CLUSTER)
    assert costs.decode_step_s == pytest.approx(1 + 5 * 0.2 + 200 / 10)
    assert costs.decode_row_s == costs.prefill_token_s == pytest.approx(200 / 50)
    assert costs.decode_context_s == pytest.approx(2 * 2 * 5 / 10)
    assert costs.train_token_s == pytest.approx((2 + 6) * 100 / 50)
    assert costs.train_step_s == pytest.approx(3 + 28 * 100 / 10)
    assert costs.sync_s == 0


def test_a_token_costs_only_the_operations_of_its_own_experts():
    experts = replace(NETWORK, idle_experts=75.0)
    roles = {name: replace(role, network=experts) for name, role in LOAD.roles.items()}
    costs = costs_of(PlannedPlacement((TOGETHER,)), replace(LOAD, roles=roles), CLUSTER)
    dense = costs_of(PlannedPlacement((TOGETHER,)), LOAD, CLUSTER)
    for of_token in ("decode_row_s", "prefill_token_s", "train_token_s"):
        assert getattr(costs, of_token) == pytest.approx(getattr(dense, of_token) / 4)
    assert (costs.decode_step_s, costs.train_step_s) == (dense.decode_step_s, dense.train_step_s)


def test_more_devices_divide_training_and_gather_weights():
    costs = costs_of(PlannedPlacement((replace(TOGETHER, devices=4),)), LOAD, CLUSTER)
    assert costs.train_token_s == pytest.approx(8 * 100 / 50 / 4)
    collectives = 0.5 * 5 * (1 + 3)  # one per layer of the reference, three of the actor
    assert costs.train_step_s == pytest.approx(3 + 28 * 100 / 10 / 4 + collectives)
    assert costs.sync_s == pytest.approx(400 / (1e9 * 0.5))
    slow = Cluster(PlanOptions(devices=8, nodes=4), DEVICE)  # transfers between nodes take longer than computing
    tokens = LOAD.tokens / 4
    # weights in bf16, twice in training, and gradients in fp32; a rank sends three of four slices
    gathered = [0.75 * size * 100 / (4 * 0.5 * tokens) / 4 for size in (2, 2 * 2 + 4)]
    computed = [operations * 100 / 50 / 4 for operations in (2, 6)]
    expected = sum(map(max, zip(gathered, computed, strict=True)))
    costs = costs_of(PlannedPlacement((replace(TOGETHER, devices=4),)), LOAD, slow)
    assert costs.train_token_s == pytest.approx(expected)
    assert costs.sync_s == pytest.approx(400 / (4 * 0.5))


def test_calls_on_different_devices_overlap_if_they_do_not_depend_on_each_other():
    free = replace(LOAD, calls=(LOAD.calls[0], replace(LOAD.calls[1], after=())))
    assert costs_of(PlannedPlacement(APART), LOAD, CLUSTER).train_token_s == pytest.approx(8 * 100 / 50)
    assert costs_of(PlannedPlacement(APART), free, CLUSTER).train_token_s == pytest.approx(6 * 100 / 50)
    assert costs_of(PlannedPlacement((TOGETHER,)), free, CLUSTER).train_token_s == pytest.approx(8 * 100 / 50)


def test_stale_samples_cost_a_forward_pass_unless_the_graph_has_it():
    stale = PlannedPlacement((TOGETHER,), Sampling.workers, 1, max_staleness=1)
    assert costs_of(stale, LOAD, CLUSTER).train_token_s == pytest.approx(8 * 2)
    without = replace(LOAD, corrects_staleness=False)
    assert costs_of(stale, without, CLUSTER).train_token_s == pytest.approx(10 * 2)
    assert costs_of(replace(stale, max_staleness=0), without, CLUSTER).train_token_s == pytest.approx(8 * 2)


def test_weights_travel_through_the_host_to_workers_in_fp32_and_to_servers_in_the_precision_of_products():
    workers = PlannedPlacement((TOGETHER,), Sampling.workers, 2, max_staleness=1)
    servers = PlannedPlacement((TOGETHER,), Sampling.servers, 2, server_parallel=2, max_staleness=1)
    copied = PlannedPlacement((TOGETHER,), Sampling.copy, max_staleness=1)
    assert costs_of(workers, LOAD, CLUSTER).sync_s == pytest.approx(2 + 400 / 20)
    assert costs_of(servers, LOAD, CLUSTER).sync_s == pytest.approx(2 + 200 / 20)
    assert costs_of(copied, LOAD, CLUSTER).sync_s == pytest.approx(400 / 10)
    assert costs_of(servers, LOAD, CLUSTER).decode_step_s == pytest.approx(1 + 5 * 0.1 + 200 / 20)


def test_engines_follow_from_the_placement():
    many = PlannedGroup(("actor", "ref"), 8)
    assert engines(PlannedPlacement((many,), mesh=PlannedMesh(tensor=4))) == 2
    assert engines(PlannedPlacement((many,), Sampling.workers, 3, max_staleness=1)) == 3
    assert engines(PlannedPlacement((many,), Sampling.servers, 8, server_parallel=4)) == 2
    assert engines(PlannedPlacement((TOGETHER,), Sampling.copy, max_staleness=1)) == 1


def test_a_copy_without_a_device_of_its_own_waits_for_training():
    assert schedule(PlannedPlacement((TOGETHER,), Sampling.copy, max_staleness=1), LOAD, CLUSTER).shared
    assert not schedule(PlannedPlacement((TOGETHER,), Sampling.copy, 1, max_staleness=1), LOAD, CLUSTER).shared


def test_measured_factors_apply_to_the_in_process_sampler_and_to_training():
    scale = Scale(2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    for placement, sampling in (
        (PlannedPlacement((TOGETHER,)), True),
        (PlannedPlacement((TOGETHER,), Sampling.servers, 1), False),
    ):
        plain = costs_of(placement, LOAD, CLUSTER)
        costs = costs_of(placement, LOAD, replace(CLUSTER, scale=scale))
        factors = {"decode_step_s": 2, "decode_row_s": 3, "decode_context_s": 4, "prefill_token_s": 5}
        factors = factors if sampling else dict.fromkeys(factors, 1)
        factors |= {"train_step_s": 6, "train_token_s": 7, "sync_s": 1}
        assert vars(costs) == pytest.approx({name: factors[name] * value for name, value in vars(plain).items()})


def test_a_synchronous_prediction_by_hand():
    prediction = predict(PlannedPlacement((TOGETHER,)), LOAD, CLUSTER)
    costs: Costs = costs_of(PlannedPlacement((TOGETHER,)), LOAD, CLUSTER)
    rows, steps = 8, 20
    context = rows * 10 * steps + rows * steps * steps / 2
    sampling = steps * (costs.decode_step_s + rows * costs.decode_row_s) + context * costs.decode_context_s
    prefill = 4 * 10 * costs.prefill_token_s
    training = costs.train_step_s + rows * 30 * costs.train_token_s
    assert prediction.step_s == pytest.approx(prefill + sampling + training)
    assert prediction.tokens_per_s == pytest.approx(rows * steps / prediction.step_s)
    assert (prediction.staleness, prediction.fits) == (0, True)


def test_asynchronous_rollout_takes_the_time_of_its_slower_half():
    work = replace(LOAD.work, batch_prompts=8)
    load, sync = replace(LOAD, work=work), predict(PlannedPlacement((TOGETHER,)), replace(LOAD, work=work), CLUSTER)
    free = predict(PlannedPlacement((TOGETHER,), Sampling.copy, 1, max_staleness=2), load, CLUSTER)
    shared = predict(PlannedPlacement((TOGETHER,), Sampling.copy, 0, max_staleness=2), load, CLUSTER)
    assert free.step_s < sync.step_s
    assert free.step_s < shared.step_s
    assert 0 < free.staleness <= 2


def test_a_pipeline_fills_and_drains_in_each_optimizer_step():
    group = replace(TOGETHER, devices=2)
    placement = PlannedPlacement((group,), mesh=PlannedMesh(pipeline=2))
    load = replace(LOAD, budget=48)  # of 240 tokens
    train = load.calls[1]
    # (m + p - 1) / m of the time, with m micro-batches in an optimizer step and p = 2 stages
    for minibatches, passes in ((1, 5), (2, 3), (4, 2), (5, 1), (8, 1)):
        for epochs in (1, 3):
            call = replace(train, optimizer_steps=minibatches * epochs, epochs=epochs, operations=6.0 * epochs)
            assert call.minibatches == minibatches
            assert microbatches(call, group, placement, load) == passes
            expected = (passes + 1) / passes * epochs * 6 * 100 / 50 / 2
            assert token_s(call, group, placement, load, CLUSTER) == pytest.approx(expected)


def test_every_optimizer_step_gathers_the_layers_for_each_of_its_micro_batches():
    placement = PlannedPlacement((replace(TOGETHER, devices=2),))
    train = replace(LOAD.calls[1], optimizer_steps=6, epochs=2)  # three mini-batches of 80 tokens
    load = replace(LOAD, budget=30, calls=(train,))  # a rank has 40 of them: two micro-batches
    assert collectives_s(placement, load, CLUSTER) == pytest.approx(0.5 * 5 * 3 * 2 * 6)
    call = replace(train, optimizer_steps=2)  # 120 tokens on a rank: four micro-batches
    assert collectives_s(placement, replace(load, calls=(call,)), CLUSTER) == pytest.approx(0.5 * 5 * 3 * 4 * 2)
