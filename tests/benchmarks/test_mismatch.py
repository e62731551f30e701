"""The mismatch lab changes its sampler by what it says, resumes, and its page shows its results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import mismatch
from benchmarks.curves import task

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return the folder of the task, with a model that has learned nothing yet."""
    folder = tmp_path_factory.mktemp("task")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "_imitate", lambda *args, **kwargs: None)
        mismatch.prepare(folder)
    return folder


@pytest.mark.parametrize("correction", mismatch.CORRECTIONS)
def test_a_run_trains_with_every_correction(home, correction):
    run = mismatch.train(home, "int8", correction, 1, steps=1)
    assert run["score"] >= 0
    assert (run[mismatch.NATS] > 0) == (correction == "none")
    assert (run[mismatch.KL] > 0) == (correction not in ("none", "recompute"))


def test_the_page_shows_the_results():
    lines = (REPOSITORY / mismatch.DEFAULTS["results"]).read_text(encoding="utf-8").splitlines()
    page = (REPOSITORY / "docs" / "studies" / "mismatch.md").read_text(encoding="utf-8")
    table, left = mismatch.table([json.loads(line) for line in lines])
    assert table in page
    assert [fractions for fractions in left if not fractions] == []
