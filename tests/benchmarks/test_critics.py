from __future__ import annotations

import json

import pytest
from rich.console import Console

from benchmarks import critics


@pytest.mark.slow
def test_the_study_runs_and_goes_on_where_it_was_interrupted(tmp_path, capsys):
    words = ["seeds=3", f"output_dir={tmp_path}", "steps=2", "evaluation.every_steps=2", "evaluation.batch_prompts=32"]
    words += ["sft.steps=2", "reward.steps=2"]
    printed = []
    for _ in range(2):
        assert critics.main(words) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    found = json.loads(printed[0].splitlines()[-1])["3"]
    assert list(found) == list(critics.ARMS)
    starts = {arm["gold_before"] for arm in found.values()}
    assert len(starts) == 1  # all of them start from one policy
    assert len({arm["explained_first"] for arm in found.values()}) == 3
    table = Console(width=200, record=True)
    table.print(critics.report({0: found, 1: found}))
    assert "± 0.000" in table.export_text()
