from __future__ import annotations

import pytest
import torch

from realign.api import Max, MicroBatchSpec, Model, stat_values
from realign.interfaces.components import first_logprob_diff, score_logprobs
from realign.testing import BigramEngine, random_batch


@pytest.mark.parametrize("spec", [MicroBatchSpec(), MicroBatchSpec(n_microbatches=3)], ids=str)
def test_log_probs_are_those_of_the_masked_tokens_at_the_temperature(spec):
    data, engine = random_batch(1), BigramEngine()
    scored = score_logprobs(Model("actor", engine), data, spec, 0.7)
    assert scored.keys == {"logprobs"}
    want_T = engine.output(data).logprobs(temperature=0.7, where_T=data["loss_mask"])
    assert torch.equal(scored["logprobs"], want_T)
    assert not scored["logprobs"][~data["loss_mask"]].any()


def test_the_first_difference_is_the_one_that_the_loss_reports_or_else_is_computed():
    data, engine = random_batch(1), BigramEngine()
    output, mask_T = engine.output(data), data["loss_mask"]
    own = first_logprob_diff({"logprob_diff_max": Max(torch.tensor(7.0))}, output, data, 0.7)
    assert stat_values(own) == {"first_logprob_diff_max": 7.0}
    difference_T = (output.logprobs(temperature=0.7, where_T=mask_T) - data["prox_logprobs"]).abs()
    computed = first_logprob_diff({}, output, data, 0.7)
    assert stat_values(computed) == {"first_logprob_diff_max": pytest.approx(float(difference_T[mask_T].max()))}
