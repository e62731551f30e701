from __future__ import annotations

import json

import pytest

from benchmarks.jobs import Job
from benchmarks.scale.task import prepare
from extras.planner.benchmarks import accuracy


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("plan") / "task")


def record(job, step_s):
    """Write metrics of a run whose steps take as long as the function of prompts and tokens says."""
    words = dict(word.partition("=")[::2] for word in job.words)
    prompts, length = int(words["batch_prompts"]), 0
    for word in job.words:
        key, _, value = word.partition("=")
        length = int(value) if key.endswith("max_new_tokens") else length
    rows, tokens = prompts * accuracy.GROUP, prompts * accuracy.GROUP * length
    generate_s = length * (0.001 + 1e-4 * rows)
    made = []
    for step in range(1, int(words["steps"]) + 1):
        row = {"step": step, "step_s": step_s(rows, tokens) + generate_s, "time/actor_gen_s": generate_s}
        row |= {"seconds": step * row["step_s"], "time/reward_inf_s": 0.0}
        row |= {"rollout_tokens": tokens, "response_tokens": length, "tokens": tokens + 6 * rows}
        made.append(row)
    job.folder.mkdir(parents=True)
    (job.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return job


def test_the_benchmark_compares_predictions_with_runs(task, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accuracy, "prepare", lambda folder: task)
    monkeypatch.setattr(Job, "run", lambda job: record(job, lambda rows, tokens: 0.05 + 2e-4 * tokens))
    code = accuracy.main(["steps=4", "placements=one_process,torchrun", f"folder={tmp_path / 'runs'}"])
    out = capsys.readouterr().out.splitlines()
    report = json.loads(out[-1])
    assert out[0].split()[:4] == ["placement", "s/step", "predicted", "error"]
    assert abs(report["rows"]["one_process"]["error"]) < 0.05
    assert report["rows"]["torchrun"]["error"] < -0.25  # the second run was not faster
    assert (code, report["good"]) == (1, False)
    with pytest.raises(SystemExit, match="unknown placement 'two'; valid: one_process"):
        accuracy.main(["placements=two"])
