from __future__ import annotations

from pathlib import Path

import pytest

from realign.errors import ConfigError
from realign.runtime import run
from realign.runtime.output_folder import check_output_folder, clear_output_folder
from tests.runtime.test_step import experiment


def test_an_earlier_run_is_not_overwritten_unasked(tmp_path):
    run(experiment(tmp_path))
    with pytest.raises(ConfigError, match="contains an earlier run"):
        run(experiment(tmp_path))
    (tmp_path / "run" / "step_000002").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    run(experiment(tmp_path, overwrite=True))
    # files of the earlier run are not mistaken for those of this run
    assert not (tmp_path / "run" / "step_000002").exists()
    assert (tmp_path / "run" / "notes.txt").exists()


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
    made = experiment(tmp_path, resume=resume)
    save_model(made.output_dir / "final" / "actor")
    (made.output_dir / "metrics.jsonl").write_text("{}\n")
    if checkpoint:
        (made.output_dir / "checkpoints" / "step_000001").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=rf"^output_dir='.*': the folder {message}" if resume != "elsewhere" else message
    ):
        check_output_folder(made)
    check_output_folder(experiment(tmp_path, resume=resume, overwrite=True))


def save_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


def test_the_empty_folder_of_a_failed_save_holds_no_models_that_a_resume_would_replace(tmp_path):
    made = experiment(tmp_path, resume="auto")
    (made.output_dir / "final" / "actor").mkdir(parents=True)
    (made.output_dir / "metrics.jsonl").write_text("{}\n")
    check_output_folder(made)
    (made.output_dir / "final" / "actor").rmdir()
    check_output_folder(made)
    save_model(made.output_dir / "final" / "critic")
    with pytest.raises(ConfigError, match="would replace its models"):
        check_output_folder(made)


def test_clearing_a_folder_removes_the_files_of_a_run_and_no_others(tmp_path):
    for name in ("final", "step_000002", "checkpoints", "mine"):
        (tmp_path / name).mkdir()
    for name in ("metrics.jsonl", "curves.png", "notes.txt"):
        (tmp_path / name).write_text("x")
    clear_output_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "notes.txt"]
