from __future__ import annotations

from dataclasses import replace

from extras.planner.benchmarks import cluster
from extras.planner.benchmarks.cluster import Case, measure
from realign_planner.simulator import Tail


def test_a_case_gives_what_is_drawn(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "WORK", replace(cluster.WORK, batch_prompts=8, lengths=Tail(200, 0.8, 1000)))
    monkeypatch.setattr(cluster, "DEVICES", (8, 16))
    rows = [measure(case) for case in cluster.cases()]
    assert len(rows) == 2 * (1 + len(cluster.BOUNDS) * len(cluster.SPLITS))
    together = measure(Case(8, None))
    assert together in rows
    assert together["staleness"] == {"head": 0.0, "tail": 0.0, "max": 0.0}
    for row in rows:
        assert row["staleness"]["max"] <= (row["bound"] or 0)
        assert 0 < row["generating"] <= 1
        assert 0 < row["training"] <= 1
    assert cluster.show(rows).splitlines()[1].startswith("8 ")
    cluster.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
