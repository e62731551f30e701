from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from realign.api import Lengths, MicroBatchSpec, Model, SequenceSample, stat_values
from realign.interfaces.components import mix_pretraining
from realign.interfaces.ppo import PPOActorInterface
from realign.testing import BigramEngine, random_batch

TEXT = [[[5, 6, 7], [8, 9]], [[1, 2, 3, 4]], [], [[3, 1]], [[4, 4, 4]], [[2, 7, 1, 8]]]


def with_text(data: SequenceSample) -> SequenceSample:
    text = SequenceSample.from_sequences(data.ids, {"ptx_input_ids": TEXT})
    mask = torch.cat([torch.arange(len(x)) > 0 for x in text.sequences("ptx_input_ids")])
    return data.merge(text.with_data({"ptx_loss_mask": mask}, like="ptx_input_ids"))


def move(interface: PPOActorInterface, data: SequenceSample, parts: int) -> tuple[np.ndarray, dict[str, float]]:
    engine = BigramEngine(seed=5, lr=1.0)
    before = engine.logits_VV.clone()
    stats = interface.train_step(Model("actor", engine), data, MicroBatchSpec(n_microbatches=parts))
    return (before - engine.logits_VV).numpy(), stat_values(stats)


@pytest.mark.parametrize("parts", [1, 3])
def test_the_gradient_is_that_of_ppo_plus_coef_times_that_of_the_mean_nll_of_the_text(parts):
    data = random_batch(3).select(["input_ids", "loss_mask", "logprobs", "rewards", "truncated"])
    plain, _ = move(PPOActorInterface(), data, 1)
    mixed, metrics = move(PPOActorInterface(ptx_coef=27.8), with_text(data), parts)
    table = BigramEngine(seed=5).logits_VV.numpy()
    want, nll, n = np.zeros_like(table), 0.0, 0
    for text in (t for group in TEXT for t in group):
        for before, token in itertools.pairwise(text):
            logp = table[before] - np.log(np.exp(table[before]).sum())
            want[before] += np.exp(logp) - np.eye(len(table))[token]
            nll, n = nll - logp[token], n + 1
    np.testing.assert_allclose(mixed, plain + 27.8 * want / n, rtol=0, atol=1e-6)
    assert metrics["ptx_nll"] == pytest.approx(nll / n, rel=1e-6)


def test_the_text_is_read_at_temperature_1_and_enters_no_metric_of_the_policy():
    data = random_batch(3).select(["input_ids", "loss_mask", "logprobs", "rewards", "truncated"])
    _, plain = move(PPOActorInterface(), data, 2)
    _, mixed = move(PPOActorInterface(ptx_coef=1.0), with_text(data), 2)
    for name in ("entropy", "policy_loss", "clip_fraction", "ratio_mean", "approx_kl"):
        assert mixed[name] == pytest.approx(plain[name], rel=1e-6)


def test_keys_with_one_value_per_token_stay_also_if_another_call_of_the_graph_wrote_them():
    data = with_text(random_batch(3).select(["input_ids", "loss_mask", "rewards"]))
    lengths = data.lengths["input_ids"]
    equal = Lengths(lengths.counts.copy(), lengths.flat.copy())
    data = data.with_data({"logprobs": torch.zeros(len(data["input_ids"]))}, lengths=equal)
    mixed = mix_pretraining(data, 1.0, lambda part: part["loss_mask"].sum(), lambda x: x)
    assert mixed.keys == {"input_ids", "response_index", "loss_mask", "logprobs", "ptx_weight"}
