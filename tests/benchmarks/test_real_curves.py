"""The study of real curves: its files, rewards, statistics, and that its page shows what its results file contains."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.real_curves import __main__ as study
from benchmarks.real_curves.report import COMPARED, CONSTANT, Share, draw, groups, share, table
from benchmarks.real_curves.runs import RUNS, SFT, execute, overrides
from benchmarks.real_curves.tasks import TASKS, best_constant, exact, first_verdict, prepare
from realign.config import build_experiment, compose
from tests.data.text_tokenizer import make_tokenizer
from tests.tiny import tiny_model

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / study.DEFAULTS["results"]


@pytest.mark.parametrize("name", TASKS)
def test_no_held_out_question_is_trained_on_or_shown(name, reasoning_package, tmp_path):
    prepare(name, tmp_path, held_out=4)
    train, held_out, shown = (
        study.read(tmp_path / f"{file}.jsonl") for file in ("train", "held_out", "demonstrations")
    )
    asked = {row["prompt"] for row in held_out}
    assert len(asked) == len(held_out) == 4
    assert train
    assert not asked & {row["prompt"] for row in train}
    assert not asked & {row["messages"][0]["content"] for row in shown}
    assert {row["messages"][1]["content"] for row in shown} <= {row["answer"] for row in train}


def test_answers_are_read_out_of_sentences(reasoning_package):
    def row(answer):
        return {"prompt": "?", "answer": answer, "task": "x", "metadata": {}}

    assert first_verdict("?", "no, yes", row("No")) == first_verdict("?", "I say YES.", row("Yes")) == 1
    assert first_verdict("?", "yes, no", row("No")) == first_verdict("?", "nothing", row("No")) == 0
    assert exact("?", " c, b, a\n", row("c, b, a")) == 1
    assert exact("?", "It is c, b, a", row("c, b, a")) == 0


def test_the_best_constant_answer_is_chosen_on_training_questions(reasoning_package):
    def rows(*answers):
        return [{"prompt": "?", "answer": answer, "task": "x", "metadata": {}} for answer in answers]

    best = best_constant("syllogisms", rows("Yes", "No", "Yes"), rows("No", "No", "Yes", "No"))
    assert best == {"task": "syllogisms", "constant": "Yes", "share": 0.25}


@pytest.mark.parametrize("name", ["sums_grpo_control_0", "sums_rloo_1", "sums_ppo_0", "reversal_sft_grpo_0", SFT])
def test_each_kind_of_run_builds(name, tmp_path):
    experiment = build_experiment(compose(overrides(RUNS[name], tmp_path, "model", steps=8)))
    assert experiment.seed == RUNS[name].seed
    assert set(experiment.models) == {"actor", *(["critic"] if "ppo" in name else [])}


def test_shares_by_hand():
    alone = share([0.2], questions=100)
    assert alone == Share(0.2, pytest.approx(0.04))
    seeds = share([0.1, 0.5], questions=100)  # the spread between runs is larger than that of the questions
    assert seeds == Share(pytest.approx(0.3), pytest.approx(0.2))
    gap = seeds.minus(alone)
    assert gap == Share(pytest.approx(0.1), pytest.approx(math.hypot(0.2, 0.04)))


def made(name, before, after):
    run = RUNS[name]
    held_out = {"0": before, "2": after}
    return {
        "run": name,
        "group": run.group,
        "task": run.task,
        "seed": run.seed,
        "held_out": held_out,
        "reward": [0.5] * 6,
    }


def test_table_and_picture_of_made_results(tmp_path):
    records = [
        {"task": "sums", "constant": "3", "share": 0.11},
        made("sums_grpo_1", 0.1, 0.5),
        made("sums_grpo_0", 0.1, 0.5),
        made("sums_grpo_control_0", 0.1, 0.1),
        made("sums_rloo_0", 0.1, 0.51),
        {"run": SFT, "held_out": {}},
    ]
    text = table(records)
    assert "| sums | GRPO | 2 | 10.0% ± 2.1% | 50.0% ± 3.5% |" in text
    assert "Best constant answers: sums '3' 11.0%." in text
    assert "| sums: GRPO minus control | +40.0 ± 4.1 | yes |" in text
    assert "| sums: GRPO minus best constant answer | +39.0 ± 4.2 | yes |" in text
    assert "| sums: RLOO minus GRPO | +1.0 ± 5.0 | no |" in text
    assert f"5 of {len(RUNS)} runs" in text
    assert "`sums_ppo_0`" in text.splitlines()[-1]
    draw(records, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_compared_groups_exist():
    assert {name for pair in COMPARED for name in pair} <= {*(run.group for run in RUNS.values()), CONSTANT}


def test_the_page_shows_the_tables_of_the_results():
    page = (REPOSITORY / "docs" / "studies" / "real-curves.md").read_text(encoding="utf-8")
    assert groups(study.read(RESULTS))
    assert table(study.read(RESULTS)) in page


def test_a_finished_run_is_kept_and_an_interrupted_one_is_not_recorded(
    reasoning_package, tmp_path, capsys, monkeypatch
):
    results = tmp_path / "results.jsonl"
    words = [f"folder={tmp_path / 'study'}", f"results={results}", f"picture={tmp_path / 'x.png'}", "model=any"]
    record = made("sums_grpo_0", 0.1, 0.3)
    answers = iter([None, dict(record)])  # at first, the minutes are over before the run ends
    monkeypatch.setattr(study, "execute", lambda *_: next(answers))
    for _ in range(3):
        assert study.main([*words, "runs=sums_grpo_0"]) == 0
    assert capsys.readouterr().out.count("Repeat the command to resume it") == 1
    constant, kept = study.read(results)
    assert constant["task"] == "sums"
    assert {key: kept[key] for key in record} == record
    with pytest.raises(SystemExit, match="unknown run 'x'; valid: sums_grpo_0"):
        study.main(["runs=x"])
    with pytest.raises(SystemExit, match=f"starts from {SFT}"):
        study.main([*words, "runs=reversal_sft_grpo_0"])


@pytest.mark.slow
def test_a_run_of_a_tiny_model_without_a_right_answer_is_a_record(reasoning_package, tmp_path):
    """A run without an optimizer step is an error elsewhere, and here a result."""
    model, files, run = tmp_path / "model", tmp_path / "tasks" / "reversal", RUNS["reversal_grpo_0"]
    tiny_model("llama").save_pretrained(model)
    make_tokenizer(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}").save_pretrained(model)
    prepare(run.task, files, held_out=4)
    words = [*overrides(run, tmp_path, str(model), steps=2), "interfaces.reward.known_answer=null"]
    assert execute(run, tmp_path, words, deadline=0) is None  # stopped while it starts
    record = execute(run, tmp_path, words, deadline=math.inf)
    assert record["reward"] == [0, 0]
    assert record["held_out"] == {"0": 0, "1": 0, "2": 0}
    assert not (tmp_path / run.name / "checkpoints").exists()
    with pytest.raises(RuntimeError, match="ended with exit code 2"):
        execute(RUNS["sums_grpo_0"], tmp_path, [*words, "steps=many"], deadline=math.inf)
