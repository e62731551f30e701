from __future__ import annotations

import pytest
import torch

from realign.api import MicroBatchSpec
from realign.engines import OptimizerSpec
from realign.engines.training.transformers_engine import TransformersEngine
from tests.families import family_model
from tests.tiny import random_sample, tiny_tokenizer

DATA = random_sample(((9, 4, 6), (12,), (3, 5)))


def engine_of(family, **settings):
    settings = {"optimizer": OptimizerSpec(lr=1e-3), **settings}
    return TransformersEngine("actor", family_model(family), tiny_tokenizer(), seed=0, **settings)


def gradient(engine, data, spec):
    engine.accumulate(data, spec, lambda output, mb: (output.logprobs().square().sum(), {}), torch.tensor(1.0))
    return {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["nemotron", "stablelm"])
def test_the_gradient_of_packed_sequences_is_the_sum_of_those_alone(family):
    engine = engine_of(family, gradient_checkpointing=True)
    assert engine.network.abilities.unpacked is None
    gradients = gradient(engine, DATA, MicroBatchSpec())
    parts = [gradient(engine, DATA.take_sequences([s]), MicroBatchSpec()) for s in range(DATA.n_sequences)]
    for name, x in gradients.items():
        torch.testing.assert_close(x, sum(part[name] for part in parts), atol=2e-4, rtol=1e-3)
