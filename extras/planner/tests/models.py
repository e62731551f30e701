"""Experiments for the tests of planning: a folder with only the `config.json` of a model, and settings around it."""

from __future__ import annotations

import json
from pathlib import Path

from realign.config import compose
from realign.config.experiment import build_experiment
from realign_planner.options import PlanOptions
from realign_planner.workload import workload_of

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}


def write_model(folder: Path, **changes) -> Path:
    """Write the config of a model without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def words_for(folder: Path, *more: str, experiment: str = "grpo") -> list[str]:
    """Return the overrides of an experiment with the model in `folder`."""
    reward = [] if experiment == "ppo" else ["interfaces.reward.function=realign.rewards.arithmetic:exact_answer"]
    return [f"experiment={experiment}", f"models.actor.path={folder}", "data.path=x.jsonl", *reward, *more]


def built(words):
    return build_experiment(compose(words))


def load_for(folder: Path, *more: str, experiment: str = "grpo", **options):
    return workload_of(built(words_for(write_model(folder), *more, experiment=experiment)), PlanOptions(**options))
