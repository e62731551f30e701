from __future__ import annotations

import torch

from benchmarks.batches import TrainStep, make_actor, make_rollout
from benchmarks.peer.work import SCENARIOS

TINY = SCENARIOS["tiny"]


def test_a_rollout_has_the_lengths_of_its_scenario_and_shared_prompts():
    batch = make_rollout(TINY, step=2)
    assert [int(mask.sum()) for mask in batch.sequences("loss_mask")] == TINY.lengths(2)
    for i in range(TINY.prompts):
        group = slice(i * TINY.group, (i + 1) * TINY.group)
        texts = list(zip(batch.sequences("input_ids")[group], batch.sequences("prompt_mask")[group], strict=True))
        assert all(torch.equal(ids[mask], texts[0][0][texts[0][1]]) for ids, mask in texts)


def test_copies_repeat_the_same_work():
    once, thrice = make_rollout(TINY), make_rollout(TINY, copies=3)
    assert len(thrice) == 3 * len(once)
    for key, x in once.data.items():
        assert torch.equal(thrice[key], x.repeat(3)), key


def test_a_training_step_changes_the_weights():
    actor = make_actor(TINY)
    weight = next(actor.engine.network.parameters())
    before = weight.detach().clone()
    TrainStep(actor, TINY)(make_rollout(TINY), 64)
    assert not torch.equal(weight, before)
