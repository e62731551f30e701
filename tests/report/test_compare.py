"""Test the table of `realign compare`."""

from __future__ import annotations

from rich.console import Console

from realign.report.compare import comparison


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
