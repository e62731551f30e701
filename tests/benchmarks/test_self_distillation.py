"""The study of self-distillation: its prompts, its runs, and that its page shows what its results file contains."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import self_distillation as study
from benchmarks.real_curves.__main__ import read
from realign.config import build_experiment, compose
from tests.data.text_tokenizer import make_tokenizer
from tests.tiny import tiny_model

REPOSITORY = Path(__file__).parents[2]


def made(kind, seed, after):
    return {
        "run": f"{kind}_{seed}",
        "kind": kind,
        "seed": seed,
        "questions": 200,
        "held_out": {"0": 0.1, "2": after},
        "hinted": {"0": 0.9, "2": 0.9},
        "divergence": [0.5, 0.4],
    }


def test_only_the_hint_of_the_teacher_has_the_answer(reasoning_package, tmp_path):
    study.write_hints(tmp_path, 4)
    asked = {row["prompt"] for row in read(tmp_path / "held_out.jsonl")}
    for kind in study.HINTS:
        rows = read(tmp_path / f"train_{kind}.jsonl")
        assert not asked & {row["prompt"] for row in rows}
        for row in rows:
            example, answer, question = (message["content"] for message in row["teacher_prompt"])
            assert example.split("\n")[0] not in asked
            assert answer in example.replace("Hint: t", "T")
            text, _, hint = question.partition("\nHint: ")
            assert text == row["prompt"]
            assert hint == "" if kind == "form" else hint.startswith("the answer is ")
            assert kind != "answer" or hint == f"the answer is {row['answer']}."
        for row in read(tmp_path / f"held_out_{kind}.jsonl"):
            assert row["prompt"][-1]["content"].partition("\n")[0] in asked
    shuffled = read(tmp_path / "train_shuffled.jsonl")
    wrong = [not row["teacher_prompt"][-1]["content"].endswith(f" {row['answer']}.") for row in shuffled]
    assert sum(wrong) > len(wrong) / 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_runs_build(device, tmp_path):
    words = {**study.DEFAULTS, "folder": str(tmp_path), "device": device}
    experiment = build_experiment(compose(study.overrides("answer", 3, "model", words)))
    assert experiment.seed == 3
    assert set(experiment.models) == {"actor", "teacher"}


def test_table_and_picture_of_made_results(tmp_path):
    records = [made("form", 0, 0.2), made("answer", 1, 0.5), made("answer", 0, 0.5)]
    text = study.table(records)
    assert "| the answer | 2 | 10.0% ± 2.1% | 50.0% ± 3.5% | 90.0% ± 2.1% | 90.0% ± 2.1% |" in text
    assert text.index("the answer") < text.index(study.KINDS["form"].title)
    study.draw(records, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


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
