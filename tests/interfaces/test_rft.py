from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from realign.api import MicroBatchSpec, Model, SequenceSample, stat_values
from realign.config import build_experiment, compose
from realign.interfaces.components import SeqMeanTokenMean, SeqMeanTokenSum, TokenMean
from realign.interfaces.raft import trainable
from realign.interfaces.rft import Pool, RFTActorInterface, above_percentile, dataflow, prompts_of
from realign.runtime import run
from realign.testing import BigramEngine
from tests.tiny import save_tiny
from tests.toys import TOY, likelihood, rewards_of_training

NAN = math.nan


def batch(prompts: dict[str, tuple[list[int], dict[tuple[int, ...], float]]]) -> SequenceSample:
    """Build a batch from prompt tokens, and rewards by response tokens, for each prompt id."""
    rows = [[[*prompt, *r] for r in responses] for prompt, responses in prompts.values()]
    given = [[[True] * len(prompt) + [False] * len(r) for r in responses] for prompt, responses in prompts.values()]
    data = SequenceSample.from_sequences(list(prompts), {"input_ids": rows}).with_tokens(
        prompt_mask=[[torch.tensor(g) for g in group] for group in given]
    )
    rewards = [reward for _, responses in prompts.values() for reward in responses.values()]
    return data.with_tokens(loss_mask=~data["prompt_mask"]).with_sequences(rewards=torch.tensor(rewards).double())


FIRST = batch(
    {
        "0@0": ([1, 2], {(3,): 0.0, (4, 5): 1.0, (6,): NAN}),
        "1@0": ([1], {(2, 3): 5.0, (7,): 5.0}),
    }
)
SECOND = batch(
    {
        "9@1": ([8], {(3,): NAN}),
        "1@1": ([1], {(2, 3): 5.0, (9, 9, 9): 8.0}),
        "0@1": ([1, 2], {(3,): 0.0, (10,): 2.0}),
        "0@2": ([1, 2], {(5,): 4.0}),
    }
)


def test_the_pool_keeps_distinct_judged_responses_of_a_prompt_over_epochs():
    pool = Pool()
    assert pool.add(FIRST, trainable(FIRST)) == 4
    assert pool.add(SECOND, trainable(SECOND)) == 3
    assert len(pool) == 7
    pooled = pool.take(SECOND)
    assert pooled.ids == ("1@1", "0@1")  # each prompt once; 9@1 has no scored response
    assert pooled.lengths["input_ids"].counts.tolist() == [3, 4]
    ids = [x.tolist() for x in pooled.sequences("input_ids")]
    assert ids == [[1, 2, 3], [1, 7], [1, 9, 9, 9], [1, 2, 3], [1, 2, 4, 5], [1, 2, 10], [1, 2, 5]]
    assert pooled["rewards"].tolist() == [5.0, 5.0, 8.0, 0.0, 1.0, 2.0, 4.0]
    masks = [x.int().tolist() for x in pooled.sequences("loss_mask")]
    assert masks == [[0, 1, 1], [0, 1], [0, 1, 1, 1], [0, 0, 1], [0, 0, 1, 1], [0, 0, 1], [0, 0, 1]]


def test_a_prompt_ends_where_sampling_began_and_not_after_a_tool():
    data = SequenceSample.from_sequences(["a"], {"input_ids": [[[1, 2, 3, 4, 5]]]})
    assert prompts_of(data.with_tokens(prompt_mask=torch.tensor([True, True, False, True, False]))) == [(1, 2)]


def test_thresholds_by_hand():
    data = batch(
        {
            "a": ([1], {(s,): float(s) for s in range(11)}),
            "b": ([2], {(3,): 0.0, (4,): 0.0, (5,): 0.0, (6,): 1.0}),
            "c": ([3], {(3,): 2.0, (4,): 2.0}),
            "d": ([4], {(3,): 2.0}),
        }
    )
    threshold_S, chosen_S = above_percentile(data, 0.75)
    assert threshold_S.tolist() == pytest.approx([7.5] * 11 + [0.25] * 4 + [2.0] * 3)
    # with equal rewards, no response is better than another
    assert chosen_S.nonzero().flatten().tolist() == [8, 9, 10, 14]
    threshold_S, chosen_S = above_percentile(data, 0.5)
    assert threshold_S.tolist() == pytest.approx([5.0] * 11 + [0.0] * 4 + [2.0] * 3)
    # the lowest rewards of b equal the threshold, and are excluded
    assert chosen_S.nonzero().flatten().tolist() == [5, 6, 7, 8, 9, 10, 14]
    best = batch({"a": ([1], {(s,): x for s, x in enumerate([0.1, 0.7, 0.7, 0.7])})})
    assert above_percentile(best, 0.95)[1].tolist() == [False, True, True, True]


@pytest.mark.parametrize("percentiles", [(0.2, 0.55, 0.9), (0.2, 0.3, 0.4)], ids=str)
@pytest.mark.parametrize("aggregation", [TokenMean(), SeqMeanTokenMean(), SeqMeanTokenSum()], ids=str)
def test_every_improvement_is_the_likelihood_of_what_reaches_its_threshold(aggregation, percentiles):
    engine = BigramEngine(lr=0.5)
    table = engine.logits_VV.clone()
    interface = RFTActorInterface(
        aggregation=aggregation, n_improve_steps=3, start_percentile=0.2, end_percentile=percentiles[-1], epochs=2
    )
    model, pool = Model("actor", engine), {}
    for data in (FIRST, SECOND):
        rows = zip(*(data.sequences(k) for k in ("input_ids", "prompt_mask")), data["rewards"].tolist(), strict=True)
        present = set()
        for ids, given, reward in rows:
            prompt = tuple(ids[given].tolist())
            present.add(prompt)
            if not math.isnan(reward):
                pool.setdefault(prompt, {})[tuple(ids.tolist())] = reward
        for percentile in percentiles:
            selected = []
            for prompt in present & pool.keys():
                rewards = list(pool[prompt].values())
                threshold = np.quantile(rewards, percentile)
                selected += [
                    (ids, [t >= len(prompt) for t in range(len(ids))])
                    for ids, reward in pool[prompt].items()
                    if reward >= threshold and reward > min(rewards)
                ]
            for _ in range(2):
                table.requires_grad_()
                loss = likelihood(table, selected, aggregation)
                table = (table - 0.5 * torch.autograd.grad(loss, table)[0]).detach()
        stats = stat_values(interface.train_step(model, data, MicroBatchSpec(n_microbatches=2)))
        torch.testing.assert_close(engine.logits_VV, table, rtol=0, atol=1e-12)
        assert stats["optimizer_steps"] == 6
    assert stats["pool_size"] == 7
    assert stats["new_fraction"] == pytest.approx(3 / 5)


def test_trap_g9_rft_learns_a_toy_reward_and_nothing_from_shuffled_ones():
    def interface() -> RFTActorInterface:
        return RFTActorInterface(generation=TOY, n_improve_steps=3, n_minibatches=2)

    before, after = rewards_of_training(interface(), shuffle=False, steps=24)
    assert after > before + 2  # the maximum is 5
    before, after = rewards_of_training(interface(), shuffle=True, steps=24)
    assert after < before + 1.0


def test_the_graph_is_that_of_raft_and_rft_runs_by_naming_it(tmp_path):
    assert [r.name for r in dataflow().order] == ["actor_gen", "reward_inf", "actor_train"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(4)))
    (tmp_path / "reward.py").write_text("def score(prompt, response, row):\n    return response.count('a')\n")
    settings = [f"models.actor.path={save_tiny(tmp_path / 'model')}", f"data.path={tmp_path / 'prompts.jsonl'}"]
    settings += [f"interfaces.reward.function={tmp_path / 'reward.py'}:score", "interfaces.reward.workers=0"]
    settings += [f"output_dir={tmp_path / 'run'}", "steps=3", "batch_prompts=4", "models.actor.optimizer.lr=3e-3"]
    settings += ["interfaces.actor._target_=realign.interfaces.rft.RFTActorInterface", "interfaces.actor.epochs=1"]
    settings += ["interfaces.actor.generation.max_new_tokens=8", "interfaces.actor.n_minibatches=2"]
    result = run(build_experiment(compose(["experiment=raft", *settings])))
    sizes = result.series("pool_size")
    assert sizes == sorted(sizes)
    assert 32 < sizes[-1] <= 4 * 32
    assert result.series("selected_reward")[0] > result.series("reward")[0]
    saved = json.loads((tmp_path / "run" / "final" / "actor" / "interface_state.json").read_text())
    assert len(saved["pool"]["responses"]) == sizes[-1]
