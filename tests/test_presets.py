"""Run recipes end to end on tiny models: generation, scores, values, advantage estimation and both updates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from realign.config import build_experiment, compose
from realign.runtime import run
from realign.runtime.local import LocalRuntime
from tests.tiny import save_tiny

OWN = ["ppo", "deepspeed_chat", "openrlhf_ppo", "instructgpt", "llama2_chat", "qwen_rlhf", "secrets_of_rlhf"]
"""Recipes with a separate critic, trained in addition to the actor."""
AREAL = ["areal_ppo", "areal_decoupled"]
"""Recipes of AReaL's first generation: several responses per prompt, scored by a function."""
QUICK = ("ppo", "instructgpt", "lm_human_preferences", "trlx_ppo", "areal_decoupled", "lm_human_preferences_reward")
"""Recipes that differ most in what they train."""


def marked(*names: str) -> list[Any]:
    """Return recipes, all slow except for the quick ones."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Write a policy, a reward model and prompts of several lengths."""
    root = tmp_path_factory.mktemp("models")
    prompts, text, reward = root / "prompts.jsonl", root / "text.jsonl", root / "some_reward.py"
    words = ["A cat. the dog sat. so it is.", "One. and two. and three", "It is. 1 + 1 = 2. why?", "So. well. no. yes."]
    ends = [" " * (i % 3) + "x" * (i % 5) + "\n" for i in range(24)]  # the queries of cnndm end with a line break
    rows = [{"prompt": words[i % 4] + ends[i], "text": words[i % 4] * 3} for i in range(24)]
    for path in (prompts, text):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text("def score(prompt, response, row):\n    return response.count('a') + len(response) / 7\n")
    return {
        "actor": save_tiny(root / "actor"),
        "reward": save_tiny(root / "reward", head="score", seed=1),
        "prompts": prompts,
        "text": text,
        "function": f"{reward}:score",
    }


def small(name: str, folders: dict, out: Path, *more: str) -> list[str]:
    learned = name not in ("trlx_ppo", *AREAL)
    data = {"data.path": folders["prompts"]}
    if name == "instructgpt":
        data = {"data.prompts.path": folders["prompts"], "data.pretraining.path": folders["text"]}
        data |= {"data.pretraining.block_tokens": 16, "data.sequences_per_prompt": 2}
    given = {
        "experiment": name,
        "models.actor.path": folders["actor"],
        "models.reward.path" if learned else "interfaces.reward.function": folders["reward" if learned else "function"],
        **data,
        "output_dir": out,
        "steps": 2,
        "batch_prompts": 16,
        "interfaces.actor.generation.max_new_tokens": 20,
    }
    return [*(f"{key}={value}" for key, value in given.items()), *more]


def trained(name: str, folders: dict, out: Path, *more: str) -> dict[str, float]:
    """Train for two steps, apply the checks for all recipes, and return the metrics of the last step."""
    result = run(build_experiment(compose(small(name, folders, out, *more))))
    assert [r["step"] for r in result.history] == [0, 1, 2]
    last = result.history[-1]
    assert last["optimizer_steps"] > 0
    assert last["skipped_steps"] == 0
    first = next(r for r in result.history if "first_logprob_diff_max" in r)
    assert first["first_logprob_diff_max"] < 1e-4
    assert {"reward", "policy_loss", "clip_fraction", "approx_kl", "ref_kl_per_sequence", "kl_coef"} <= last.keys()
    assert (out / "final" / "actor" / "model.safetensors").exists()
    return last


@pytest.mark.parametrize("name", marked(*OWN))
def test_a_recipe_with_a_critic_runs_end_to_end(name, folders, tmp_path):
    more = ["interfaces.actor.critic_warmup_steps=1"] if name == "qwen_rlhf" else []
    last = trained(name, folders, tmp_path / "run", *more)
    assert {"critic/value_loss", "critic/optimizer_steps", "critic/return_mean"} <= last.keys()
    assert (tmp_path / "run" / "final" / "critic" / "model.safetensors").exists()
    averaged = name in ("deepspeed_chat", "instructgpt")
    assert (tmp_path / "run" / "final" / "actor_ema" / "model.safetensors").exists() == averaged
    assert ("ptx_nll" in last) == (name == "instructgpt")
    assert [json.loads(x)["step"] for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_lm_human_preferences_step_by_step(folders, tmp_path):
    """Check fixed lengths, scores of the cut text, the penalty, the learning rate per rollout batch, and the KL
    coefficient."""
    overrides = small(
        "lm_human_preferences", folders, tmp_path / "run", "interfaces.actor.generation.max_new_tokens=24"
    )
    runtime = LocalRuntime(build_experiment(compose(overrides)))
    first, batch = runtime.step(1)
    assert set(batch["loss_mask"].long().split(batch.lengths["input_ids"].flat.tolist())[0].tolist()) == {0, 1}
    sampled = [int(m.sum()) for m in batch.sequences("loss_mask")]
    assert set(sampled) == {24}
    full_stop = runtime.models["actor"].tokenizer.convert_tokens_to_ids(".")
    rows = zip(batch.sequences("input_ids"), batch.sequences("loss_mask"), batch["rewards"].tolist(), strict=True)
    for ids, mask, reward in rows:
        response = ids[mask][16:].tolist()
        assert (reward == -1.0) == (full_stop not in response)
    assert (batch["values"] == 0).all()  # the initial value head is zero
    assert (first["lr"], first["kl_coef"]) == pytest.approx((1e-5, 0.15))
    second, batch = runtime.step(2)
    assert second["lr"] == pytest.approx(0.5e-5)
    assert (batch["values"] != 0).any()
    assert second["kl_coef"] == pytest.approx(0.15 * (1 - 0.2 * 16 / 10_000))  # far below the target of 6 nats


def test_trlx_trains_two_layers_and_keeps_the_reference(folders, tmp_path):
    runtime = LocalRuntime(build_experiment(compose(small("trlx_ppo", folders, tmp_path / "run"))))
    module = runtime.models["actor"].engine.module
    before = {name: p.clone() for name, p in module.named_parameters()}
    first, _ = runtime.step(1)
    moved = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert any("layers.1." in name for name in moved)
    assert any("layers.2." in name for name in moved)
    assert not any("layers.0." in name or "embed" in name for name in moved)
    second, _ = runtime.step(2)
    assert first["ref_kl_per_sequence"] == pytest.approx(0, abs=1e-4)
    assert abs(second["ref_kl_per_sequence"]) > 1e-4


REWARD = ["lm_human_preferences_reward", "lm_human_preferences_reward_cnndm", "lm_human_preferences_reward_tldr"]
"""Recipes of the reward models of openai/lm-human-preferences."""


@pytest.mark.parametrize("name", marked(*REWARD))
def test_a_reward_model_of_lm_human_preferences_is_calibrated_before_and_after_training(name, folders, tmp_path):
    labels, steps = tmp_path / "labels.jsonl", 3
    responses = ["a cat.", "the dog sat", "so it is.", "why?"]
    rows = [
        {"prompt": f"{i}. one. two", "responses": responses, "labels": [int(j == i % 4) for j in range(4)]}
        for i in range(12)
    ]
    labels.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "models.reward.path": folders["actor"],
        "data.path": labels,
        "calibration.data.path": folders["prompts"],
        "steps": steps,
        "batch_prompts": 4,
        "calibration.samples": 32,
        "calibration.batch_prompts": 16,
        "calibration.verify": "true",
        "output_dir": tmp_path / "run",
    }
    experiment = build_experiment(compose([f"experiment={name}", *(f"{key}={value}" for key, value in given.items())]))
    result = run(experiment)
    rate = experiment.models["reward"].optimizer.lr
    assert result.series("lr") == pytest.approx([rate, rate * 2 / 3, rate / 3])
    calibrated = [record for record in result.history if "calibration/gain" in record]
    assert [record["step"] for record in calibrated] == [0, steps]
    assert calibrated[0]["calibration/verified_std"] == pytest.approx(1, abs=0.5)
    state = json.loads((tmp_path / "run" / "final" / "reward" / "interface_state.json").read_text())
    assert state["gain"] == pytest.approx(calibrated[1]["calibration/gain"])
    assert state["bias"] == pytest.approx(calibrated[1]["calibration/bias"])
