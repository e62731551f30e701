"""What is written is on the disk before something else says so, and only regular files are opened."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from realign.engines.files.folders import make_folder, open_regular, save_folder, sync_tree, write_state
from realign.errors import ConfigError
from tests.disk import DiskLog


def write_model(folder: Path) -> None:
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "weights").write_text("w")
    (folder / "tokenizer" / "vocabulary").write_text("v")


def test_a_saved_folder_is_synced_file_by_file_before_its_rename_and_its_parents_after(tmp_path, monkeypatch):
    log = DiskLog(monkeypatch)
    path = tmp_path / "run" / "final" / "actor"
    save_folder(path, write_model)
    published = log.renamed_to(path)
    for part in (path, path / "weights", path / "tokenizer", path / "tokenizer" / "vocabulary"):
        assert log.last_sync(part) < published
    assert log.last_sync(path.parent) > published
    assert log.last_sync(tmp_path / "run") >= 0
    assert log.last_sync(tmp_path) >= 0


def test_a_folder_that_is_replaced_is_synced_too(tmp_path, monkeypatch):
    save_folder(tmp_path / "best", write_model)
    log = DiskLog(monkeypatch)
    save_folder(tmp_path / "best", write_model)
    published = log.renamed_to(tmp_path / "best")
    assert log.last_sync(tmp_path / "best" / "weights") < published
    assert log.last_sync(tmp_path) > published


def test_the_state_of_an_interface_is_synced_before_its_rename(tmp_path, monkeypatch):
    log = DiskLog(monkeypatch)
    write_state(tmp_path, {"gain": 1.0})
    file = tmp_path / "interface_state.json"
    assert log.last_sync(file) < log.renamed_to(file) < log.last_sync(tmp_path)


def test_links_are_not_followed_when_a_tree_is_synced(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "tree" / "nowhere").symlink_to(tmp_path / "missing")
    log = DiskLog(monkeypatch)
    sync_tree(tmp_path / "tree")
    assert log.last_sync(tmp_path / "elsewhere") == -1
    assert log.last_sync(tmp_path / "tree") >= 0


def test_created_parents_are_synced(tmp_path, monkeypatch):
    log = DiskLog(monkeypatch)
    make_folder(tmp_path / "a" / "b")
    assert log.last_sync(tmp_path) >= 0
    assert log.last_sync(tmp_path / "a") >= 0
    make_folder(tmp_path / "a" / "b")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


OTHERS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to(path.parent / "there"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to a pipe": lambda path: path.symlink_to(path.parent / "queue"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "socket": unix_socket,
}
"""What can be in place of a file, by name."""


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND], ids=["read", "append"])
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_regular_file_is_refused_at_once(kind, flags, tmp_path):
    (tmp_path / "there").write_text("secret")
    os.mkfifo(tmp_path / "queue")
    OTHERS[kind](tmp_path / "file")
    with pytest.raises(ConfigError, match=r"file' is not a regular file\. Remove it, or choose another output_dir"):
        open_regular(tmp_path / "file", flags, "rb" if flags == os.O_RDONLY else "ab")
    assert (tmp_path / "there").read_text() == "secret"


def test_a_device_is_refused():
    with pytest.raises(ConfigError, match="'/dev/zero' is not a regular file"):
        open_regular(Path("/dev/zero"), os.O_RDONLY, "rb")


def test_a_regular_file_is_opened_and_a_missing_one_stays_an_os_error(tmp_path):
    with open_regular(tmp_path / "new", os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab") as file:
        file.write(b"x")
    with open_regular(tmp_path / "new", os.O_RDONLY, "rb") as file:
        assert file.read() == b"x"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing", os.O_RDONLY, "rb")
