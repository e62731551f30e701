from __future__ import annotations

import json

import pytest

from benchmarks.curves import __main__ as curves
from benchmarks.curves import runs, task


@pytest.mark.slow
def test_the_study_runs_and_reuses_its_records(tmp_path, capsys):
    words = [f"folder={tmp_path}", f"images={tmp_path}", "seeds=2", "steps=2", "widths=32"]
    for width in (32, 64):
        task.prepare(tmp_path / f"task_{width}", width=width, rows=400, steps=5)
    curves.main(words)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report["match"]["sentiment"]["agreement"]) == set(runs.CURVES)
    assert [row[0] for row in report["adam"]["first update"]] == list(runs.TABLE)
    for name in ("match", "adam", "temperature"):
        assert (tmp_path / f"curves_{name}.png").read_bytes()[:4] == b"\x89PNG"
    for path in (tmp_path / "task_32", tmp_path / "task_64"):
        (path / "texts.jsonl").unlink()
    curves.main(words)
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["match"] == report["match"]
