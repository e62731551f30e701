from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import cluster
from benchmarks.cluster import Case, best, measure, roofline, slots
from realign.planning.options import Accelerator, Assumed
from realign.planning.simulator import NetworkSizes, Tail, Work

DEVICE = Accelerator(flops=100.0, bandwidth=10.0, memory=1000.0, link=4.0)
NETWORK = NetworkSizes(weights=50.0, layers=1, kv_heads=1, head_size=1)
ASSUMED = Assumed(0.5, 0.25, 1.0, 2.0, 3.0, 0.5, 6.0, 2.0, slots=7)


def test_a_roofline_by_hand():
    found = roofline(2, 3, DEVICE, NETWORK, ASSUMED)
    assert found.decode_step_s == pytest.approx(1 + 100 / 5)  # 50 weights of two bytes, at half of bandwidth 10
    # two operations per weight, at 25 operations per second
    assert found.decode_row_s == found.prefill_token_s == pytest.approx(100 / 25)
    assert found.decode_context_s == pytest.approx(4 / 5)  # one key and one value of two bytes
    assert found.train_token_s == pytest.approx(8 * 50 / (25 * 3))
    assert (found.train_step_s, found.sync_s) == (2.0, pytest.approx(3 + 100 / 2))
    for bound, sync_s in ((0, found.sync_s), (None, 0.0)):  # staleness 0; colocated weights need no transfer
        other = roofline(bound, 3, DEVICE, NETWORK, ASSUMED)
        assert other.train_token_s == pytest.approx(6 * 50 / (25 * 3))
        assert other.sync_s == sync_s


def test_rows_are_limited_by_what_their_keys_and_values_take():
    work = Work(1, 1, 1, 10, Tail(20))
    assert slots(DEVICE, NETWORK, replace(ASSUMED, slots=99), work) == int((900 - 100) / (4 * 50))
    assert slots(DEVICE, NETWORK, replace(ASSUMED, slots=2), work) == 2


def test_the_best_split_is_chosen_for_each_number_of_devices_and_bound():
    row = {"devices": 8, "bound": 1, "tokens_per_s": 5, "share": 0.25}
    other = {**row, "tokens_per_s": 7, "share": 0.5}
    third = {**row, "bound": None, "tokens_per_s": 6}
    assert best([row, other, third]) == {(8, 1): other, (8, None): third}


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
