from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.demos.launch import Demo
from examples.demos.rlhf import RUNS, experiments, main
from realign.demo.sentiment import prepare

SMALL = [
    *("sft.steps=4", "sft.batch_prompts=16", "sft.evaluation.reward.workers=0"),
    *("reward.steps=4", "reward.batch_prompts=8", "reward.calibration.samples=16"),
    *("steps=2", "batch_prompts=8", "interfaces.actor.generation.n=2", "evaluation.reward.workers=0"),
]


@pytest.fixture
def small(monkeypatch):
    """Reduce the data of the task."""

    def few(folder: Path, **settings):
        return prepare(folder, **settings, demonstrations=64, pairs=32, held_out_pairs=8, held_out=8)

    monkeypatch.setattr("examples.demos.rlhf.prepare", few)


def parsed(*arguments: str) -> Demo:
    return Demo.parse(arguments, name="rlhf", runs=RUNS)


@pytest.mark.slow
def test_the_demo_ends_with_a_table_a_picture_and_a_line_of_json(small, tmp_path, capsys):
    assert main([f"output_dir={tmp_path / 'demo'}", "seed=3", *SMALL]) == 0
    printed = capsys.readouterr().out.splitlines()
    last = json.loads(printed[-1])
    assert last["seed"] == 3
    assert last["reward_gap"] == pytest.approx(last["learned_reward"] - last["gold_reward"], abs=2e-4)
    assert last["gold_before"] != last["gold_after"]
    assert 0 <= last["reward_model_accuracy"] <= 1
    assert last["own_accuracy_before"] <= 1
    assert last["kl"] >= 0
    assert Path(last["curves"]).read_bytes()[:4] == b"\x89PNG"
    assert any("gap: learned - gold" in line for line in printed)
    assert {p.name for p in (tmp_path / "demo").iterdir()} == {
        "files.jsonl",
        "task",
        "sft",
        "reward",
        "ppo",
        "rlhf.png",
        "results.json",
    }
    samples = (tmp_path / "demo" / "ppo" / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 2 * 8 * 2  # all responses of all steps


def test_the_policy_trains_on_the_learned_reward_and_is_judged_by_the_lexicon():
    sft, reward, ppo = experiments(parsed("seed=5", "reward.steps=7", "steps=9"))
    assert [run.seed for run in (sft, reward, ppo)] == [5, 5, 5]
    assert (reward.steps, ppo.steps) == (7, 9)
    assert type(ppo.interfaces["reward"]).__name__ == "RewardModelInterface"
    assert ppo.evaluation.reward.function == sft.evaluation.reward.function == "realign.rewards.sentiment:compound"
    assert ppo.models["reward"].path == ppo.models["critic"].path == str(reward.output_dir / "final" / "reward")
    start = str(sft.output_dir / "final" / "actor")
    assert {ppo.models["actor"].path, ppo.models["ref"].path, reward.models["reward"].path} == {start}
    assert ppo.sample_prompts == ppo.batch_prompts


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("stepz=2", "stepz"),
        ("reward.stepz=2", "stepz"),
        ("evaluation=null", "evaluation=null: the demo needs the evaluations"),
        ("sample_prompts=0", "sample_prompts"),
    ],
)
def test_a_mistake_is_found_before_an_earlier_result_is_touched(tmp_path, capsys, wrong, message):
    earlier = tmp_path / "ppo" / "metrics.jsonl"
    earlier.parent.mkdir()
    earlier.touch()
    assert main([f"output_dir={tmp_path}", wrong]) == 2
    assert message in capsys.readouterr().err
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [earlier]
