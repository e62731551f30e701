"""Train a tiny transformers model by each kind of preference method, and check that it learns the preferences."""

from __future__ import annotations

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, ModelInterface, SequenceSample, stat_values
from realign.engines import OptimizerSpec
from realign.interfaces.dpo import DPOInterface
from realign.interfaces.kto import KTOInterface, KTOReferenceInterface
from realign.interfaces.online_dpo import OnlineDPOInterface
from tests.tiny import tiny_engine

METHODS: dict[str, ModelInterface] = {
    "dpo": DPOInterface(),
    "kto": KTOInterface(n_minibatches=2),
    "online_dpo": OnlineDPOInterface(generation=GenerationConfig(n=2)),
}


def batch() -> SequenceSample:
    """Return eight prompts with the same two responses. Half of the prompts prefer the first, half the second one, so
    a model that ignores the prompt is right in half of the pairs."""
    rows = [[torch.tensor([10 + i, 5, *answer]) for answer in ((20, 21), (22, 23))] for i in range(8)]
    data = SequenceSample.from_sequences([f"p{i}" for i in range(8)], {"input_ids": rows})
    given = torch.tensor([True, True, False, False] * 16)
    labels = torch.tensor([0.0, 1.0, 1.0, 0.0] * 4)
    return data.with_tokens(prompt_mask=given, loss_mask=~given).with_sequences(labels=labels, rewards=labels)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_raises_the_accuracy_and_the_margin(name):
    interface, engine = METHODS[name], tiny_engine(optimizer=OptimizerSpec(lr=1e-2))
    model, data = Model("actor", engine, seed=0), batch()
    scored = KTOReferenceInterface().inference(model, data, MicroBatchSpec())
    data = data.merge(scored.rename({"logprobs": "ref_logprobs"}))
    metrics = []
    for _ in range(16):
        metrics.append(stat_values(interface.train_step(model, data, MicroBatchSpec())))
        model.publish_weights()
    assert metrics[0]["rewards/accuracy"] <= 0.7
    assert metrics[-1]["rewards/accuracy"] == 1
    assert metrics[-1]["rewards/margin"] > metrics[0]["rewards/margin"] + 0.1
    assert metrics[-1]["rewards/chosen"] > metrics[-1]["rewards/rejected"]
    assert metrics[-1]["logprobs/chosen"] > metrics[-1]["logprobs/rejected"]
