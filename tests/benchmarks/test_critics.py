from __future__ import annotations

import json

import pytest
from rich.console import Console

from benchmarks import critics


def test_numbers_are_means_over_the_first_and_last_steps(tmp_path):
    records = [{"step": 0, "eval/reward": 0.1}]
    for step in range(1, 26):
        records.append(
            {"step": step, "reward": step, "ref_kl_per_sequence": 2 * step, "critic/explained_variance": step / 100}
        )
    records[-1]["eval/reward"] = 0.7
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert critics.numbers(file) == pytest.approx(
        {
            "gold_before": 0.1,
            "gold_after": 0.7,
            "learned_reward": 20.5,
            "kl": 41.0,
            "explained_first": 0.055,
            "explained_last": 0.205,
        }
    )


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
