"""Test that ranks save together what one of them would save, and resume on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.distributed import scenarios
from tests.engines.distributed.comparisons import assert_same, assert_same_files
from tests.engines.distributed.run_ranks import run_ranks

FAST = {kind: scenarios.SAVED[kind] for kind in ("lora on experts", "tied, with a value head")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saving")
    scenarios.write_models(folder)
    return folder


@pytest.mark.parametrize(
    ("size", "kinds"),
    [
        pytest.param(2, FAST, id="2 ranks"),
        pytest.param(3, scenarios.SAVED, id="3 ranks", marks=pytest.mark.slow),
        pytest.param(4, scenarios.SAVED | scenarios.DIVIDED, id="4 ranks", marks=pytest.mark.slow),
    ],
)
def test_ranks_write_the_files_that_rank_0_would_write(folder, tmp_path, size, kinds):
    run_ranks(size, scenarios.saved, folder, tmp_path, kinds)
    for kind in kinds:
        slices = sorted(path for path in (tmp_path / kind).iterdir() if path.name.startswith("slices"))
        assert slices
        for path in slices:
            assert_same_files(path, path.with_name(path.name.replace("slices", "gathered")), "*")
            if (path / "config.json").exists() and kind != "critic":
                AutoModelForCausalLM.from_pretrained(path)


def test_a_save_that_fails_on_one_rank_leaves_the_earlier_folder_and_fails_on_all(folder, tmp_path):
    one, other = run_ranks(2, scenarios.unsaved, folder, tmp_path)
    assert one == other
    for name in ("full", "full at first"):
        assert one[name].startswith("DiskFullError: ")
        assert str(tmp_path / "saved") in one[name]
        assert "was not saved: [Errno 28] No space left on device" in one[name]
    assert "models.actor was not saved: weight 'model.embed_tokens.weight' is not finite" in one["nan"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["apart", "saved"]
    assert_same_files(tmp_path / "apart", tmp_path / "saved", "*")  # written by rank 0 alone


@pytest.mark.slow
def test_a_checkpoint_of_any_number_of_ranks_resumes_on_any_other(folder, tmp_path):
    places = {n: tmp_path / f"of {n}" for n in (1, 2, 4)}
    wanted = scenarios.kept(folder, places[1], {})["end"]
    for size, earlier in ((2, 1), (4, 2)):
        for rank in run_ranks(size, scenarios.kept, folder, places[size], {"earlier": places[earlier]}):
            assert rank["problems"] == []
            for start in ("end", "own", "earlier"):
                assert_same(rank[start], wanted, f"{start} on {size} ranks")
    for rank in run_ranks(2, scenarios.resumed, folder, places[4]):
        assert_same(rank, wanted)
    assert_same(scenarios.resumed(folder, places[2]), wanted)


@pytest.mark.slow
def test_moments_of_a_parameter_that_the_model_lacks_are_an_error(folder):
    for message in run_ranks(2, scenarios.unknown_moments, folder):
        assert message == "the saved optimizer has moments of parameter 10000, which the model lacks"


def test_an_adapter_is_merged_in_slices_as_peft_merges_it(folder):
    scenarios.write_adapters(folder)
    wanted = scenarios.merged_starts(folder)
    assert wanted.pop("in slices") == 0
    for merged in run_ranks(2, scenarios.merged_starts, folder):
        assert merged.pop("in slices") == len(wanted) - 1  # not the tied head, which is separated from the embeddings
        for name, weights in wanted.items():
            assert merged[name].keys() == weights.keys()
            assert all(torch.equal(merged[name][k], x) for k, x in weights.items()), name
