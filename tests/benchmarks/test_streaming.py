from __future__ import annotations

import json

import pytest

from benchmarks import streaming


@pytest.mark.parametrize(("most_mb", "code"), [("4000", 0), ("-1", 1)])
def test_the_benchmark_resumes_with_the_same_rows_and_fails_above_the_limit_of_memory(capsys, most_mb, code):
    words = ["gigabytes=0.0002", "batches=3", "batch=16", "buffer=32", f"most_mb={most_mb}"]
    assert streaming.main(words) == code
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["rows"] >= 150
    assert report["resumed_rows_are_the_same"]
