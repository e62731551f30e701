"""Test the folders that a run writes: names, complete saves on the disk, and regular files only."""

from __future__ import annotations

import errno
import os
import pickle
import warnings
from pathlib import Path

import pytest

from realign.errors import ConfigError, DataError, TransientError
from realign.models.files.folders import (
    check_name,
    check_run_folder,
    restore_interrupted_saves,
    save_folder,
)
from realign.models.files.model_folder import check_path
from realign.own_files import FILES, OwnFiles, refuse_link
from tests.disk import OTHERS, DiskLog


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../up",
        "a/b",
        "/tmp/x",
        "a\\b",
        ".hidden",
        "-rf",
        "a\nb",
        "a\0b",
        "\x1b[2J",
        " a",
        "a ",
        "é" * 51,
    ],
)
def test_what_is_no_name_of_a_file_is_refused(name):
    with pytest.raises(ConfigError, match=r"^models: .* is not a valid file name. Use up to 100 characters"):
        check_name("models:", name)


@pytest.mark.parametrize(
    "path", ["../secret", "owner/..", "owner/../x", "a/b/c", "~nobody-here/x", "owner/.hidden", ""]
)
def test_a_path_trick_is_no_hub_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, DataError), match=r"^models\.actor\.path="):
        check_path("models.actor.path", path)


def test_a_model_is_not_written_over_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "actor").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link"):
        save_folder(tmp_path / "actor", lambda new: new.mkdir())
    assert (tmp_path / "actor").is_symlink()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    refuse_link(tmp_path / "elsewhere")


@pytest.mark.parametrize(("code", "transient"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)])
def test_only_a_full_disk_is_an_error_that_a_restart_can_fix(tmp_path, code, transient):
    def write(new):
        raise OSError(code, os.strerror(code))

    with pytest.raises(OSError, match=f"actor was not saved: .*{os.strerror(code)}") as caught:
        save_folder(tmp_path / "actor", write)
    assert isinstance(caught.value, TransientError) == transient
    # ranks send exceptions to each other
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), type(caught.value))


def test_a_folder_of_the_run_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    def write(text):
        def into(new):
            new.mkdir()
            (new / "weights").write_text(text)
            assert text != "bad", "disk full"

        return into

    own = OwnFiles(tmp_path)
    save_folder(tmp_path / "best", write("one"), own)
    with pytest.raises(AssertionError, match="disk full"):
        save_folder(tmp_path / "best", write("bad"), own)
    assert (tmp_path / "best" / "weights").read_text() == "one"
    save_folder(tmp_path / "best", write("two"), own)
    assert (tmp_path / "best" / "weights").read_text() == "two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", FILES]


def test_a_folder_with_files_of_somebody_else_is_moved_and_an_empty_one_replaced(tmp_path):
    (tmp_path / "final").mkdir()
    own = OwnFiles(tmp_path)
    save_folder(tmp_path / "final", lambda new: model(new, "one"), own)
    (tmp_path / "final" / "README.md").write_text("mine")
    with pytest.warns(UserWarning, match=r"README.md was not written by this run, so .*final was moved to .*final\.1"):
        save_folder(tmp_path / "final", lambda new: model(new, "two"), own)
    (tmp_path / FILES).unlink()
    with pytest.warns(UserWarning, match=r"moved to .*final\.2"):
        save_folder(tmp_path / "final", lambda new: model(new, "three"))  # somebody's path, without a run
    texts = {path.name: (path / "weights").read_text() for path in tmp_path.glob("final*")}
    assert texts == {"final.1": "one", "final.2": "two", "final": "three"}
    assert (tmp_path / "final.1" / "README.md").read_text() == "mine"


def test_saves_to_a_path_that_somebody_named_replace_those_of_this_process_only(tmp_path):
    for text in ("one", "two"):
        save_folder(tmp_path / "actor", lambda new, text=text: model(new, text))
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]
    assert (tmp_path / "actor" / "weights").read_text() == "two"
    for change in (lambda file: file.write_text("mine"), lambda file: file.with_name("notes").write_text("mine")):
        change(tmp_path / "actor" / "weights")
        with pytest.warns(UserWarning, match=r"was not written by this run, so .*actor was moved to"):
            save_folder(tmp_path / "actor", lambda new: model(new, "three"))
    kept = {name: (tmp_path / name / "weights").read_text() for name in ("actor", "actor.1", "actor.2")}
    assert kept == {"actor": "three", "actor.1": "mine", "actor.2": "three"}


def model(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "weights").write_text(text)


@pytest.mark.parametrize("name", ["final", "step_1000000"])
@pytest.mark.parametrize("state", ["writing", "between the renames", "after the renames"])
def test_an_interrupted_save_leaves_the_old_or_the_new_folder_and_nothing_else(tmp_path, name, state):
    target = tmp_path / name
    scratch = OwnFiles(tmp_path).scratch(name)
    if state != "between the renames":
        model(target, "new" if state == "after the renames" else "old")
    if state != "after the renames":
        model(scratch / "new", "torn" if state == "writing" else "new")
    if state != "writing":
        model(scratch / "old", "old")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        restore_interrupted_saves(tmp_path)
    assert (target / "weights").read_text() == ("new" if state == "after the renames" else "old")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([target.name, FILES])
    assert ["was restored" in str(w.message) for w in told] == [True] * (state == "between the renames")


@pytest.mark.parametrize(
    "name", [".git", ".final.abcdefgh", ".final.removed", ".final.0123abcd", ".step_000001.0123abcd"]
)
def test_hidden_folders_that_no_run_made_stay(tmp_path, name):
    model(tmp_path / name, "mine")
    OwnFiles(tmp_path).scratch("best")
    restore_interrupted_saves(tmp_path)
    assert (tmp_path / name / "weights").exists()
    assert not list(tmp_path.glob(".best.*"))


def test_links_are_neither_restored_nor_followed(tmp_path):
    model(tmp_path / "elsewhere" / "old", "mine")
    run = tmp_path / "run"
    for name in ("final", "best"):
        scratch = OwnFiles(run).scratch(name)
        if name == "best":
            scratch.rmdir()
            scratch.symlink_to(tmp_path / "elsewhere")
        else:
            (scratch / "old").symlink_to(tmp_path / "elsewhere" / "old")
    (run / "step_000001").symlink_to(tmp_path / "elsewhere")
    restore_interrupted_saves(run)
    assert sorted(path.name[:5] for path in run.iterdir()) == [".best", FILES[:5], "step_"]
    assert (tmp_path / "elsewhere" / "old" / "weights").exists()


def test_a_rename_that_fails_brings_the_old_folder_back(tmp_path, monkeypatch):
    own = OwnFiles(tmp_path)
    save_folder(tmp_path / "best", lambda folder: model(folder, "one"), own)
    rename, calls = os.rename, []

    def fails_second(source, target, **options):
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", fails_second)
    with pytest.raises(KeyboardInterrupt):
        save_folder(tmp_path / "best", lambda folder: model(folder, "two"), own)
    assert (tmp_path / "best" / "weights").read_text() == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", FILES]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("metrics.jsonl", "pipe"),
        ("config.yaml", "folder"),
        ("last_failure.json", "socket"),
        ("realign.log", "dangling link"),
        (".hydra/x.yaml", "link to a device"),
    ],
)
def test_the_record_files_of_a_run_are_regular_files(tmp_path, name, kind):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    check_run_folder(tmp_path)
    OTHERS[kind](tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name}' is (not a regular file|a link to)"):
        check_run_folder(tmp_path)


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
