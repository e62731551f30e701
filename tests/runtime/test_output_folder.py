"""Test the output folder of a run, and its lock."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from realign.errors import ConfigError, TransientError
from realign.own_files import FILES, OwnFiles
from realign.runtime import run
from realign.runtime.output_folder import CLAIMED, alone_in, check_output_folder, take_output_folder
from tests.toys import BigramModel, Prompts, experiment


def test_an_earlier_run_is_not_overwritten_unasked(tmp_path):
    run(experiment(tmp_path))
    with pytest.raises(ConfigError, match="did you mean 'actr'"):  # a mistake in a setting is not about the folder
        run(experiment(tmp_path, models={"actr": BigramModel()}))
    with pytest.raises(ConfigError, match="contains an earlier run"):
        run(experiment(tmp_path))
    made(tmp_path / "run", "step_000002/actor/weights")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    run(experiment(tmp_path, overwrite=True))
    # files of the earlier run are not mistaken for those of this run
    assert not (tmp_path / "run" / "step_000002").exists()
    assert (tmp_path / "run" / "notes.txt").exists()


def made(run: Path, name: str, text: str = "x") -> Path:
    """Write a file as a run does: its folder of models or checkpoint is listed before it has its name."""
    parts = name.split("/")
    own = OwnFiles(run / parts.pop(0)) if parts[0] in ("checkpoints", "start") else OwnFiles(run)
    if len(parts) == 1 or parts[0] == ".hydra":
        own.claim(name)
        file(run / name, text)
    elif parts[0] in ("calls", "tensorboard"):
        own.claim(parts[0])
        file(own.folder / parts[0] / parts[1], text)
    else:
        scratch = own.scratch(parts[0])
        file(scratch / "new" / Path(*parts[1:]), text)
        own.record(parts[0], scratch / "new")
        (scratch / "new").rename(own.folder / parts[0])
        scratch.rmdir()
    return run / name


def file(path: Path, text: str = "precious") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("resume", "checkpoint", "message"),
    [
        (None, False, r"contains an earlier run\. Choose another folder, or set overwrite=true\.$"),
        (
            None,
            True,
            r"contains an earlier run\. Continue that run with resume=auto, choose another folder, or set",
        ),
        ("auto", False, r"contains an earlier run without a checkpoint, and resume=auto would replace its models\."),
        (
            "elsewhere",
            True,
            r"contains an earlier run, and resume='elsewhere' starts a new one\. Choose another folder\.$",
        ),
    ],
)
def test_a_folder_with_an_earlier_run_is_an_error_that_says_what_to_do(tmp_path, resume, checkpoint, message):
    wanted = experiment(tmp_path, resume=resume)
    made(wanted.output_dir, "final/actor/config.json")
    made(wanted.output_dir, "metrics.jsonl", "{}\n")
    if checkpoint:
        (wanted.output_dir / "checkpoints" / "step_000001").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=rf"^output_dir='.*': the folder {message}" if resume != "elsewhere" else message
    ):
        check_output_folder(wanted)
    check_output_folder(experiment(tmp_path, resume=resume, overwrite=True))


def test_the_empty_folder_of_a_failed_save_holds_no_models_that_a_resume_would_replace(tmp_path):
    wanted = experiment(tmp_path, resume="auto")
    (wanted.output_dir / "final" / "actor").mkdir(parents=True)
    made(wanted.output_dir, "metrics.jsonl", "{}\n")
    check_output_folder(wanted)
    (wanted.output_dir / "final" / "actor").rmdir()
    check_output_folder(wanted)
    (wanted.output_dir / "final").rmdir()
    made(wanted.output_dir, "final/critic/config.json")
    with pytest.raises(ConfigError, match="would replace its models"):
        check_output_folder(wanted)


NAMES = (
    *CLAIMED[:-2],
    *("report.html", ".hydra/config.yaml", "calls/step_000001.safetensors", "tensorboard/events.out.tfevents.1.host.2"),
    *("final/actor/weights", "best/best.json", "step_000002/critic/deep/er/weights"),
    *("checkpoints/step_000003/state.json",),
)
"""A file under each name that a run, or a command on its folder, writes."""


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", [*NAMES, "checkpoints/llama/weights", "calls/contacts.csv", "tensorboard/a/b", FILES])
def test_a_file_that_no_run_wrote_is_neither_removed_nor_replaced(tmp_path, name, overwrite):
    wanted = experiment(tmp_path, overwrite=overwrite, resume=None)
    foreign = file(wanted.output_dir / name)
    with pytest.raises(ConfigError, match="is where a run writes, but no run wrote it") as caught:
        run(wanted)
    assert repr(name) in str(caught.value)
    assert [path for path in wanted.output_dir.rglob("*") if path.is_file()] == [foreign]
    assert foreign.read_text() == "precious"


def test_a_fresh_run_removes_every_file_of_an_earlier_one_and_nothing_else(tmp_path):
    wanted = experiment(tmp_path, overwrite=True)
    out, mine = wanted.output_dir, ["notes.txt", "mine/final/model", "step_5/optimizer.pt", "start/mine", "final.1/x"]
    for name in NAMES:
        if not name.startswith(".hydra"):  # the command that starts the run has written them
            made(out, name)
    made(out, "start/0123456789abcdef/config.json")
    for name in mine:
        file(out / name)
    check_output_folder(wanted)
    take_output_folder(wanted, fresh=True)
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == sorted(
        [*mine, FILES, f"start/{FILES}"]
    )


EDITS = {
    "final/actor/weights": lambda path: path.write_text("fine-tuned further"),
    "final/actor/README.md": lambda path: path.write_text("added"),
    "best/best.json": lambda path: (path.unlink(), path.symlink_to("/etc/hosts")),
    "step_000002/critic/deep/er/eval.json": lambda path: path.write_text("added"),
    "checkpoints/my_notes.txt": lambda path: path.write_text("added"),
    "checkpoints/step_000003/state.json": lambda path: path.write_bytes(b"y"),  # as long as before
    "calls/notes.txt": lambda path: path.write_text("added"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_a_user_changed_or_added_in_the_folders_of_a_run_stays(tmp_path, name):
    wanted = experiment(tmp_path, overwrite=True)
    out = wanted.output_dir
    for each in NAMES:
        made(out, each)
    os.utime(out / "checkpoints/step_000003/state.json", (1, 1))
    EDITS[name](out / name)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for act in (lambda: check_output_folder(wanted), lambda: take_output_folder(wanted, fresh=True)):
        with pytest.raises(ConfigError, match=r"or it was changed since|is a link to"):
            act()
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@dataclass
class Reads(Prompts):
    """Prompts with settings that name files."""

    path: object = None


@pytest.mark.parametrize("name", ["final/actor/weights", "samples.jsonl", "checkpoints/step_000003/state.json"])
@pytest.mark.parametrize("how", ["file", "folder", "relative", "link", "pattern", "list", "function"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_does_not_write_where_it_reads(tmp_path, monkeypatch, name, how, overwrite):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    path = made(out, name)
    (tmp_path / "link").symlink_to(out / name.split("/")[0])
    read = {
        "file": path,
        "folder": path.parent if "/" in name else path,
        "relative": f"run/../run/{name}",
        "link": tmp_path / "link",
        "pattern": f"{out}/**/{path.name}",
        "list": ["nowhere.jsonl", {"path": str(path)}],
        "function": f"run/{name}:score",
    }[how]
    wanted = experiment(tmp_path, overwrite=overwrite, data=Reads(path=read))
    with pytest.raises(ConfigError, match=r"^data\.path.*: the run reads this, and writes '"):
        run(wanted)
    assert path.read_text() == "x"


def test_models_of_the_session_remain_and_those_of_an_earlier_one_go(tmp_path):
    out = tmp_path / "run"
    for name in ("0123456789abcdef", "0123456789abcdee"):
        made(out, f"start/{name}/config.json")
    take_output_folder(experiment(tmp_path, data=Reads(path=out / "start" / "0123456789abcdef")), fresh=True)
    assert sorted(path.name for path in (out / "start").iterdir()) == ["0123456789abcdef", FILES]


def test_a_whole_folder_may_be_moved_or_copied_with_its_times(tmp_path):
    for name in NAMES:
        made(tmp_path / "earlier", name)
    shutil.copytree(tmp_path / "earlier", tmp_path / "run")
    check_output_folder(experiment(tmp_path, overwrite=True))
    for path in (tmp_path / "run").rglob("*"):  # as tar keeps them
        seconds = path.lstat().st_mtime_ns // 10**9
        os.utime(path, (seconds, seconds))
    check_output_folder(experiment(tmp_path, overwrite=True))


def test_a_run_killed_in_a_save_or_checkpoint_leaves_no_stranger(tmp_path):
    out = tmp_path / "run"
    for own in (OwnFiles(out), OwnFiles(out / "checkpoints")):
        file(own.scratch("step_000001") / "new" / "weights", "half")
        own.record("step_000002", next(own.folder.glob(".step_000001.*")))  # killed before the rename
    check_output_folder(experiment(tmp_path))
    take_output_folder(experiment(tmp_path), fresh=True)
    assert [path.name for path in out.iterdir()] == [FILES]


def test_a_folder_is_locked_by_one_run_and_free_afterward(tmp_path):
    with alone_in(tmp_path), alone_in(tmp_path.parent):
        for _ in range(2):
            with (
                pytest.raises(TransientError, match=f"output_dir={tmp_path}: another run"),
                alone_in(tmp_path),
            ):
                pass
    with pytest.raises(ZeroDivisionError), alone_in(tmp_path):
        1 / 0  # noqa: B018
    with alone_in(tmp_path):
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("changes", [{"resume": "auto"}, {"overwrite": True}, {}], ids=str)
def test_a_second_run_does_not_touch_the_records_of_the_first(tmp_path, changes):
    first = experiment(tmp_path, steps=1)
    first.output_dir.mkdir()
    with alone_in(first.output_dir):
        made(first.output_dir, "samples.jsonl", "precious\n")
        with pytest.raises(TransientError, match="another run is active"):
            run(experiment(tmp_path, steps=1, **changes))
    assert (first.output_dir / "samples.jsonl").read_text() == "precious\n"
    run(experiment(tmp_path, steps=1, **changes))


def test_a_run_locks_its_folder_from_start_to_end(tmp_path):
    held = []

    class Watcher:
        def log(self, step, metrics):
            with pytest.raises(TransientError, match="another run is active"), alone_in(tmp_path / "run"):
                pass
            held.append(step)

        def close(self):
            pass

    run(experiment(tmp_path, steps=2), trackers=[Watcher()])
    assert held == [0, 1, 2]
    with alone_in(tmp_path / "run"):
        pass
