"""Entries of arrays on disk: shared by processes, bounded, and absent where anything is wrong with them."""

from __future__ import annotations

import multiprocessing
import os

import numpy as np
import pytest

from realign.array_cache import ArrayCache, key_of
from realign.cache_folder import LIMIT
from realign.errors import ConfigError


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


ARRAYS = {"ids": np.arange(5, dtype=np.int32), "none": np.zeros((0, 3), dtype=np.float64)}


def test_an_entry_comes_back_bit_for_bit():
    ArrayCache().write("a", ARRAYS)
    arrays = ArrayCache().read("a")
    assert arrays is not None
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (arrays[name].dtype, arrays[name].tolist()) == (array.dtype, array.tolist())
    assert ArrayCache().read("b") is None


@pytest.mark.parametrize("at", [0, 7, 8, 40, -40, -1])
def test_a_flipped_byte_makes_an_entry_absent(at):
    cache = ArrayCache()
    cache.write("a", ARRAYS)
    (file,) = cache.folder.iterdir()
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    assert cache.read("a") is None
    cache.write("a", ARRAYS)
    assert cache.read("a") is not None


def test_an_entry_under_another_key_or_a_part_of_one_is_absent():
    cache = ArrayCache()
    cache.write("a", ARRAYS)
    (file,) = cache.folder.iterdir()
    file.with_name("b.safetensors").write_bytes(file.read_bytes())
    assert cache.read("b") is None
    file.write_bytes(file.read_bytes()[:-3])
    assert cache.read("a") is None


def test_what_others_can_write_is_neither_read_nor_written():
    cache = ArrayCache()
    cache.write("a", ARRAYS)
    (file,) = cache.folder.iterdir()
    file.chmod(0o666)
    assert cache.read("a") is None
    file.chmod(0o600)
    assert cache.read("a") is not None
    cache.folder.chmod(0o777)
    assert cache.read("a") is None
    cache.write("b", ARRAYS)
    assert len(list(cache.folder.iterdir())) == 1


def test_the_least_recently_used_entries_go_above_the_limit(monkeypatch):
    size = 1000
    monkeypatch.setenv(LIMIT, str(3.5 * size / 1e9))
    cache = ArrayCache()
    for age, key in enumerate("abc"):
        cache.write(key, {"x": np.zeros(size - 300, dtype=np.uint8)})
        os.utime(cache.folder / f"{key}.safetensors", (age, age))
    assert cache.read("a") is not None  # used again, so that b is the oldest
    cache.write("d", {"x": np.zeros(size, dtype=np.uint8)})
    assert sorted(path.stem for path in cache.folder.iterdir()) == ["a", "c", "d"]
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= 3.5 * size
    cache.write("e", {"x": np.zeros(4 * size, dtype=np.uint8)})
    assert cache.read("e") is None  # larger than the whole cache


def test_what_a_killed_writer_left_is_removed_and_what_another_one_is_writing_stays():
    cache = ArrayCache()
    cache.write("a", ARRAYS)
    left, current = (cache.folder / name for name in ("left.tmp", "current.tmp"))
    for path in (left, current):
        path.write_bytes(b"half")
    os.utime(left, (0, 0))
    ArrayCache().write("b", ARRAYS)
    assert sorted(path.name for path in cache.folder.iterdir()) == ["a.safetensors", "b.safetensors", current.name]


def test_a_limit_of_zero_keeps_nothing_and_a_wrong_one_is_named(monkeypatch):
    monkeypatch.setenv(LIMIT, "0")
    ArrayCache().write("a", ARRAYS)
    assert ArrayCache().read("a") is None
    monkeypatch.setenv(LIMIT, "much")
    with pytest.raises(ConfigError, match="REALIGN_CACHE_GB='much': expected a number of gigabytes"):
        ArrayCache()


def fill(worker: int) -> int:
    """Write and read the same entries as the other processes; return the number of wrong reads."""
    cache, wrong = ArrayCache(), 0
    for turn in range(50):
        number = (turn + worker) % 7
        cache.write(str(number), {"x": np.full(200, number, dtype=np.int64)})
        arrays = cache.read(str((number + 1) % 7))
        wrong += arrays is not None and arrays["x"].tolist() != [(number + 1) % 7] * 200
    return wrong


def test_processes_that_write_and_remove_the_same_entries_never_read_a_wrong_one(monkeypatch):
    monkeypatch.setenv(LIMIT, str(8000 / 1e9))
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(fill, range(3)) == [0, 0, 0]
    files = list(ArrayCache().folder.iterdir())
    assert files
    assert {path.suffix for path in files} == {".safetensors"}


def test_a_key_tells_texts_apart_wherever_they_are_cut():
    assert len({key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("ab", "c", "")}) == 4
