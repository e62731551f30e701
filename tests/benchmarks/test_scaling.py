from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import scaling
from benchmarks.peer.work import SCENARIOS

TINY = replace(SCENARIOS["tiny"], prompts=4)


@pytest.mark.slow
def test_all_tables_and_json(capsys, monkeypatch):
    monkeypatch.setattr(scaling, "BASE", TINY)
    monkeypatch.setattr(scaling, "COPIES", (1, 8))
    monkeypatch.setattr(scaling, "BUDGET", 256)
    monkeypatch.setattr(scaling, "OTHER_BUDGETS", (4096,))
    scaling.main(["repeats=1", f"threads={torch.get_num_threads()}"])
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert [row["tokens"] for row in report["cost"]] == [report["cost"][0]["tokens"] * n for n in (1, 8)]
    assert [(row["sequences"], row["budget"]) for row in report["memory"]] == [(8, 256), (64, 256), (64, 4096)]
    assert all(row["microbatch_tokens"] <= row["budget"] for row in report["memory"])
