"""The cache folder: private files, shared by processes, bounded, and missing where anything is wrong with them."""

from __future__ import annotations

import errno
import os

import pytest

from realign.cache_folder import LIMIT, Cache, cache_folder


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_cache_folder_follows_the_xdg_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "realign"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "realign"


def test_what_others_can_write_is_neither_read_nor_written():
    cache = Cache("tokens")
    cache.write("a", b"x")
    (file,) = cache.folder.iterdir()
    file.chmod(0o666)
    assert cache.read("a") is None
    file.chmod(0o600)
    assert cache.read("a") is not None
    cache.folder.chmod(0o777)
    assert cache.read("a") is None
    with pytest.warns(UserWarning, match="other users can write to"):
        cache.write("b", b"x")
    assert len(list(cache.folder.iterdir())) == 1


def test_a_full_cache_gets_no_more_entries_and_says_so_once(monkeypatch):
    monkeypatch.setenv(LIMIT, "3.2e-6")
    cache = Cache("tokens")
    for key in "abc":
        cache.write(key, bytes(700))
    # what a killed process left counts too, so it doesn't pile up, and isn't removed: it may be another's
    (cache.folder / ".left.0123abcd").write_bytes(bytes(1000))
    with pytest.warns(UserWarning, match=r"the cache is full \(REALIGN_CACHE_GB=3\.2e-06\)"):
        cache.write("d", bytes(700))
    for key in "efg":
        cache.write(key, bytes(700))  # says nothing more: warnings are errors here
    assert [cache.read(key) is not None for key in "abcdefg"] == [True] * 3 + [False] * 4
    assert (cache.folder / ".left.0123abcd").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
def test_a_disk_that_takes_no_entry_costs_only_the_entry(monkeypatch, code):
    cache = Cache("tokens")
    cache.write("a", b"x")

    def refused(*paths):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refused)
        with pytest.warns(UserWarning, match=f"is not writable .{os.strerror(code)}.*costs only time"):
            cache.write("b", b"x")
        cache.write("c", b"x")
    assert [cache.read(key) is not None for key in "abc"] == [True, False, False]


@pytest.mark.parametrize("part", ["realign", "realign/tokens"])
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
    cache = Cache("tokens")
    with pytest.warns(UserWarning, match=r"belongs to another user|the cache is full"):
        cache.write("a", b"x")
    assert cache.read("a") is None
    assert [path.read_bytes() for path in precious.parent.iterdir()] == [b"x" * 4000]
