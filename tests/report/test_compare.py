"""Test the table of `realign compare`."""

from __future__ import annotations

import io
import json
import unicodedata

import pytest
from rich.console import Console

from realign.report.compare import comparison
from tests.report.conftest import HOSTILE_VALUES, hostile_files


def shown(tables) -> str:
    console = Console(width=160, record=True, color_system=None)
    for table in tables:
        console.print(table)
    return console.export_text()


def test_the_table_has_metrics_and_the_settings_that_differ(run_folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("metrics.jsonl", "summary.json", "run.json"):
        (other / name).write_bytes((run_folder / name).read_bytes())
    (other / "config.yaml").write_text("seed: 2\nsame: 1\n")
    third = tmp_path / "third"
    third.mkdir()
    (third / "metrics.jsonl").write_text('{"step": 3, "seconds": 1, "reward": 5}\n')
    (third / "config.yaml").write_text("seed: 3\nsame: 1\n")
    text = shown(comparison([run_folder, other, third]))
    assert "completed" in text
    assert "eval/reward" in text
    last = shown(comparison([other, third])).splitlines()
    assert any(line.split() == ["seed", "2", "3"] for line in last)
    assert not any(line.startswith("same") for line in last)


def test_texts_of_a_run_reach_neither_the_terminal_nor_markup(tmp_path):
    hostile = HOSTILE_VALUES["control characters"]
    for name in (f"one{hostile.replace('/', '')}", "two"):
        folder = tmp_path / name
        folder.mkdir()
        record = {"step": 1, "seconds": 1, hostile: 1.0, "x\x1b[2J": 2.0}
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        (folder / "run.json").write_text(
            json.dumps({"headline": [hostile], "attempts": [{"ended": "x", "status": hostile}]})
        )
        (folder / "config.yaml").write_text(json.dumps({hostile: f"{name[:3]} {hostile}", "list": [name[:3], hostile]}))
    stream = io.StringIO()
    console = Console(file=stream, width=400, force_terminal=True, color_system=None)
    for table in comparison(sorted(tmp_path.iterdir())):
        console.print(table)
    text = stream.getvalue()
    assert text.count("[/]\\x1b]0;pwn") >= 4  # the status of both runs, the name of a metric, and a setting
    assert not {c for c in text if unicodedata.category(c) in ("Cc", "Cf")} - {"\n"}


@pytest.mark.parametrize("kind", HOSTILE_VALUES)
def test_a_comparison_shows_runs_with_values_of_wrong_types(kind, run_folder, tmp_path):
    files = hostile_files(run_folder, HOSTILE_VALUES[kind])
    (tmp_path / "metrics.jsonl").write_text(files["metrics.jsonl"].splitlines()[-1])
    places = {name: files[name].splitlines()[1:] for name in ("run.json", "summary.json")}
    for i in range(0, max(map(len, places.values())), 5):
        for name, changed in places.items():
            (tmp_path / name).write_text(changed[i % len(changed)])
        assert "steps" in shown(comparison([tmp_path, tmp_path])[:1])
