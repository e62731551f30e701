"""Run the three commands of the guide in sequence on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

from realign.config import build_experiment, compose
from realign.runtime import run
from tests.docs import pages
from tests.tiny import save_tiny

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "three-stages.md"
SHORT = {
    "experiment=sft": ["batch_prompts=2"],
    "experiment=reward_model": ["batch_prompts=4"],
    "experiment=ppo": ["batch_prompts=4", "interfaces.actor.generation.max_new_tokens=6"],
}


def test_each_stage_starts_from_what_the_one_before_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny(Path("MODEL"))
    rows = [{"prompt": f"{i} + 1 = ", "chosen": str(i + 1), "rejected": "no"} for i in range(20)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    commands = [words[1:] for words in pages.commands(GUIDE.read_text(encoding="utf-8"))]
    commands = [words for words in commands if words[0] not in ("chat", "export")]
    assert [words[0] for words in commands] == list(SHORT)
    trained = [4, 8, 8]  # number of training rows, of 20
    for words, n in zip(commands, trained, strict=True):
        experiment = build_experiment(compose([*words, *SHORT[words[0]], "steps=2", "save_every_steps=null"]))
        assert sum(map(len, experiment.data.tables())) == n
        assert run(experiment).history[-1]["step"] == 2
    left = sorted(str(folder.parent) for folder in Path("runs").rglob("model.safetensors"))
    assert left == [f"runs/{path}" for path in ("ppo/final/actor", "ppo/final/critic", "reward_model/final/reward")] + [
        "runs/sft/final/actor"
    ]
