"""Entries of arrays on disk: shared by processes, bounded, and absent where anything is wrong with them."""

from __future__ import annotations

import errno
import multiprocessing
import os

import numpy as np
import pytest

from realign.array_cache import ArrayCache, key_of
from realign.cache_folder import LIMIT
from realign.errors import ConfigError
from tests.disk import OTHERS


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


ARRAYS = {"ids": np.arange(5, dtype=np.int32), "none": np.zeros((0, 3), dtype=np.float64)}


def test_an_entry_comes_back_bit_for_bit():
    ArrayCache().put("a", ARRAYS)
    arrays = ArrayCache().get("a")
    assert arrays is not None
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (arrays[name].dtype, arrays[name].tolist()) == (array.dtype, array.tolist())
    assert ArrayCache().get("b") is None


@pytest.mark.parametrize("at", [0, 7, 8, 40, -40, -1])
def test_a_flipped_byte_makes_an_entry_absent(at):
    cache = ArrayCache()
    cache.put("a", ARRAYS)
    (file,) = cache.folder.iterdir()
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    assert cache.get("a") is None
    cache.put("a", ARRAYS)
    assert cache.get("a") is not None


def test_an_entry_under_another_key_or_a_part_of_one_is_absent():
    cache = ArrayCache()
    cache.put("a", ARRAYS)
    (file,) = cache.folder.iterdir()
    file.with_name("b.safetensors").write_bytes(file.read_bytes())
    assert cache.get("b") is None
    file.write_bytes(file.read_bytes()[:-3])
    assert cache.get("a") is None


def test_what_others_can_write_is_neither_read_nor_written():
    cache = ArrayCache()
    cache.put("a", ARRAYS)
    (file,) = cache.folder.iterdir()
    file.chmod(0o666)
    assert cache.get("a") is None
    file.chmod(0o600)
    assert cache.get("a") is not None
    cache.folder.chmod(0o777)
    assert cache.get("a") is None
    with pytest.warns(UserWarning, match="other users can write to"):
        cache.put("b", ARRAYS)
    assert len(list(cache.folder.iterdir())) == 1


def test_a_full_cache_gets_no_more_entries_and_says_so_once(monkeypatch):
    monkeypatch.setenv(LIMIT, "3.5e-6")
    cache = ArrayCache()
    for key in "abc":
        cache.put(key, {"x": np.zeros(700, dtype=np.uint8)})
    # what a killed process left counts too, so it doesn't pile up, and isn't removed: it may be another's
    (cache.folder / ".left.0123abcd").write_bytes(bytes(1000))
    with pytest.warns(UserWarning, match=r"the cache is full \(REALIGN_CACHE_GB=3\.5e-06\)\. Remove .*realign"):
        cache.put("d", {"x": np.zeros(700, dtype=np.uint8)})
    for key in "efg":
        cache.put(key, {"x": np.zeros(700, dtype=np.uint8)})  # says nothing more: warnings are errors here
    assert [cache.get(key) is not None for key in "abcdefg"] == [True] * 3 + [False] * 4
    assert (cache.folder / ".left.0123abcd").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
def test_a_disk_that_takes_no_entry_costs_only_the_entry(monkeypatch, code):
    cache = ArrayCache()
    cache.put("a", ARRAYS)

    def refused(*paths):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refused)
        with pytest.warns(UserWarning, match=f"is not writable .{os.strerror(code)}.*costs only time"):
            cache.put("b", ARRAYS)
        cache.put("c", ARRAYS)
    assert [cache.get(key) is not None for key in "abc"] == [True, False, False]


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_file_is_no_entry(kind, tmp_path):
    cache = ArrayCache()
    cache.make()
    (cache.folder / "there").write_text("secret")
    os.mkfifo(cache.folder / "queue")
    OTHERS[kind](cache.folder / "a.safetensors")
    assert cache.get("a") is None


@pytest.mark.parametrize("part", ["realign", "realign/arrays"])
def test_a_link_of_another_user_leads_to_no_entries_and_nothing_behind_it_changes(tmp_path, monkeypatch, part):
    """Another user of a shared XDG_CACHE_HOME points a folder of the cache at files of this user."""
    precious = tmp_path / "models" / "model.safetensors"
    precious.parent.mkdir(mode=0o700)
    precious.write_bytes(b"x" * 4000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    monkeypatch.setenv(LIMIT, "1e-6")
    link = tmp_path / "shared" / part
    link.parent.mkdir(mode=0o700, parents=True)
    link.symlink_to(precious.parent)
    os.lchown(link, 65534, -1)
    cache = ArrayCache()
    with pytest.warns(UserWarning, match=r"belongs to another user|the cache is full"):
        cache.put("a", ARRAYS)
    assert cache.get("a") is None
    assert [path.read_bytes() for path in precious.parent.iterdir()] == [b"x" * 4000]


def test_a_limit_of_zero_keeps_nothing_and_a_wrong_one_is_named(monkeypatch):
    monkeypatch.setenv(LIMIT, "0")
    ArrayCache().put("a", ARRAYS)
    assert ArrayCache().get("a") is None
    monkeypatch.setenv(LIMIT, "much")
    with pytest.raises(ConfigError, match="REALIGN_CACHE_GB='much': expected a number of gigabytes"):
        ArrayCache()


def fill(worker: int) -> int:
    """Write and read the same entries as the other processes; return the number of wrong reads."""
    cache, wrong = ArrayCache(), 0
    for turn in range(50):
        number = (turn + worker) % 7
        cache.put(str(number), {"x": np.full(200, number, dtype=np.int64)})
        arrays = cache.get(str((number + 1) % 7))
        wrong += arrays is not None and arrays["x"].tolist() != [(number + 1) % 7] * 200
    return wrong


def test_processes_that_write_the_same_entries_never_read_a_wrong_one():
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(fill, range(3)) == [0, 0, 0]
    files = list(ArrayCache().folder.iterdir())
    assert files
    assert {path.suffix for path in files} == {".safetensors"}


def test_a_key_tells_texts_apart_wherever_they_are_cut():
    assert len({key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("ab", "c", "")}) == 4
