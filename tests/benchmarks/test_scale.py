from __future__ import annotations

import json
import statistics

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.jobs import Job
from benchmarks.scale import __main__ as scale
from benchmarks.scale.picture import draw
from benchmarks.scale.rollouts import GROUP, PROMPTS, measured_rollout, predicted, reward_seconds, rollout_words, same
from benchmarks.scale.runtimes import measured_runtime, runtime_jobs, runtime_words
from benchmarks.scale.task import REWARD, SIGMA, TOKENS, prepare
from realign.config import compose
from realign.config.experiment import build_experiment
from realign.planning.simulator import Costs


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("scale") / "task")


def recorded(folder, rows, weight=1.0):
    (folder / "final" / "actor").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_file({"w": torch.tensor([weight])}, folder / "final" / "actor" / "model.safetensors")
    return Job(folder, [])


def test_every_run_is_a_valid_experiment(task, tmp_path):
    for words in (job.words for job in runtime_jobs(tmp_path, runtime_words(task, 3)).values()):
        assert build_experiment(compose(list(words))).steps == 3
    made = build_experiment(compose(rollout_words(task, 4, seed=2)))
    assert (made.seed, made.batch_prompts, made.interfaces["actor"].generation.n) == (2, PROMPTS, GROUP)


def test_a_runtime_is_measured_by_its_steps_after_the_first_two(tmp_path):
    rows = [
        {"step": i, "step_s": 9.0 if i < 3 else 0.5, "time/a_wait_s": 0.01, "time/b_wait_s": 0.03} for i in (1, 2, 3, 4)
    ]
    one, base = recorded(tmp_path / "one", rows, 1.5), recorded(tmp_path / "base", rows[:3])
    found = measured_runtime(one, base)
    assert found == {"step_s": 0.5, "responses_per_s": 256.0, "hop_s": 0.02, "calls": 2, "difference": 0.5}


def test_rollouts_are_measured_where_the_pipeline_is_full(tmp_path):
    rows = [
        {"step": i, "seconds": s, "reward": i / 10, "staleness_head": 1.0}
        for i, s in enumerate((10, 12, 13, 14, 19), 1)
    ]
    job = recorded(tmp_path / "run", rows)
    assert measured_rollout([job], None)["step_s"] == pytest.approx(9 / 4)
    ahead = measured_rollout([job], 1)  # excludes the first two steps and the last
    assert ahead["step_s"] == pytest.approx(1.0)
    assert ahead["responses_per_s"] == pytest.approx(PROMPTS * GROUP)
    assert ahead["rewards"] == [pytest.approx(0.35)]


def test_the_seconds_of_a_reward_follow_from_the_prompt_and_have_a_mean_of_one(task, tmp_path):
    spent = {}
    exec(REWARD.format(sigma=SIGMA, tokens=TOKENS), spent)
    values = [spent["seconds"](f"{a}+{b}=") for a in range(10, 100) for b in range(10, 100)]
    assert statistics.fmean(values) == pytest.approx(1.0, rel=0.05)
    drawn = reward_seconds(Job(tmp_path, rollout_words(task, 2, seed=0)), 2)
    assert len(drawn) == 2 * PROMPTS
    assert set(drawn) <= set(values)
    # Only rewards take time: each step waits for its longest reward.
    report = predicted(Costs(0.0), Job(tmp_path, rollout_words(task, 2, seed=0)), None, 2)
    assert report.ends == pytest.approx([max(drawn[:PROMPTS]), max(drawn[:PROMPTS]) + max(drawn[PROMPTS:])])


def test_rewards_are_the_same_if_their_means_are_nearer_than_their_noise():
    assert same([0.9, 0.8, 1.0], [0.85, 0.95, 0.9])
    assert not same([0.9, 0.91, 0.92], [0.5, 0.51, 0.49])
    assert same([0.9], [0.9]) is None


def test_a_part_that_fails_does_not_keep_the_others_from_running(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(scale, "prepare", lambda folder: folder)

    def fails(folder, task, words):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(scale, "PARTS", {"one": fails, "two": lambda folder, task, words: {"good": True}})
    code = scale.main(["parts=one,two", f"folder={tmp_path}"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, result["good"], result["two"]["good"]) == (1, False, True)
    assert result["one"]["error"] == "RuntimeError: out of luck"
    with pytest.raises(SystemExit, match="unknown part 'three'; valid: one, two"):
        scale.main(["parts=three"])


def test_the_picture_is_drawn(tmp_path):
    row = {"step_s": 2.0, "predicted_s": 2.1, "curves": [[(3.0, 0.1), (5.0, 0.4)], [(3.5, 0.2), (5.2, 0.3)]]}
    draw({"synchronous": row, "asynchronous": row}, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
