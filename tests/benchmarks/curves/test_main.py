from __future__ import annotations

import json

import pytest
from tokenizers import pre_tokenizers

from benchmarks.curves import __main__ as curves
from benchmarks.curves import runs, task
from realign.demo.sentiment import vocabulary
from realign.demo.tiny import build_tokenizer
from tests.tiny import tiny_model


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


def test_both_implementations_of_a_llama_are_equal_on_identical_samples(tmp_path, capsys):
    model, words = tmp_path / "model", vocabulary()
    tiny_model("llama", vocab_size=2 + len(words)).save_pretrained(model)
    build_tokenizer(words, split=pre_tokenizers.Whitespace()).save_pretrained(model)
    given = ["parts=smollm2", f"model={model}", f"folder={tmp_path}", f"images={tmp_path}"]
    given += ["seeds=1", "steps=3", "batch=8", "lr=1e-3"]
    curves.main(given)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])["smollm2"]["1"]
    assert report["weight_moved"] > 1e-3
    assert report["metric_difference"] < 1e-5
    assert report["weight_difference"] < 1e-5
    assert report["scores_that_differ"] == 0
    assert (tmp_path / "curves_smollm2_1.png").read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "model" / "config.json").unlink()
    curves.main(given)  # from the records
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["smollm2"]["1"] == report
