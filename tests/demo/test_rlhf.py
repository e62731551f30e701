from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from realign.config import ConfigError
from realign.demo.launch import Demo
from realign.demo.rlhf import RUNS, agreement, compare, experiments, judged, main
from realign.demo.sentiment import prepare
from realign.errors import DataError


def sample(step: int, prompt: int, learned: float | None, gold: float) -> dict[str, object]:
    return {"step": step, "id": prompt, "prompt": "p", "response": str(gold), "reward": learned, "gold": gold}


def test_both_rewards_are_in_deviations_of_the_first_step():
    first = [sample(1, 0, 1.0, 0.0), sample(1, 0, 3.0, 0.5)]  # learned 2 +- 1, gold 0.25 +- 0.25
    second = [sample(2, 0, 4.0, 0.5), sample(2, 0, 6.0, 0.75)]  # learned 5, gold 0.625
    before, after = compare([first, second])
    assert before == {"step": 1, "learned": 0.0, "gold": 0.0, "gap": 0.0, "own_accuracy": 1.0}
    assert after == pytest.approx({"step": 2, "learned": 3.0, "gold": 1.5, "gap": 1.5, "own_accuracy": 1.0})


def test_agreement_counts_pairs_within_prompts_whose_gold_differs():
    # one agreeing pair, one disagreeing pair, and one pair with equal gold rewards
    one = [sample(1, 0, 1.0, 0.0), sample(1, 0, 2.0, 0.5), sample(1, 0, 0.0, 0.5)]
    other = [sample(1, 1, 5.0, 0.1), sample(1, 1, 5.0, 0.2)]  # equal learned rewards do not count as agreement
    assert agreement(one + other) == pytest.approx(1 / 3)
    assert agreement([sample(1, 0, 1.0, 0.0), sample(1, 1, 2.0, 0.5)]) is None


def test_the_file_is_read_step_by_step_and_judged(tmp_path):
    path = tmp_path / "samples.jsonl"
    rows = [sample(step, 0, reward, 0.5) for step, reward in ((1, 1.0), (1, None), (2, 2.0))]
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "gold"}) + "\n" for row in rows))
    steps = judged(path, lambda prompt, response, row: float(response) + row["step"])
    assert [[s["gold"] for s in step] for step in steps] == [[1.5], [2.5]]
    with pytest.raises(DataError, match="no response with both a learned and a gold reward"):
        judged(path, lambda prompt, response, row: None)


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

    monkeypatch.setattr("realign.demo.rlhf.prepare", few)


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


def test_the_control_shuffles_the_labels_of_training_pairs(monkeypatch, tmp_path):
    asked = []

    def stop(folder, **settings):
        asked.append(settings)
        raise ConfigError("enough")

    monkeypatch.setattr("realign.demo.rlhf.prepare", stop)
    for argument in ("shuffle=true", "shuffle=false"):
        assert main([f"output_dir={tmp_path}", argument]) == 2
    assert [settings["shuffle"] for settings in asked] == [True, False]


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


def test_without_vader_the_demo_names_the_extra(monkeypatch, tmp_path, capsys):
    from realign.rewards.sentiment import _analyzer

    _analyzer.cache_clear()
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    assert main([f"output_dir={tmp_path / 'demo'}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "demo").exists()
