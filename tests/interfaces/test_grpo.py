from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from realign.api import GenerationConfig, Model, SequenceSample, stat_values
from realign.errors import SettingsError
from realign.functional import Scope
from realign.interfaces.components import (
    GroupRelative,
    Normalization,
)
from realign.interfaces.grpo import GRPOActorInterface
from realign.testing import BigramEngine, random_batch


def batch(rewards: list[list[float]], tokens: int = 3) -> SequenceSample:
    """Return sequences of one prompt token and `tokens - 1` sampled tokens, with these rewards per group."""
    ids = [f"p{i}" for i in range(len(rewards))]
    data = SequenceSample.from_sequences(ids, {"input_ids": [[[1] * tokens for _ in group] for group in rewards]})
    mask = torch.tensor(([False] + [True] * (tokens - 1)) * sum(map(len, rewards)))
    flat = torch.tensor([r for group in rewards for r in group])
    return data.with_tokens(loss_mask=mask, logprobs=torch.zeros(len(mask))).with_sequences(rewards=flat)


def advantages(data: SequenceSample, **settings) -> list[float]:
    """Return the advantage of the last token of each sequence."""
    out = GRPOActorInterface(**settings).estimate_advantages(Model("actor", BigramEngine()), data)
    return [float(x[-1]) for x in out.sequences("advantages")]


def test_trap_e1_a_group_of_equal_rewards_teaches_exactly_nothing():
    data = batch([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0]])
    assert advantages(data)[:4] == [0.0] * 4
    model, interface = Model("actor", BigramEngine()), GRPOActorInterface()
    stats = interface.batch_stats(model, interface.estimate_advantages(model, data))
    assert stat_values(stats)["zero_std_fraction"] == 0.5


def test_trap_e4_ragged_groups_are_found_by_id():
    assert advantages(batch([[1.0, 0.0], [1.0, 2.0, 3.0]])) == pytest.approx(
        [1.0, -1.0, -(1.5**0.5), 0.0, 1.5**0.5], abs=1e-6
    )


def test_trap_e5_a_group_of_one_raises_in_the_config_and_gives_0_in_the_data():
    message = r"generation\.n=1: adv_norm compares the responses to a prompt"
    with pytest.raises(SettingsError, match=message):
        GRPOActorInterface(generation=GenerationConfig(n=1))
    divided = Normalization(Scope.batch, Scope.group)  # the std of one response is 0, so all advantages would be 0
    with pytest.raises(SettingsError, match=message):
        GRPOActorInterface(
            generation=GenerationConfig(n=1), adv_norm=divided, advantage=GroupRelative(min_group_size=1)
        )
    with pytest.raises(SettingsError, match=r"min_group_size=5: must be at most generation\.n=4"):
        GRPOActorInterface(generation=GenerationConfig(n=4), advantage=GroupRelative(min_group_size=5))
    one = GroupRelative(min_group_size=1)
    for spec in (Normalization(Scope.group, Scope.group), Normalization(Scope.group, Scope.none, leave_one_out=True)):
        assert advantages(batch([[3.0], [1.0, 0.0]]), adv_norm=spec, advantage=one)[0] == 0.0


def test_trap_e6_order_and_equal_texts_do_not_matter():
    rewards = [[1.0, 0.0, 0.0], [0.0, 2.0], [1.0, 0.0, 0.0]]
    data = batch(rewards)  # all prompts have the same text, and different ids
    straight = dict(zip(data.ids, np.split(np.array(advantages(data)), [3, 5]), strict=True))
    order = [2, 0, 1]
    shuffled = data.take(order)
    moved = np.split(np.array(advantages(shuffled)), [3, 6])
    for i, values in zip(shuffled.ids, moved, strict=True):
        np.testing.assert_array_equal(values, straight[i])


def test_trap_e8_group_and_batch_scopes_differ_and_loo_and_bias_are_explicit():
    data = batch([[1.0, 0.0, 0.0, 0.0], [4.0, 0.0]])
    first = {
        (mean, std): advantages(data, adv_norm=Normalization(mean, std))[0]
        for mean in (Scope.group, Scope.batch)
        for std in (Scope.none, Scope.group, Scope.batch)
    }
    assert len({round(v, 4) for v in first.values()}) == 6
    biased, unbiased, loo = (
        advantages(batch([[1.0, 0.0, 0.0, 0.0]]), adv_norm=Normalization(Scope.group, Scope.group, **kwargs))[0]
        for kwargs in ({}, {"unbiased": True}, {"leave_one_out": True})
    )
    assert (biased, unbiased, loo) == pytest.approx((1.7321, 1.5, 2.3094), abs=1e-4)


def test_trap_e9_a_missing_reward_leaves_the_loss_and_its_siblings_statistics():
    with_missing = batch([[1.0, math.nan, 0.0, 0.0]])
    without = batch([[1.0, 0.0, 0.0]])
    credited = advantages(with_missing)
    assert [credited[0], credited[2], credited[3]] == advantages(without)
    model = Model("actor", BigramEngine())
    interface = GRPOActorInterface()
    out = interface.estimate_advantages(model, with_missing)
    assert interface.loss_weight(out) == 6  # three responses of two sampled tokens


def test_a_group_with_too_few_rewards_is_left_out():
    data = batch([[1.0, math.nan, math.nan], [1.0, 0.0, 0.5]])
    interface = GRPOActorInterface(advantage=GroupRelative(min_group_size=2))
    out = interface.estimate_advantages(Model("actor", BigramEngine()), data)
    assert interface.loss_weight(out) == 6
    assert out["loss_mask"][:9].sum() == 0


@pytest.mark.parametrize("seed", range(5))
def test_trap_e12_agrees_with_a_plain_reference_on_random_groups(seed):
    data = random_batch(seed, n_prompts=8).select(["input_ids", "loss_mask", "rewards"])
    rewards, credited = data["rewards"].tolist(), advantages_per_sequence(data)
    start = 0
    for count in data.lengths["input_ids"].counts.tolist():
        trained = [s for s in range(start, start + count) if credited[s] is not None]
        group = np.array([rewards[s] for s in trained])
        for s in trained:
            std = group.std()
            want = 0.0 if std == 0 else (rewards[s] - group.mean()) / (std + 1e-8)
            assert credited[s] == pytest.approx(want, abs=1e-6)
        start += count


def advantages_per_sequence(data: SequenceSample) -> list[float | None]:
    out = GRPOActorInterface().estimate_advantages(Model("actor", BigramEngine()), data)
    pairs = zip(out.sequences("advantages"), out.sequences("loss_mask"), strict=True)
    return [float(a[m][0]) if m.any() else None for a, m in pairs]
