from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import scaling
from benchmarks.batches import TrainStep
from benchmarks.peer.work import SCENARIOS

TINY = replace(SCENARIOS["tiny"], prompts=4)


@pytest.mark.slow
def test_all_tables_and_json(capsys, monkeypatch):
    monkeypatch.setattr(scaling, "BASE", TINY)
    monkeypatch.setattr(scaling, "COPIES", (1, 8))
    monkeypatch.setattr(scaling, "BUDGET", 256)
    monkeypatch.setattr(scaling, "OTHER_BUDGETS", (4096,))
    monkeypatch.setattr(scaling, "first_step", lambda: {"wall_s": 2.0, "cpu_s": 1.0})
    scaling.main(["repeats=1", f"threads={torch.get_num_threads()}"])
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert [row["tokens"] for row in report["cost"]] == [report["cost"][0]["tokens"] * n for n in (1, 8)]
    assert [(row["sequences"], row["budget"]) for row in report["memory"]] == [(8, 256), (64, 256), (64, 4096)]
    assert all(row["microbatch_tokens"] <= row["budget"] for row in report["memory"])
    assert set(report["start"]) == {"realign --help", "config composed", "first training step of the demo"}
    assert report["vocabulary"]["largest_of_logits"] < 1
    assert "vocabulary 32,000" in out


def test_memory_follows_the_budget_and_not_the_batch():
    peaks = {(r["sequences"], r["budget"]): r["peak_mib"] for r in scaling.memory(TINY, (2, 8), 256, (1024,))}
    # four times as many sequences; the fullest micro-batch is slightly fuller
    assert peaks[64, 256] < 1.5 * peaks[16, 256]
    assert peaks[64, 1024] > 2 * peaks[64, 256]


def test_a_tensor_of_tokens_times_words_is_found(monkeypatch):
    train = TrainStep.__call__

    def with_logits(self, batch, budget):
        torch.zeros(int(batch["loss_mask"].sum()), TINY.vocabulary)
        train(self, batch, budget)

    monkeypatch.setattr(TrainStep, "__call__", with_logits)
    with pytest.raises(AssertionError, match="a tensor of"):
        scaling.vocabulary(TINY, 8, 4096)


def test_a_start_is_timed_to_its_end_or_until_something_holds(tmp_path):
    assert scaling.child([sys.executable, "-c", "pass"])["wall_s"] > 0
    with pytest.raises(RuntimeError, match=r"failed: .*no such thing"):
        scaling.child([sys.executable, "-c", "raise SystemExit('no such thing')"])
    mark = tmp_path / "mark"
    waits = f"import pathlib, time; pathlib.Path({str(mark)!r}).touch(); time.sleep(60)"
    assert scaling.child([sys.executable, "-c", waits], until=mark.exists)["wall_s"] < 50
    with pytest.raises(RuntimeError, match="failed"):
        scaling.child([sys.executable, "-c", "pass"], until=lambda: False)
    with pytest.raises(RuntimeError, match="took more than 0 s"):
        scaling.child([sys.executable, "-c", waits], until=lambda: False, limit_s=0)
