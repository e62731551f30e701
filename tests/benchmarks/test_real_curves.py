"""The study of real curves runs, and its page shows what its results file contains."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.real_curves import __main__ as study
from benchmarks.real_curves.report import groups, table
from benchmarks.real_curves.runs import RUNS, execute, overrides
from benchmarks.real_curves.tasks import prepare
from tests.data.text_tokenizer import make_tokenizer
from tests.tiny import tiny_model

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / study.DEFAULTS["results"]


def test_the_page_shows_the_tables_of_the_results():
    page = (REPOSITORY / "docs" / "studies" / "real-curves.md").read_text(encoding="utf-8")
    assert groups(study.read(RESULTS))
    assert table(study.read(RESULTS)) in page


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
