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


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "qwen2"])
def test_the_chain_from_sft_to_ppo_needs_no_tokenizer_flag(tmp_path, pairs, family, recwarn):
    """With qwen2, transformers alone reads the tokenizer as Qwen's, which drops blanks and newlines."""
    model, data = save_tiny(tmp_path / "model", family), f"data.path={pairs}"
    sft, reward, ppo = (tmp_path / name for name in ("sft", "reward", "ppo"))
    stage(
        sft,
        "experiment=sft",
        f"models.actor.path={model}",
        data,
        "data.response_column=chosen",
    )
    stage(reward, "experiment=reward_model", f"models.reward.path={sft}/final/actor", data)
    stage(
        ppo,
        "experiment=ppo",
        f"models.actor.path={sft}/final/actor",
        f"models.reward.path={reward}/final/reward",
        data,
        "interfaces.actor.generation.max_new_tokens=8",
        "interfaces.actor.n_minibatches=1",
    )
    for folder in (sft / "final/actor", reward / "final/reward", ppo / "final/actor", ppo / "final/critic"):
        assert AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"] == tiny_tokenizer()(TEXT)["input_ids"]
    assert not [w for w in recwarn if "tokeniz" in str(w.message)]


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
