"""Test the files that realign opens, writes and removes in folders of others, and the list of those that it made."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import realign
from realign.errors import ConfigError
from realign.own_files import (
    FILES,
    OwnFiles,
    copy_file,
    open_regular,
    read_regular,
    replace_bytes,
    sync_tree,
    why_not_private,
)
from tests.disk import OTHERS, DiskLog
from tests.syntax_trees import calls_of


def test_links_are_not_followed_when_a_tree_is_synced(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "tree" / "nowhere").symlink_to(tmp_path / "missing")
    log = DiskLog(monkeypatch)
    sync_tree(tmp_path / "tree")
    assert log.last_sync(tmp_path / "elsewhere") == -1
    assert log.last_sync(tmp_path / "tree") >= 0


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND], ids=["read", "append"])
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_regular_file_is_refused_at_once(kind, flags, tmp_path):
    (tmp_path / "there").write_text("secret")
    os.mkfifo(tmp_path / "queue")
    OTHERS[kind](tmp_path / "file")
    with pytest.raises(ConfigError, match=r"file' is not a regular file\. Remove it, or choose another output_dir"):
        open_regular(tmp_path / "file", flags, "rb" if flags == os.O_RDONLY else "ab")
    assert (tmp_path / "there").read_text() == "secret"


def test_a_regular_file_is_opened_and_a_missing_one_stays_an_os_error(tmp_path):
    with open_regular(tmp_path / "new", os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab") as file:
        file.write(b"x")
    with open_regular(tmp_path / "new", os.O_RDONLY, "rb") as file:
        assert file.read() == b"x"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing", os.O_RDONLY, "rb")


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_regular_file_reads_as_empty(kind, tmp_path):
    (tmp_path / "there").write_text("secret")
    os.mkfifo(tmp_path / "queue")
    OTHERS[kind](tmp_path / "file")
    assert read_regular(tmp_path / "file", 100) == b""


def test_a_link_is_replaced_and_not_written_through(tmp_path):
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "file").symlink_to(tmp_path / "elsewhere")
    replace_bytes(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "elsewhere").read_text() == "precious"
    with pytest.raises(FileExistsError):
        copy_file(tmp_path / "elsewhere", tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "file"]


def test_a_write_that_fails_leaves_the_earlier_file_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("one")

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        replace_bytes(tmp_path / "file", b"two")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["one"]


def test_a_link_of_another_user_is_not_private(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    assert why_not_private(tmp_path / "link") is None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    os.chown(tmp_path / "mine", 12345, -1)
    os.lchown(tmp_path / "link", 12346, -1)
    assert why_not_private(tmp_path / "mine") is None
    assert why_not_private(tmp_path / "link") == f"{tmp_path / 'link'} belongs to another user (uid 12346)"


def written(own: OwnFiles, name: str, files: dict[str, bytes]) -> None:
    """Write a folder as a run does."""
    scratch = own.scratch(name)
    for inner, content in files.items():
        (scratch / inner).parent.mkdir(parents=True, exist_ok=True)
        (scratch / inner).write_bytes(content)
    own.record(name, scratch)
    scratch.rename(own.folder / name)


PATHS = st.sampled_from(["weights", "config.json", "actor/weights", "actor/deep/weights", "critic/weights"])
CONTENT = st.binary(max_size=3)
EDITS = st.lists(st.tuples(st.sampled_from(["write", "add", "remove", "link", "touch"]), PATHS, CONTENT), max_size=3)


@given(files=st.dictionaries(PATHS, CONTENT, min_size=1), edits=EDITS)
def test_a_folder_goes_as_a_whole_if_nobody_changed_it_and_stays_as_a_whole_if_somebody_did(
    files, edits, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("run")
    own = OwnFiles(folder)
    written(own, "final", files)
    root = folder / "final"
    before = {path: path.lstat().st_mtime_ns for path in root.rglob("*") if not path.is_dir()}
    changed = False
    for kind, name, content in edits:
        path = root / (f"{name}.user" if kind == "add" else name)
        if path.is_dir() or (kind == "remove" and not path.is_file()):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "remove":
            path.unlink()
        elif kind == "link":
            path.unlink(missing_ok=True)
            path.symlink_to("/etc/hosts")
        elif kind == "touch" and path.is_file():
            os.utime(path, ns=(0, before.get(path, 0) + 1))
        else:
            path.write_bytes(content)
            os.utime(path, ns=(0, 1))
    present = {path: path.lstat().st_mtime_ns for path in root.rglob("*") if not path.is_dir()}
    changed = not present.items() <= before.items() or any(path.is_symlink() for path in present)
    stranger = own.remove("final")
    left = {path: path.lstat().st_mtime_ns for path in root.rglob("*") if not path.is_dir()} if root.exists() else {}
    assert (stranger is not None) == changed
    assert left == (present if changed else {})


@pytest.mark.parametrize("path", ["../precious", "/etc", "a/../../precious", ".", "", "precious", 3, None, ["final"]])
def test_a_list_from_a_stranger_leads_nowhere(tmp_path, path):
    """Its paths are never used; it can only say that files of a run are those of the run."""
    run = tmp_path / "run"
    own = OwnFiles(run)
    own.claim("metrics.jsonl")
    precious = [tmp_path / "precious", run / "precious", run / "final" / "actor" / "precious"]
    for each in precious:
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_text("x")
    facts = [[os.stat(precious[0]).st_size, os.stat(precious[0]).st_mtime_ns]]
    with (run / FILES).open("a") as file:
        for entry in (
            {"path": path},
            {"path": path, "files": {"../precious": facts[0]}},
            {"path": "final", "files": 3},
        ):
            file.write(f"\n{json.dumps(entry)}")
        file.write(
            '\n{"path": "final", "files": {"actor/precious": [1, true, 2], "../../precious": [1, 2]}}\n[1]\n'
            + "[" * 9999
        )
    (run / "link").symlink_to(tmp_path)
    assert own.scratches() == []
    assert own.remove("final") == precious[2]
    assert own.remove("metrics.jsonl") is None
    assert all(each.exists() for each in precious)


def test_a_list_of_somebody_else_is_neither_believed_nor_written_to(tmp_path):
    (tmp_path / FILES).write_text('{"path": "final"}\n')
    own = OwnFiles(tmp_path)
    (tmp_path / "final").write_text("x")
    assert own.stranger("final") == tmp_path / "final"
    assert own.stranger(FILES) == tmp_path / FILES
    with pytest.raises(ConfigError, match="is not a file that realign wrote"):
        own.claim("metrics.jsonl")
    own.forget()
    assert (tmp_path / FILES).read_text() == '{"path": "final"}\n'


@pytest.mark.parametrize("kept", [0, 1, 40])
def test_a_list_that_a_full_disk_cut_at_its_start_starts_again(tmp_path, kept):
    own = OwnFiles(tmp_path)
    own.claim("a.jsonl")
    os.truncate(tmp_path / FILES, kept)
    own.claim("b.jsonl")
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("x")
    assert [own.remove(f"{name}.jsonl") for name in "ab"] == [tmp_path / "a.jsonl", None]


def test_a_folder_that_cannot_be_read_is_of_somebody_else(tmp_path, monkeypatch):
    own = OwnFiles(tmp_path)
    written(own, "final", {"actor/weights": b"x"})
    iterdir = Path.iterdir

    def denied(path):
        if path.name == "actor":
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", denied)
    assert own.remove("final") == tmp_path / "final" / "actor"
    assert (tmp_path / "final" / "actor" / "weights").exists()


WRITES = {
    *(
        "unlink",
        "rmtree",
        "rmdir",
        "write_bytes",
        "write_text",
        "copytree",
        "copyfile",
        "copyfileobj",
        "move",
        "replace",
    ),
    *("rename", "remove", "symlink", "link", "symlink_to", "hardlink_to", "touch", "mkstemp", "NamedTemporaryFile"),
    *("ZipFile", "TarFile", "copy", "copy2", "removedirs", "renames", "truncate"),
}
MODULES = {"os", "shutil", "zipfile", "tarfile", "tempfile"}
ELSEWHERE = {
    "samplers/servers/weights.py": "the folder that its mkdtemp made",
    "samplers/servers/guard.py": "removes that folder when the run is gone, and imports nothing",
    "samplers/servers/worker/realign_worker.py": "writes to memory, in a server without realign",
    "records/checkpoint/folder.py": "renames checkpoints whose files OwnFiles has compared",
    "models/files/folders.py": "renames folders whose files OwnFiles has compared",
}
"""Files that do without the module, and why they may."""


def test_one_module_writes_and_removes_files():
    """All others call it, so that no link is followed and nothing of somebody else is removed."""
    package, calls_by_file = Path(realign.__file__).parent, {}
    for path, name, call in calls_of(package, rf"\bopen\(|\.({'|'.join(WRITES)})\("):
        if _writes(call):
            calls_by_file.setdefault(str(path.relative_to(package)), set()).add(name)
    assert {name: calls for name, calls in calls_by_file.items() if name not in ("own_files.py", *ELSEWHERE)} == {}
    assert calls_by_file.keys() >= ELSEWHERE.keys()


def _writes(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name) and call.func.id == "open":
        return any(isinstance(x, ast.Constant) and str(x.value)[:1] in "wax" for x in call.args[1:2])
    if not isinstance(call.func, ast.Attribute):
        return False
    name, of = call.func.attr, ast.unparse(call.func.value)
    if name == "open":  # of a Path
        return any(isinstance(x, ast.Constant) and str(x.value)[:1] in ("w", "a", "x") for x in call.args[:1])
    if name not in WRITES:
        return False
    if name in ("replace", "rename"):  # also methods of texts, dataclasses and samples
        path = not call.keywords and len(call.args) == 1 and not isinstance(call.args[0], ast.Dict | ast.DictComp)
        return of in MODULES or (path and not (name == "rename" and _is_keys(call.args[0])))
    return of in MODULES or name not in ("copy", "remove", "move", "link", "truncate")


def _is_keys(node: ast.expr) -> bool:
    """Return whether the argument of a `rename` is a mapping of keys: of a SequenceSample, not of a Path."""
    return isinstance(node, ast.Name) and node.id in ("known", "GIVEN", "_OTHER")
