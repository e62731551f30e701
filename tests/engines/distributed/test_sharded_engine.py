"""Test that a model in several processes computes the same as in a single process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from realign.records.checkpoint.folder import CorruptCheckpoint, list_checkpoints
from tests.engines.distributed import scenarios
from tests.engines.distributed.comparisons import Alone, assert_same
from tests.engines.distributed.run_ranks import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    scenarios.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    def compute(name: str) -> Any:
        if name == "kept":
            return scenarios.kept(folder, folder / "of 1", {})
        return scenarios.SCENARIOS[name](folder)

    return Alone(compute)


@pytest.fixture(
    scope="module",
    params=["core", pytest.param(3, marks=pytest.mark.slow)],
    ids=["2 ranks, core", "3 ranks"],
)
def ranks(request: pytest.FixtureRequest, folder: Path, alone: Alone) -> list[dict[str, Any]]:
    """Return the results of each rank of a group. The core has only what the quick tests read."""
    if request.param == "core":
        return run_ranks(2, scenarios.core_of_a_group, folder)
    for name in ("kept", *scenarios.SCENARIOS):  # the ranks read what one process writes
        alone[name]
    return run_ranks(request.param, scenarios.of_a_group, folder)


def all_scenarios(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs more than the core."""
    return pytest.mark.slow(pytest.mark.parametrize("ranks", [3], ids=["3 ranks"], indirect=True)(test))


@all_scenarios
def test_ranks_without_a_prompt_change_nothing_in_any_interface(ranks: list[dict[str, Any]], alone: Alone) -> None:
    for rank in ranks:
        assert_same(rank["one_prompt"], alone["one_prompt"])


def test_trap_e7_e10_four_steps_of_grpo_on_uneven_data_are_those_of_one_process(
    ranks: list[dict[str, Any]], alone: Alone
) -> None:
    for rank in ranks:
        assert_same(rank["grpo"], alone["grpo"])


@all_scenarios
@pytest.mark.parametrize("algorithm", ["sft", "grpo", "ppo", "dpo", "gkd", "kto"])
def test_trap_d4_e7_e10_four_steps_on_uneven_data_are_those_of_one_process(
    ranks: list[dict[str, Any]], alone: Alone, algorithm: str
) -> None:
    """Compare weights and all metrics on every rank. For PPO, advantages are whitened over the whole batch."""
    for rank in ranks:
        assert_same(rank[algorithm], alone[algorithm])


@all_scenarios
def test_both_epochs_stop_early_at_the_mini_batch_of_one_process(ranks: list[dict[str, Any]], alone: Alone) -> None:
    wanted = alone["early_stop"]
    steps = [(values["optimizer_steps"], values["early_stopped"]) for values in wanted["metrics"]]
    assert steps == [(3, 1), (4, 1), (5, 0)]  # the first and second mini-batch of the second epoch, and no early stop
    for rank in ranks:
        assert_same(rank["early_stop"], wanted)


def test_a_loss_or_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(ranks: list[dict[str, Any]]) -> None:
    for faults in (rank["faults of one rank"] for rank in ranks):
        assert [values["nonfinite_steps"] for values in faults["metrics"]] == [1, 1]
        assert faults["same"]


def test_trap_d7_d9_ranks_with_fewer_micro_batches_or_none_go_on_together(
    ranks: list[dict[str, Any]], alone: Alone
) -> None:
    assert [rank["uneven"]["n"] for rank in ranks] == [5.0, 1.0, 0.0][: len(ranks)]
    one = {key: x for key, x in alone["uneven"].items() if key != "n"}
    for rank in ranks:
        assert_same({key: x for key, x in rank["uneven"].items() if key != "n"}, one)
    assert one["few"][2]["zero_weight_steps"] == 1


@all_scenarios
def test_choices_of_experts_are_recorded_and_replayed_as_in_one_process(
    ranks: list[dict[str, Any]], alone: Alone
) -> None:
    for rank in ranks:
        assert_same(rank["replayed"], alone["replayed"])


@all_scenarios
def test_gradients_that_are_summed_once_in_a_step_are_those_of_one_process(
    ranks: list[dict[str, Any]], alone: Alone
) -> None:
    for rank in ranks:
        assert_same(rank["reduced once"]["grpo"], alone["grpo"])
        uneven = {key: x for key, x in rank["reduced once"]["uneven"].items() if key != "n"}
        assert_same(uneven, {key: x for key, x in alone["uneven"].items() if key != "n"})


@all_scenarios
@pytest.mark.parametrize("kind", scenarios.KINDS)
def test_every_kind_of_network_trains_as_in_one_process(ranks: list[dict[str, Any]], alone: Alone, kind: str) -> None:
    assert_same(ranks[0]["settings"][kind], alone["settings"][kind])


@all_scenarios
def test_scores_samples_and_mixed_weights_are_those_of_one_process(ranks: list[dict[str, Any]], alone: Alone) -> None:
    """Compare before and after a step: passes and rollouts must use the updated weights."""
    for rank in ranks:
        assert_same(rank["calls"], alone["calls"])
    assert not torch.equal(*alone["calls"]["logprobs"])


@all_scenarios
def test_checkpoints_of_any_number_of_processes_go_on_in_any_other(
    folder: Path, ranks: list[dict[str, Any]], alone: Alone
) -> None:
    wanted = alone["kept"]["end"]
    for rank in ranks:
        assert rank["kept"]["problems"] == []
        starts = rank["kept"].keys() - {"problems"}
        # continuing; resuming from the own checkpoint; resuming from a single-process checkpoint
        assert starts >= {"end", "own", "of 1"}
        for start in starts:  # these include a checkpoint of another group, if there was one before
            assert_same(rank["kept"][start], wanted, start)
    assert_same(scenarios.going_on(scenarios.restored(folder, group(folder, ranks))), wanted)


@pytest.mark.slow
def test_pairs_that_divide_layers_divide_a_batch_between_them(folder: Path) -> None:
    """Four ranks give the same results as one process, and each resumes from the other's checkpoint."""
    one, four = folder / "crossed of 1", folder / "crossed of 4"
    wanted = scenarios.crossed(folder, one, {})
    for rank in run_ranks(4, scenarios.crossed, folder, four, {"of 1": one}):
        assert rank["problems"] == []
        for start in ("end", "own", "of 1"):
            assert_same(rank[start], wanted["end"], start)
        assert_same(rank["mixed"], wanted["mixed"])
    assert_same(scenarios.going_on(scenarios.restored(folder, four, "qwen3")), wanted["end"])


@all_scenarios
def test_a_damaged_part_of_a_checkpoint_is_found(folder: Path, ranks: list[dict[str, Any]]) -> None:
    (checkpoint,) = list_checkpoints(group(folder, ranks))
    parts = sorted((checkpoint.path / "parts").iterdir())
    assert len(parts) == len(ranks)
    kept = parts[1].read_bytes()
    try:
        parts[1].write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        with pytest.raises(CorruptCheckpoint, match=rf"parts/{parts[1].name}: the file was changed"):
            checkpoint.read()
        parts[1].unlink()
        with pytest.raises(CorruptCheckpoint, match=rf"parts/{parts[1].name}: missing"):
            checkpoint.read()
    finally:
        parts[1].write_bytes(kept)


@all_scenarios
@pytest.mark.parametrize("name", ["saved", "saved_ema"])
def test_what_is_saved_is_what_one_process_saves(folder: Path, ranks: list[dict[str, Any]], name: str) -> None:
    one, many = folder / "of 1" / name, group(folder, ranks) / name
    assert sorted(path.name for path in many.iterdir()) == sorted(path.name for path in one.iterdir())
    assert (many / "config.json").read_text() == (one / "config.json").read_text()
    for file in ("model.safetensors", "value_head.safetensors"):
        assert_same(load_file(many / file), load_file(one / file), file)


@all_scenarios
def test_bfloat16_is_of_products_only(folder: Path, ranks: list[dict[str, Any]]) -> None:
    wanted = scenarios.low(folder)
    for rank in ranks:
        assert rank["low"]["dtypes"] == {"torch.float32"}
        for now, one in zip(rank["low"]["metrics"], wanted["metrics"], strict=True):
            assert now["loss"] == pytest.approx(one["loss"], rel=1e-2)
            assert now["grad_norm"] == pytest.approx(one["grad_norm"], rel=3e-2)


@all_scenarios
def test_what_cannot_be_done_together_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    messages = ranks[0]["mistakes"]
    assert all(rank["mistakes"] == messages for rank in ranks)
    assert (
        "rank 1 called train_batch with a different batch than rank 0, or another method "
        "(different ids or lengths)" in messages["batch"]
    )
    for name, key in (("values", "advantages"), ("mask", "loss_mask")):
        assert f"another method (different '{key}')" in messages[name]
    assert "branch=reference of a sharded model requires trains=lora" in messages["reference"]
    assert messages["shape"] == "a saved tensor has shape [97, 1], but the model needs [97, 64]"
    assert "apply has no gradient" in messages["step"]
    assert (
        f"models.actor.sharding.tensor=7: must divide the number of ranks ({len(ranks)})" in messages["tensor parallel"]
    )
    assert "no tensor-parallel plan for model family 'gpt2'" in messages["plan"]
    assert "sharding.expert=" in messages["no experts"]
    assert "no expert plan for model family 'llama'" in messages["no experts"]
    assert "sharding.tensor=3: must divide num_attention_heads=4" in messages["heads"]
    assert "sharding.expert=3: 3 ranks divide the experts of a layer, but it has 4" in messages["experts"]
    assert "sharding.offload=true: the model is already on the CPU" in messages["offload"]
    assert "from the loss of micro-batches with ids 'p" in messages["nan"]
    assert "'p3'" in messages["nan"]


def test_dropout_draws_other_numbers_on_every_rank_and_the_same_in_every_run(ranks: list[dict[str, Any]]) -> None:
    seeds = [rank["dropout"] for rank in ranks]
    assert len(set(seeds)) == len(ranks)


def group(folder: Path, ranks: list[dict[str, Any]]) -> Path:
    """Return the folder of a group."""
    return folder / f"of {len(ranks)}"
