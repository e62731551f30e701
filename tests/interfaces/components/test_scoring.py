from __future__ import annotations

import pytest
import torch

from realign.api import MicroBatchSpec, Model
from realign.interfaces.components import old_logprobs, score_logprobs
from realign.testing import BigramEngine, random_batch


@pytest.mark.parametrize("spec", [MicroBatchSpec(), MicroBatchSpec(n_microbatches=3)], ids=str)
def test_log_probs_are_those_of_the_masked_tokens_at_the_temperature(spec):
    data, engine = random_batch(1), BigramEngine()
    scored = score_logprobs(Model("actor", engine), data, spec, 0.7)
    assert scored.keys == {"logprobs"}
    want_T = engine.output(data).logprobs(temperature=0.7, where_T=data["loss_mask"])
    assert torch.equal(scored["logprobs"], want_T)
    assert not scored["logprobs"][~data["loss_mask"]].any()


def test_ratios_are_taken_against_recomputed_log_probs_where_there_are_any():
    data = random_batch(1)
    assert torch.equal(old_logprobs(data), data["prox_logprobs"])
    assert torch.equal(old_logprobs(data.select(["input_ids", "logprobs"])), data["logprobs"])
