"""Test the chain SFT, reward model, PPO: each stage starts from the folder of the previous one, without more flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from realign.config import build_experiment, compose
from realign.runtime import run
from tests.tiny import save_tiny, tiny_tokenizer

TEXT = "1 + 2\n= 3"
SHORT = ["steps=2", "batch_prompts=2", "checkpoint=null", "save_every_steps=null"]


@pytest.fixture
def pairs(tmp_path) -> Path:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{a} +\n{a} = ", "chosen": str(2 * a % 10), "rejected": "no"} for a in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stage(out: Path, *words: str):
    experiment = build_experiment(compose([*SHORT, f"output_dir={out}", *words]))
    result = run(experiment)
    assert [r["step"] for r in result.history] == [0, 1, 2]
    return experiment


def test_one_tokenizer_flag_serves_all_roles(tmp_path, pairs):
    """Neither the folder of the actor nor that of the reference contains a tokenizer."""
    model = save_tiny(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for file in model.glob("tokenizer*"):
        file.unlink()
    experiment = stage(
        tmp_path / "run",
        "experiment=dpo",
        f"models.actor.path={model}",
        f"models.actor.tokenizer={tmp_path / 'tokenizer'}",
        f"data.path={pairs}",
    )
    source = experiment.models["ref"].tokenizer_source("ref")
    assert source.path == str(tmp_path / "tokenizer")
    assert AutoTokenizer.from_pretrained(tmp_path / "run/final/actor")(TEXT)["input_ids"]
