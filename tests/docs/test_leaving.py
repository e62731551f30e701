"""Test that what realign saves is read elsewhere, by running the page that says how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from realign.cli.commands import main
from realign.data import PromptData
from tests.docs.pages import blocks
from tests.tiny import save_tiny

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "leaving.md"


@pytest.mark.slow
def test_the_page_takes_a_model_a_reward_model_and_data_elsewhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "tiny")
    pairs = [{"prompt": f"{i}", "chosen": " yes", "rejected": " no"} for i in range(4)]
    demonstrations = [{"prompt": f"{i}", "response": " yes"} for i in range(4)]
    prompts = [{"prompt": [{"role": "user", "content": f"{i}"}], "answer": str(i)} for i in range(4)]
    for name, rows in (("pairs", pairs), ("demonstrations", demonstrations), ("prompts", prompts)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = ["steps=1", "batch_prompts=4", "data.template=plain"]
    sft = ["experiment=sft", "models.actor.path=tiny", "data.path=demonstrations.jsonl", "output_dir=runs/sft"]
    scored = ["experiment=reward_model", "models.reward.path=tiny", "data.path=pairs.jsonl", "output_dir=runs/rm"]
    assert main([*sft, *common]) == 0
    assert main([*scored, *common]) == 0
    for block in blocks(PAGE.read_text(encoding="utf-8")):
        if block.language == "bash":
            assert all(main(line.split()[1:]) == 0 for line in block.code.splitlines())
        elif block.language == "py":
            exec(block.code, {})
    saved, exported = (AutoModelForCausalLM.from_pretrained(x) for x in ("runs/sft/final/actor", "my-model"))
    for name, weight in saved.state_dict().items():
        assert torch.equal(weight, exported.state_dict()[name])
    assert AutoModelForSequenceClassification.from_pretrained("my-reward-model").config.num_labels == 1
    assert PromptData(path="train.parquet")
