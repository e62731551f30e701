"""Test that a model computes the same with the dimensions `pipeline`, `tensor` and `expert` as in one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from realign.engines import Sharding
from tests.engines.distributed import dimensions, scenarios, traffic
from tests.engines.distributed.comparisons import assert_same
from tests.engines.distributed.dimensions import EXPERT, RUNS, TENSOR
from tests.engines.distributed.run_ranks import run_ranks
from tests.grids import in_turn

NAMES = {
    "tensor": [*TENSOR, *EXPERT],
    "expert": [*EXPERT],
    "pipeline": [*TENSOR, "lora_of_experts"],
}

FOURS = [
    *in_turn(["tensor=2", "tensor=2 x replicate=2", "pipeline=2 x tensor=2"], [*TENSOR]),
    *in_turn(["expert=2", "expert=2 x replicate=2", "expert=4", "expert=2 x tensor=2"], NAMES["expert"]),
]
"""Meshes of four ranks and the runs on them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dimensions")
    dimensions.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """The results of one process that have been needed so far."""
    return {}


def check(folder: Path, alone: dict[str, Any], ranks: int, names: Sequence[str], **sharding: int) -> None:
    """Compare some runs on a mesh with those of one process."""
    for name in names:
        if name not in alone:
            alone[name] = RUNS[name](folder)
    for results in run_ranks(ranks, dimensions.of_mesh, folder, names, sharding):
        for name in names:
            assert_same(*(without_gradients(x) for x in (results[name], alone[name])), name)
            gradients, wanted = (x.get("gradient", {}) for x in (results[name], alone[name]))
            assert gradients.keys() == wanted.keys()
            norm = torch.stack([x.norm() for x in wanted.values()]).norm() if wanted else 0
            for weight, x in wanted.items():
                assert (gradients[weight] - x).norm() <= 1e-5 * (x.norm() + 1e-2 * norm), f"{name}: {weight}"


def without_gradients(results: dict[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in results.items() if key != "gradient"}


def test_two_ranks_that_compute_layers_together_train_as_one_process(folder: Path, alone: dict[str, Any]) -> None:
    check(folder, alone, 2, ["limited", "lora"], tensor=2)
    one, two = (load_file(folder / f"adapter of {n}" / "adapter_model.safetensors") for n in (1, 2))
    assert_same(two, one)
    configs = [json.loads((folder / f"adapter of {n}" / "adapter_config.json").read_text()) for n in (1, 2)]
    for config in configs:
        config["target_modules"].sort()  # peft writes a set
    assert configs[0] == configs[1]


def test_two_ranks_that_divide_the_input_of_an_adapter_drop_what_one_process_drops(
    folder: Path, alone: dict[str, Any]
) -> None:
    check(folder, alone, 2, ["dropped"], tensor=2)


def test_two_ranks_with_different_experts_train_as_one_process(folder: Path, alone: dict[str, Any]) -> None:
    check(folder, alone, 2, ["experts"], expert=2)


@pytest.mark.slow
@pytest.mark.parametrize("dimension", NAMES)
def test_a_dimension_of_two_ranks(folder: Path, alone: dict[str, Any], dimension: str) -> None:
    check(folder, alone, 2, NAMES[dimension], **{dimension: 2})


@pytest.mark.parametrize(("mesh", "names"), FOURS)
def test_four_ranks(folder: Path, alone: dict[str, Any], mesh: str, names: Sequence[str]) -> None:
    sizes = (size.split("=") for size in mesh.split(" x "))
    check(folder, alone, 4, names, **{name: int(size) for name, size in sizes})


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [{"tensor": 2}, {"expert": 2}], ids=str)
def test_divided_experts_multiply_in_bfloat16(folder: Path, sharding: dict[str, int]) -> None:
    wanted = dimensions.low(folder)["metrics"]
    for results in run_ranks(2, dimensions.of_mesh, folder, ["low"], sharding):
        for now, one in zip(results["low"]["metrics"], wanted, strict=True):
            assert now["loss"] == pytest.approx(one["loss"], rel=1e-2)
            assert now["grad_norm"] == pytest.approx(one["grad_norm"], rel=3e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "sharding"),
    [
        ("dense", 4, {"tensor": 2}),
        ("experts", 4, {"expert": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_collectives_transfer_what_the_formula_says(
    folder: Path, model: str, ranks: int, sharding: dict[str, int]
) -> None:
    results = run_ranks(ranks, traffic.counted, folder, model, sharding)
    # A rank receives as many rows as choose its experts, and returns them.
    traveling = [[x.pop("all-to-all", 0) for x in pair] for pair in results]
    assert sum(counted for counted, _ in traveling) == sum(expected for _, expected in traveling)
    for counted, expected in results:
        assert counted == expected


@pytest.mark.parametrize(
    ("model", "ranks", "sharding"),
    [
        ("dense", 2, {"tensor": 2}),
        pytest.param("experts", 4, {"expert": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_write_every_weight_once(folder: Path, model: str, ranks: int, sharding: dict[str, int]) -> None:
    results = run_ranks(ranks, dimensions.written, folder, model, sharding)
    for name, (_, size) in results[0].items():
        assert sum(own for own, _ in (rank[name] for rank in results)) == size, name


@pytest.mark.slow
def test_checkpoints_of_divided_experts_go_on_in_one_process_and_the_other_way_round(folder: Path) -> None:
    sharding = Sharding(expert=2, tensor=2)
    one, four = folder / "experts of 1", folder / "experts of 4"
    wanted = scenarios.kept(folder, one, {}, "experts")
    for results in run_ranks(4, scenarios.kept, folder, four, {"of 1": one}, "experts", sharding):
        assert results["problems"] == []
        for start in ("end", "own", "of 1"):
            assert_same(results[start], wanted["end"], start)
    assert_same(scenarios.going_on(scenarios.restored(folder, four, "experts")), wanted["end"])
    assert_same(*(load_file(path / "saved" / "model.safetensors") for path in (four, one)))
