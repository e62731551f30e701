"""Test that ranks write the files that transformers would write; see also `test_saving.py`."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from realign.engines.distributed import saved_files
from realign.engines.distributed.saved_files import SavedFiles, plan_files
from tests.engines.distributed.comparisons import assert_same_files
from tests.tiny import tiny_model

FAMILIES = ["gpt2", "llama", "qwen2", "qwen3_moe", "mixtral", "gpt_oss"]
CUTS = {"one": (1, 1), "rows": (3, 1), "columns": (1, 2), "both": (3, 2), "more than rows": (200, 1)}
"""Ranks along the first and the second dimension of a weight."""


def reloaded(folder: Path, family: str) -> Any:
    """Return a module that was read from a folder, since transformers remembers how it converted the weights."""
    tiny_model(family).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def names_in(module: Any) -> list[str]:
    """Return the names of the weights, of tied ones the first."""
    return [name for name, _ in module.named_parameters()] + [
        name for name, _ in module.named_buffers() if name in module.state_dict()
    ]


def boxes(shape: torch.Size, cut: tuple[int, int]) -> list[list[slice]]:
    """Cut a weight as `torch.chunk` would, along its first two dimensions."""
    cuts = []
    for n, parts in zip(shape, (*cut, *[1] * len(shape)), strict=False):
        size = -(-n // parts)
        cuts.append([slice(min(n, i * size), min(n, (i + 1) * size)) for i in range(parts)])
    return [list(box) for box in product(*cuts)]


def write(files: SavedFiles, folder: Path, module: Any, cut: tuple[int, int]) -> None:
    """Write all slices of all weights."""
    files.create(folder)
    opened = {name: os.open(folder / name, os.O_WRONLY) for name in files.headers}
    for name, x in module.state_dict().items():
        for box in boxes(x.shape, cut):
            for saved in files.places.get(name, ()):
                saved.write(opened[saved.file], x[tuple(box)].clone(), box)
    for number in opened.values():
        os.close(number)


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_of_any_shape_make_the_files_of_transformers(tmp_path, family):
    module = reloaded(tmp_path / "start", family)
    module.save_pretrained(tmp_path / "whole")
    files = plan_files(module, module.state_dict(), names_in(module), module.num_parameters())
    assert files is not None
    for name, cut in CUTS.items():
        (tmp_path / name).mkdir()
        write(files, tmp_path / name, module, cut)
        assert_same_files(tmp_path / name, tmp_path / "whole")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_large_model_has_the_files_and_the_index_of_transformers(tmp_path, monkeypatch, family):
    monkeypatch.setattr(saved_files, "LARGEST_FILE", "100KB")
    module = reloaded(tmp_path / "start", family)
    module.save_pretrained(tmp_path / "whole", max_shard_size="100KB")
    files = plan_files(module, module.state_dict(), names_in(module), module.num_parameters())
    assert files is not None
    assert len(files.headers) > 2
    (tmp_path / "slices").mkdir()
    write(files, tmp_path / "slices", module, (3, 1))
    assert_same_files(tmp_path / "slices", tmp_path / "whole")


@pytest.mark.parametrize("convert", [lambda x: 2 * x, lambda x: x.t().reshape(-1)], ids=["computed", "merged"])
def test_tensors_that_are_no_part_of_a_weight_have_no_plan(monkeypatch, convert):
    module = tiny_model("llama")

    def converted(module: Any, weights: dict[str, Any]) -> dict[str, Any]:
        return {name: convert(x) for name, x in weights.items() if x.ndim == 2}

    monkeypatch.setattr(saved_files, "revert_weight_conversion", converted)
    assert plan_files(module, module.state_dict(), names_in(module), module.num_parameters()) is None
