"""Test tensor files shared by several processes. Tests with several processes are in `test_sharded_engine.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from realign.engines import Sharding
from realign.engines.distributed.sharding import read_parts, read_saved, whole, write_parts
from realign.errors import ConfigError, SettingsError

TENSORS = {"a/b": torch.arange(6.0).view(2, 3), "c": torch.tensor([True, False]), "d": torch.zeros(0, 4)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_writes_and_reads_whole_tensors(tmp_path: Path) -> None:
    (file,) = write_parts(tmp_path / "parts", TENSORS)
    assert file.suffix == ".safetensors"
    # there is no file that would have to be unpickled
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    found = read_saved(tmp_path / "parts")
    assert found.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        assert torch.equal(found[name], x)
        assert found[name].dtype == x.dtype


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_not_in_the_files_is_told(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", TENSORS)
    with pytest.raises(ValueError, match=r"parts: .*other"):
        read_parts(tmp_path / "parts", {"other": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"parts: .*a/b"):
        read_parts(tmp_path / "parts", {"a/b": torch.zeros(2, 4)})
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        write_parts(tmp_path / "file", TENSORS)


def test_a_tensor_of_one_process_is_whole() -> None:
    x = torch.ones(2)
    assert whole(x) is x


def test_a_number_of_ranks_is_at_least_one() -> None:
    with pytest.raises(SettingsError, match="tensor=0: must be at least 1"):
        Sharding(tensor=0)


def test_the_former_name_of_a_dimension_sets_it() -> None:
    assert Sharding(tensor_parallel=2) == Sharding(tensor=2)


def test_the_ranks_that_no_other_dimension_needs_shard_the_weights() -> None:
    assert Sharding().sizes("actor", 6) == {"replicate": 1, "shard": 6, "tensor": 1}
    assert Sharding(replicate=2, tensor=3).sizes("actor", 24) == {"replicate": 2, "shard": 4, "tensor": 3}
    with pytest.raises(ConfigError, match=r"^models.ref.sharding.replicate=2 x tensor=2: must divide .* ranks \(6\)$"):
        Sharding(replicate=2, tensor=2).sizes("ref", 6)
