from __future__ import annotations

import logging
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from realign.samplers.in_process.compiled import fusion as fusion_module
from realign.samplers.in_process.compiled import library
from realign.samplers.in_process.compiled.fusion import DecodePath, Fusion
from realign.samplers.in_process.compiled.library import (
    LibraryError,
    find_compiler,
    load_library,
    open_library,
)
from tests.samplers.in_process.compiled.native import requires_compiler
from tests.tiny import tiny_model


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A compiler that fails."""
    command = script(tmp_path / "broken-c++", "echo 'decode_step.cpp:1: error: no such thing' >&2; exit 3")
    monkeypatch.setenv("CXX", command)
    return command


@pytest.fixture(scope="module", autouse=True)
def quick_builds():
    """Compile without optimization, since no test here computes anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "FLAGS", ("-O0", *library.FLAGS[1:]))
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder that `open_library` made, with a library. Tests copy it, since a build takes seconds."""
    folder = tmp_path_factory.mktemp("built") / "cache"
    open_library(folder)
    return folder


def test_an_absent_compiler_is_the_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert find_compiler() is None
    with pytest.raises(LibraryError, match=r"no C\+\+ compiler is installed \(tried no-such-compiler\)"):
        open_library(tmp_path)


@requires_compiler
def test_a_built_library_needs_no_compiler(monkeypatch, tmp_path):
    open_library(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert open_library(tmp_path)


def test_a_broken_compiler_is_the_reason_and_leaves_no_file(broken, tmp_path):
    folder = tmp_path / "cache"
    with pytest.raises(LibraryError, match=r"failed with exit code 3 .*error: no such thing"):
        open_library(folder)
    assert list(folder.iterdir()) == []


@requires_compiler
def test_concurrent_builds_share_one_file_and_later_calls_build_nothing(tmp_path, monkeypatch):
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(open_library, [tmp_path] * 2))) == 2
    (path,) = tmp_path.iterdir()
    assert path.suffix == ".so"
    monkeypatch.setattr(library, "_build", lambda *_: pytest.fail("built again"))
    assert open_library(tmp_path)


@requires_compiler
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(built, tmp_path, mode):
    assert stat.S_IMODE(built.stat().st_mode) == 0o700
    folder = shutil.copytree(built, tmp_path / "cache")
    open_library(folder)
    (path,) = folder.iterdir()
    folder.chmod(mode)
    with pytest.raises(LibraryError, match=f"other users can write to {folder}, .* Run chmod go-w {folder}"):
        open_library(folder)
    path.unlink()
    with pytest.raises(LibraryError, match=f"other users can write to {folder}"):
        open_library(folder)
    assert list(folder.iterdir()) == []


@requires_compiler
def test_a_file_that_others_can_write_to_or_own_is_refused(built, tmp_path, monkeypatch):
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    open_library(tmp_path)
    (path,) = tmp_path.iterdir()
    path.chmod(0o775)
    with pytest.raises(LibraryError, match=f"other users can write to {path}"):
        open_library(tmp_path)
    path.chmod(0o755)
    assert open_library(tmp_path)
    own, me = path.stat().st_uid, os.geteuid()
    if me == 0:
        os.chown(path, 65534, -1)
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(LibraryError, match=rf"{path if own == 0 else tmp_path} belongs to another user"):
        open_library(tmp_path)


@requires_compiler
def test_a_rollout_without_a_private_folder_runs_in_torch(tmp_path, monkeypatch, caplog):
    (tmp_path / "realign").mkdir(mode=0o777)
    (tmp_path / "realign").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fusion_module, "load_library", load_library.__wrapped__)
    fusion = Fusion(tiny_model("qwen2"))
    with caplog.at_level(logging.INFO, logger=fusion_module.__name__):
        fusion.trunk(8, torch.float32)
    assert fusion.path.now is DecodePath.fused
    assert "run in torch, since other users can write to" in caplog.text
