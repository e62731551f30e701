from __future__ import annotations

import pytest
import torch

from realign.api import MicroBatchSpec
from realign.engines import OptimizerSpec
from realign.errors import ConfigError
from tests.families import family_model
from tests.tiny import engine_over, random_sample

FAMILIES = ("bloom", "falcon", "rwkv", "diffllama")
"""alibi; attention classes that cannot be replaced; a recurrence; several attention calls per layer."""
LENGTHS = (7, 1, 12, 0, 11, 12)


def engine_of(family, **settings):
    return engine_over(family_model(family), **settings)


def alone(family):
    return family_model(family, attention="eager")


def own_logits(model, ids):
    return model(input_ids=ids[None], use_cache=False).logits[0]


def negative_likelihood(out, part):
    return -out.logprobs().sum(), {}


def one_per_token(part):
    return torch.tensor(float(len(part["input_ids"])))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_each_sequence_alone(family):
    data = random_sample([LENGTHS[:3], LENGTHS[3:]])
    model, loss = alone(family), torch.zeros(())
    for ids in data.sequences():
        if len(ids):
            loss = loss - own_logits(model, ids).log_softmax(-1)[:-1].gather(1, ids[1:, None]).sum()
    (loss / len(data["input_ids"])).backward()
    engine = engine_of(family, optimizer=OptimizerSpec(lr=0.0))
    spec = MicroBatchSpec(max_tokens_per_microbatch=20)
    engine.accumulate(data, spec, negative_likelihood, one_per_token(data))
    scale = max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
    for (name, want), got in zip(model.named_parameters(), engine.module.parameters(), strict=True):
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad, atol=1e-5 * scale, rtol=1e-4, msg=name)


def test_a_family_whose_cache_is_not_exact_recomputes_each_text():
    assert engine_of("bloom").network.abilities.own_cache.cached
    assert not engine_of("rwkv").network.abilities.own_cache.cached


def test_a_model_that_sees_later_tokens_is_rejected():
    with pytest.raises(ConfigError, match="'bert' is not supported: it is not causal"):
        engine_of("bert")
