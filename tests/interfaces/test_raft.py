from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample, stat_values
from realign.config import build_experiment, compose
from realign.interfaces.components import SeqMeanTokenMean, SeqMeanTokenSum, TokenMean
from realign.interfaces.raft import RAFTActorInterface
from realign.runtime import run
from realign.testing import BigramEngine, random_batch
from tests.tiny import save_tiny
from tests.toys import READ, TOY, likelihood, rewards_of_training


def judged(rewards: list[list[float]], *, empty: tuple[int, ...] = ()) -> SequenceSample:
    """Return prompts "a", "b", ... of one token, with responses of two tokens. Those in `empty` have no sampled
    token."""
    n = sum(map(len, rewards))
    ids = [[3, s % 5, (s + 1) % 5] for s in range(n)]
    starts = np.cumsum([0, *map(len, rewards)])
    nested = [ids[a:b] for a, b in pairwise(starts)]
    data = SequenceSample.from_sequences([chr(97 + i) for i in range(len(rewards))], {"input_ids": nested})
    given_T = torch.arange(3 * n) % 3 == 0
    mask_T = ~given_T & ~torch.isin(torch.arange(3 * n) // 3, torch.tensor(empty, dtype=torch.long))
    flat = torch.tensor([r for group in rewards for r in group], dtype=torch.float64)
    return data.with_tokens(prompt_mask=given_T, loss_mask=mask_T).with_sequences(rewards=flat)


def chosen(data: SequenceSample, version: int = 0, **settings) -> list[int]:
    interface = RAFTActorInterface(**settings)
    return interface.choose(Model("actor", None, version=version), data).nonzero().flatten().tolist()


@pytest.mark.parametrize("aggregation", [TokenMean(), SeqMeanTokenMean(), SeqMeanTokenSum()], ids=str)
def test_loss_and_gradient_are_the_likelihood_of_the_best_responses(aggregation):
    data, engine = random_batch(3).select(READ), BigramEngine(lr=0.5)
    before = engine.logits_VV.clone()
    table = before.clone().requires_grad_()
    rows = list(zip(*(data.sequences(k) for k in ("input_ids", "loss_mask")), data["rewards"].tolist(), strict=True))
    best = []
    for group in range(len(data)):
        mine = [rows[s] for s in data.group_index().eq(group).nonzero().flatten().tolist()]
        mine = [row for row in mine if row[1].any() and not math.isnan(row[2])]
        best += [max(mine, key=lambda row: row[2])[:2]] if mine else []  # max returns the first of ties
    loss = likelihood(table, best, aggregation)
    loss.backward()
    interface = RAFTActorInterface(aggregation=aggregation, generation=GenerationConfig(n=4, temperature=0.3, top_k=2))
    stats = stat_values(interface.train_step(Model("actor", engine), data, MicroBatchSpec(n_microbatches=3)))
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(engine.logits_VV, before - 0.5 * table.grad, rtol=0, atol=1e-12)


def test_equal_rewards_at_the_cut_of_a_share_keep_the_first_responses_of_a_prompt():
    data = judged([[1.0] * 20] * 5)
    kept = chosen(data, keep_best=None, keep_share=0.5, generation=GenerationConfig(n=20))
    places = [[s % 20 for s in kept if s // 20 == prompt] for prompt in range(5)]
    assert sorted(map(len, places)) == [0, 0, 10, 20, 20]
    assert all(each == list(range(len(each))) for each in places)


def test_equal_rewards_at_the_cut_of_a_share_are_drawn_by_prompt_and_anew_in_each_step():
    data = judged([[1.0]] * 40)
    settings = {"keep_best": None, "keep_share": 0.25, "generation": GenerationConfig(n=1)}
    first, again, next_step = (chosen(data, version, **settings) for version in (0, 0, 1))
    assert first == again != next_step
    assert len(first) == len(next_step) == 10
    order = np.random.default_rng(0).permutation(40)
    assert sorted(order[chosen(data.take(order), **settings)].tolist()) == first


@pytest.mark.parametrize("choice", [{"keep_best": 1}, {"keep_best": None, "keep_share": 0.125}], ids=str)
def test_trap_g9_raft_learns_a_toy_reward_and_nothing_from_shuffled_ones(choice):
    interface = RAFTActorInterface(generation=TOY, n_minibatches=2, **choice)
    before, after = rewards_of_training(interface, shuffle=False)
    assert after > before + 2  # the maximum is 5
    before, after = rewards_of_training(interface, shuffle=True)
    assert after < before + 1.0


def test_the_shipped_experiment_runs_on_a_tiny_model(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(8)))
    (tmp_path / "reward.py").write_text(
        "def score(prompt, response, row):\n    return sum(map(str.islower, response))\n"
    )
    settings = [f"models.actor.path={save_tiny(tmp_path / 'model')}", f"data.path={tmp_path / 'prompts.jsonl'}"]
    settings += [f"interfaces.reward.function={tmp_path / 'reward.py'}:score", "interfaces.reward.workers=0"]
    settings += [f"output_dir={tmp_path / 'run'}", "steps=4", "batch_prompts=8", "models.actor.optimizer.lr=1e-2"]
    settings += ["interfaces.actor.generation.max_new_tokens=8", "interfaces.actor.n_minibatches=2"]
    result = run(build_experiment(compose(["experiment=raft", *settings])))
    rewards = result.series("reward")
    assert rewards[-1] > rewards[0] + 1
    assert all(a >= b for a, b in zip(result.series("selected_reward"), rewards, strict=True))
    assert (tmp_path / "run" / "final" / "actor" / "model.safetensors").is_file()
