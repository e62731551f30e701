from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from realign.engines import OptimizerSpec, Sharding
from realign.engines.memory import MemoryModel
from realign.models import Causal
from realign.models.model_shape import shape_of
from realign_planner.options import DEVICES
from realign_planner.placement_memory import memory_of
from realign_planner.placements import PlannedGroup, PlannedMesh, PlannedPlacement, Sampling
from realign_planner.simulator import NetworkSizes, Tail, Work
from realign_planner.workload import CallLoad, RoleLoad, Workload
from tests.virtual_cuda.rank_memory import CUDA, SIZES, Case, config_of, estimated, full_depth, tracked

GIB = 2**30
VERY_SLOW = [pytest.mark.slow, pytest.mark.very_slow]
ALTERNATING = (8, 64)
"""Numbers of ranks, of which every other model has one in the slow tests."""

COUNTED: dict[str, int] = {}
"""Bytes of a step of cases with a number of layers."""


def counted(case: Case, layers: int | None = None) -> int:
    """Return what torch counts in a step, at full depth if no number of layers is given."""
    key = f"{case}, {layers} layers"
    if key not in COUNTED:
        made = full_depth(case) if layers is None else tracked(case, config_of(case.model, layers))
        COUNTED[key] = made.step
    return COUNTED[key]


@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_estimate_of_a_rank_is_within_15_percent_of_what_torch_counts(checkpointing):
    case = Case("7B", ranks=8, checkpointing=checkpointing)
    assert estimated(case, config_of("7B", layers=2)) == pytest.approx(counted(case, 2), rel=0.15)


@pytest.mark.slow
def test_a_rank_of_64_loads_and_trains_72b_below_60_gib():
    bytes_ = full_depth(Case("72B", ranks=64, tokens=4096))
    assert bytes_.loading < 60 * GIB
    assert bytes_.step < 60 * GIB


CONTEXT = Case("7B", ranks=16, tokens=131072, sharding=Sharding(context=4), sequences=1)
"""One sequence of 128k tokens; the number of ranks that divide it must divide the 28 attention heads."""


@pytest.mark.slow
def test_16_ranks_train_7b_on_128k_tokens_below_80_gib():
    assert full_depth(CONTEXT).step < 80 * GIB


BOTH, ALONE = Sharding(context=2, replicate=2), Sharding(context=4)


@pytest.mark.parametrize(
    ("checkpointing", "sharding"),
    [
        (True, BOTH),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, ALONE), (False, BOTH), (False, ALONE))),
    ],
    ids=str,
)
def test_the_estimate_follows_the_mesh(checkpointing, sharding):
    case = replace(CONTEXT, checkpointing=checkpointing, sharding=sharding)
    assert estimated(case, config_of("7B", layers=2)) == pytest.approx(counted(case, 2), rel=0.15)


@pytest.mark.parametrize(
    ("microbatches", "checkpointing"),
    [
        (1, True),
        pytest.param(4, True, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=VERY_SLOW) for case in ((1, False), (4, False))),
    ],
)
def test_the_estimate_of_a_pipeline_is_that_of_the_stage_that_needs_most(microbatches, checkpointing):
    sharding = Sharding(pipeline=2)
    case = Case("7B", ranks=8, checkpointing=checkpointing, sharding=sharding, microbatches=microbatches)
    of_stages = [counted(replace(case, stage=stage), 6) for stage in range(2)]
    assert estimated(case, config_of("7B", layers=6)) == pytest.approx(max(of_stages), rel=0.15), of_stages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        pytest.param(model, ranks, marks=[] if ranks == ALTERNATING[i % 2] else pytest.mark.very_slow)
        for i, model in enumerate(SIZES)
        for ranks in ALTERNATING
    ],
)
def test_the_estimate_at_full_depth_is_within_15_percent(model, ranks):
    case = Case(model, ranks)
    assert estimated(case, config_of(model)) == pytest.approx(counted(case), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dimensions",
    [{"expert": 8}, pytest.param({"tensor": 4}, marks=pytest.mark.very_slow), {"tensor": 2, "expert": 4}],
    ids=str,
)
def test_the_estimate_of_a_mixture_of_experts_whose_ranks_divide_it_is_within_15_percent(dimensions):
    case = Case("30B of 128 experts", 16, sharding=Sharding(**dimensions))
    assert estimated(case, config_of(case.model)) == pytest.approx(counted(case), rel=0.15)


@pytest.mark.parametrize(
    "expert", [8, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_the_estimate_of_few_layers_counts_the_rows_that_travel_to_experts(expert):
    case = Case("30B of 128 experts", 16, sharding=Sharding(expert=expert))
    assert estimated(case, config_of(case.model, layers=2)) == pytest.approx(counted(case, 2), rel=0.15)


@pytest.mark.parametrize(
    ("model", "mesh", "layers"),
    [
        ("7B", PlannedMesh(tensor=4), 2),
        ("7B", PlannedMesh(replicate=2, context=2), 2),
        pytest.param("7B", PlannedMesh(context=4), 2, marks=pytest.mark.slow),
        pytest.param("30B of 128 experts", PlannedMesh(expert=8), None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_plan_has_the_memory_that_torch_counts(model, mesh, layers):
    case = replace(CONTEXT if layers else Case(model, 16), sharding=Sharding(**vars(mesh)))
    config = config_of(model, layers)
    trained = MemoryModel(
        shape_of(config, Causal()), CUDA, torch.bfloat16, optimizer=OptimizerSpec(), gradient_checkpointing=True
    )
    load = Workload(
        work=Work(case.ranks // (mesh.context * mesh.tensor), 1, 0, 0.0, Tail(case.tokens, 0.0, case.tokens)),
        roles={"actor": RoleLoad("actor", NetworkSizes(), trained, trained=1.0)},
        calls=(CallLoad("actor_train", "actor", 6.0, 1),),
        sampled="actor",
        sampling_calls=("actor_gen",),
        reward_calls=(),
        longest_prompt=0,
        budget=case.tokens,
    )
    group = PlannedGroup(("actor",), case.ranks)
    memory = memory_of(PlannedPlacement((group,), Sampling.servers, 8, mesh, max_staleness=1), load, DEVICES["h100"])
    assert memory["actor"] == pytest.approx(counted(case, layers), rel=0.15)
