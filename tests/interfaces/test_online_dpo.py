from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample, stat_values
from realign.config import build_experiment, compose
from realign.interfaces.dpo import DPOInterface, DPOLoss
from realign.interfaces.online_dpo import OnlineDPOInterface, best_and_worst
from realign.runtime import run
from realign.testing import BigramEngine, random_batch
from tests.tiny import save_tiny

FOUR = GenerationConfig(n=4)


def grouped(*groups: list[float]) -> tuple[torch.Tensor, SequenceSample]:
    """Return rewards, and responses of one token after a prompt of one token."""
    ids = [[[1, 2 + j] for j in range(len(group))] for group in groups]
    data = SequenceSample.from_sequences([f"p{i}" for i in range(len(groups))], {"input_ids": ids})
    data = data.with_tokens(loss_mask=torch.arange(2 * sum(map(len, groups))) % 2 == 1)
    return torch.tensor([x for group in groups for x in group], dtype=torch.float64), data


def test_the_best_and_the_worst_of_each_prompt_are_selected_if_they_differ():
    nan = math.nan
    rewards, data = grouped([1, 3, 2], [2, 2], [nan, 1], [nan, 0, -1, nan], [5, 1, 1, 5], [math.inf, 1])
    best, worst = best_and_worst(rewards, data)
    # ties go to the first; equal, missing and single rewards select nothing
    assert best.nonzero()[:, 0].tolist() == [1, 8, 11]
    assert worst.nonzero()[:, 0].tolist() == [0, 9, 12]


@pytest.mark.parametrize(
    "settings", [{}, {"kind": DPOLoss.ipo}, {"reference_free": True, "sft_coef": 1.0, "temperature": 0.7}], ids=str
)
def test_a_step_is_dpo_on_the_best_and_the_worst_response_of_each_prompt(settings):
    batch = random_batch(4, n_prompts=8)
    data = batch.select(["input_ids", "loss_mask", "rewards", "ref_logprobs"])
    rows, labels = [], []
    starts = np.concatenate([[0], np.cumsum(data.lengths["input_ids"].counts)])
    tokens = [int(m.sum()) for m in data.sequences("loss_mask")]
    for start, end in pairwise(starts.tolist()):
        chosen_pairs = [(float(data["rewards"][s]), -s) for s in range(start, end) if tokens[s]]
        chosen_pairs = [pair for pair in chosen_pairs if math.isfinite(pair[0])]
        if chosen_pairs and max(chosen_pairs)[0] > min(chosen_pairs)[0]:
            best = -max(chosen_pairs)[1]
            worst = -max(pair for pair in chosen_pairs if pair[0] == min(chosen_pairs)[0])[1]
            rows += sorted([best, worst])
            labels += [float(s == best) for s in sorted([best, worst])]
    assert len(rows) >= 6
    pairs = data.take_sequences(rows).with_sequences(labels=torch.tensor(labels))
    online, offline = BigramEngine(), BigramEngine()
    chosen_pairs = OnlineDPOInterface(generation=FOUR, **settings).train_step(
        Model("actor", online), data, MicroBatchSpec()
    )
    wanted = DPOInterface(**settings).train_step(Model("actor", offline), pairs, MicroBatchSpec())
    torch.testing.assert_close(online.logits_VV, offline.logits_VV, rtol=0, atol=1e-12)
    chosen_pairs, wanted = stat_values(chosen_pairs), stat_values(wanted)
    assert chosen_pairs.pop("selected_prompts") == pytest.approx(len(rows) / 2 / len(data))
    assert chosen_pairs.pop("selected_reward") == pytest.approx(1)
    assert chosen_pairs == pytest.approx(wanted)


def test_without_a_prompt_whose_rewards_differ_nothing_is_trained():
    rewards, data = grouped([1, 1], [2, 2])
    data = data.with_sequences(rewards=rewards).with_tokens(ref_logprobs=torch.zeros(8))
    engine = BigramEngine()
    before = engine.logits_VV.clone()
    stats = stat_values(OnlineDPOInterface().train_step(Model("actor", engine), data, MicroBatchSpec()))
    assert torch.equal(engine.logits_VV, before)
    assert stats == {"selected_prompts": 0}


@pytest.mark.parametrize("preset", [None, "simpo"])
def test_the_shipped_experiment_raises_the_reward_of_a_tiny_model(preset, tmp_path):
    """The reward counts a letter, so more is better without bound."""
    data, judge = tmp_path / "prompts.jsonl", tmp_path / "judge.py"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(8)))
    judge.write_text("def score(prompt, response, row):\n    return response.count('a') - len(response) / 100\n")
    settings = [f"models.actor.path={save_tiny(tmp_path / 'model')}", f"data.path={data}", "batch_prompts=8"]
    settings += [f"interfaces.reward.function={judge}:score", "interfaces.reward.workers=0", "steps=12"]
    settings += ["models.actor.optimizer.lr=3e-3", "models.actor.optimizer.schedule.warmup=0"]
    settings += ["interfaces.actor.generation.max_new_tokens=6", "interfaces.actor.generation.n=8"]
    settings += [f"output_dir={tmp_path / 'run'}", *([f"algorithm={preset}"] if preset else [])]
    history = run(build_experiment(compose(["experiment=online_dpo", *settings]))).history
    rewards = [record["reward"] for record in history if "reward" in record]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
