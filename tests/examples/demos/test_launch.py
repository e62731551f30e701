"""Test the shared command line of the demos."""

from __future__ import annotations

import json
import sys

import pytest

from examples.demos import addition, rlhf
from examples.demos.launch import launch, remove_earlier
from realign.errors import ConfigError
from realign.own_files import FILES


@pytest.mark.parametrize("demo", [addition, rlhf])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_prints_the_usage_and_starts_nothing(demo, flag, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert demo.main(["seed=1", flag]) == 0
    out = capsys.readouterr().out
    assert "python -m examples.demos." in out
    assert "[seed=0]" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_results_are_in_a_file_and_only_programs_read_them_on_stdout(terminal, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "demo"
    folder.mkdir()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    code = launch(
        [f"output_dir={folder}"],
        name="toy",
        subject="nothing",
        runs=(),
        train=lambda demo, console: 3,
        show=lambda demo, console, results: {"seed": demo.seed, "accuracy": results},
        usage="",
    )
    assert code == 0
    line = (folder / "results.json").read_text(encoding="utf-8")
    assert json.loads(line) == {"seed": 0, "accuracy": 3}
    out = capsys.readouterr().out
    assert out.endswith(line) is not terminal
    assert "results.json" in out.replace("\n", "")
    remove_earlier(folder, set())
    assert [path.name for path in folder.iterdir()] == [FILES]
    (folder / "results.json").mkdir()
    (folder / "results.json" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not a file that realign wrote"):
        remove_earlier(folder, set())
    assert (folder / "results.json" / "notes.txt").exists()
