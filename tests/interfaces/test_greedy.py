from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.engines import SharedModel
from realign.interfaces.components import (
    GAE,
    KLPenalty,
    Normalization,
    Reinforce,
    RewardShaping,
    SeqMeanTokenSum,
)
from realign.interfaces.greedy import GreedyInterface
from realign.interfaces.ppo import PPOActorInterface, dataflow
from realign.interfaces.reference import ReferenceInterface
from realign.runtime.local import LocalRuntime
from realign.testing import BigramEngine
from tests.toys import BigramModel, CountToken, experiment

PROMPTS = SequenceSample.from_sequences("abc", {"prompt_ids": [[[1, 4]], [[2]], [[7, 7, 7]]]})


def answers(engine: BigramEngine, generation: GenerationConfig) -> SequenceSample:
    model = Model("baseline", engine, seed=5)
    data = PROMPTS.with_metadata(row=[{}] * 3)
    return GreedyInterface(generation).generate(model, data, MicroBatchSpec())


def most_likely(logits_VV: torch.Tensor, prompt: list[int], limit: int, fixed_length: bool) -> list[int]:
    """Return the chain of most likely tokens. Token 0 is the end token."""
    tokens = list(prompt)
    for _ in range(limit):
        tokens.append(max(range(11), key=lambda v: float(logits_VV[tokens[-1], v])))
        if tokens[-1] == 0 and not fixed_length:
            break
    return tokens


def test_every_prompt_gets_its_most_likely_answer_whatever_the_actor_samples():
    engine = BigramEngine(seed=3)
    engine.logits_VV[7, 0] = 9.0  # the answer to this prompt ends immediately
    for fixed_length in (False, True):
        sampler = GenerationConfig(n=4, max_new_tokens=5, temperature=0.7, fixed_length=fixed_length)
        out = answers(engine, sampler)
        assert (out.ids, out.keys) == (PROMPTS.ids, {"input_ids", "response_index", "prompt_mask"})
        expected = [most_likely(engine.logits_VV, p, 5, fixed_length) for p in ([1, 4], [2], [7, 7, 7])]
        assert [x.tolist() for x in out.sequences("input_ids")] == expected
        assert [int(mask.sum()) for mask in out.sequences("prompt_mask")] == [2, 1, 3]
        assert out.lengths["input_ids"].counts.tolist() == [1, 1, 1]


SAMPLER = GenerationConfig(n=2, max_new_tokens=5)


@dataclass
class Seen(PPOActorInterface):
    """Stores the batch after advantage estimation."""

    estimated: list[SequenceSample] = field(default_factory=list)

    def estimate_advantages(self, model, data):
        self.estimated.append(super().estimate_advantages(model, data))
        return self.estimated[-1]


def remax(tmp_path, *, judge=None, lr=0.5, kl=None, **changes):
    actor = Seen(
        generation=SAMPLER,
        objective=Reinforce(),
        advantage=GAE(lam=1.0),
        adv_norm=Normalization("none", "none"),
        aggregation=SeqMeanTokenSum(),
        reward=RewardShaping(baseline="greedy"),
        kl=kl or KLPenalty(),
    )
    interfaces = {
        "actor": actor,
        "baseline": GreedyInterface(SAMPLER),
        "reward": judge or CountToken(),
        "ref": ReferenceInterface(),
    }
    settings = {
        "graph": dataflow(interfaces),
        "interfaces": interfaces,
        "models": {"actor": BigramModel(lr=lr), "baseline": SharedModel("actor"), "ref": BigramModel(lr=0.0)},
        "evaluation": None,
    }
    return experiment(tmp_path, **(settings | changes))


def test_the_baseline_of_a_prompt_is_the_reward_of_its_greedy_answer_under_the_present_weights(tmp_path):
    runtime = LocalRuntime(remax(tmp_path, lr=50.0))
    baselines = []
    for step in (1, 2):
        logits_VV = runtime.models["actor"].engine.logits_VV.clone()
        _, batch = runtime.step(step)
        prompts = [int(prompt[-1]) for prompt in runtime.batch(step).sequences("prompt_ids")]
        greedy = [most_likely(logits_VV, [1, prompt], 5, False) for prompt in prompts]
        assert [x.tolist() for x in batch.sequences("greedy_input_ids")] == greedy
        assert batch["baseline_rewards"].tolist() == [float(ids[2:].count(3)) for ids in greedy]
        baselines.append(batch["baseline_rewards"].sum())
    assert baselines[0] != baselines[1]  # the update changed the greedy answers


def test_the_gradient_is_that_of_the_paper(tmp_path):
    """Expected: the mean over responses of (reward - baseline) times the gradient of the response's
    log-prob (eq. 5)."""
    runtime = LocalRuntime(remax(tmp_path, lr=1.0))
    engine = runtime.models["actor"].engine
    table = engine.logits_VV.clone().numpy()
    _, batch = runtime.step(1)
    prob = np.exp(table) / np.exp(table).sum(1, keepdims=True)
    want = np.zeros_like(table)
    groups = batch.group_index().tolist()
    for s, (ids, mask) in enumerate(zip(batch.sequences(), batch.sequences("loss_mask"), strict=True)):
        advantage = float(batch["rewards"][s] - batch["baseline_rewards"][groups[s]])
        for t in range(1, len(ids)):
            if mask[t]:
                want[ids[t - 1]] += advantage * (np.eye(len(table))[ids[t]] - prob[ids[t - 1]]) / batch.n_sequences
    np.testing.assert_allclose(engine.logits_VV.numpy() - table, want, atol=1e-6)
    assert np.abs(want).max() > 0.01
