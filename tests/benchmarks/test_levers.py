from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import levers
from benchmarks.peer.work import SCENARIOS

TINY = replace(SCENARIOS["tiny"], prompts=3, group=4)


@pytest.mark.slow
def test_every_lever_is_measured_on_the_same_work(capsys, monkeypatch):
    monkeypatch.setitem(levers.SCENARIOS, "tiny", TINY)
    levers.main(["scenarios=tiny", "repeats=1", f"threads={torch.get_num_threads()}"])
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert [row["lever"] for row in report["levers"]] == list(levers.LEVERS)
    assert all(row["on_s"] > 0 and row["off_s"] > 0 for row in report["levers"])
    assert all(lever.what in out for lever in levers.LEVERS.values())
