"""The study of self-distillation runs on a tiny model."""

from __future__ import annotations

import pytest

from benchmarks import self_distillation as study
from benchmarks.real_curves.__main__ import read
from tests.data.text_tokenizer import make_tokenizer
from tests.tiny import tiny_model


@pytest.mark.slow
def test_a_run_of_a_tiny_model_is_recorded_once(reasoning_package, tmp_path, capsys):
    model, results = tmp_path / "model", tmp_path / "results.jsonl"
    tiny_model("llama", max_position_embeddings=1024).save_pretrained(model)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    make_tokenizer(chat_template=template).save_pretrained(model)
    words = [f"model={model}", f"folder={tmp_path / 'study'}", f"results={results}", f"picture={tmp_path / 'x.png'}"]
    words += ["runs=answer,form", "seeds=1", "steps=2", "batch=2", "held_out=4", "jobs=2"]
    assert study.main(words) == 0
    records = {record["kind"]: record for record in read(results)}
    assert set(records) == {"answer", "form"}
    assert all(value > 0 for value in records["answer"]["divergence"])
    assert list(records["answer"]["held_out"]) == ["0", "1", "2"]
    assert not (tmp_path / "study" / "answer_0" / "final").exists()
    shown = capsys.readouterr().out
    assert study.main(words) == 0  # nothing is missing
    assert len(read(results)) == 2
    assert study.table(read(results)) in shown
    with pytest.raises(SystemExit, match="unknown run 'x'; valid: answer"):
        study.main(["runs=x"])
