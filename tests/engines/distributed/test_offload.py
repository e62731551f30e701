from __future__ import annotations

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.engines.distributed.offload import Offload
from realign.engines.training.optimizer import OptimizerSpec
from realign.engines.training.transformers_engine import TransformersEngine
from tests.tiny import random_sample, tiny_model, tiny_tokenizer

PROMPTS = SequenceSample.from_sequences(["a", "b"], {"prompt_ids": [[[5, 6, 7]], [[8]]]})


def steps(device: str, *, offload: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor, list[int]]:
    """Return the weights after two optimizer steps, and a rollout, with or without offloading in between."""
    module = tiny_model("qwen2").to(device)
    engine = TransformersEngine(
        "actor", module, tiny_tokenizer(), seed=0, optimizer=OptimizerSpec(lr=1e-2, ema_decay=0.9)
    )
    away = Offload(engine.resident)
    waited = []
    for seed in (0, 1):
        if offload:
            there = [x for x in engine.resident() if x.device.type != "cpu"]
            away.leave()
            waited.append(len(there))
            assert all(x.device.type == "cpu" for x in engine.resident())
            away.come_back()
        data = random_sample([[6, 9], [7]], seed=seed)
        engine.train_batch(
            data, MicroBatchSpec(), lambda out, mb: (-out.logprobs().sum(), {}), lambda d: torch.tensor(3.0)
        )
    sampled = engine.generate(PROMPTS, GenerationConfig(n=2, max_new_tokens=5), seed=0)
    return {name: x.cpu() for name, x in engine.weights().items()}, sampled["input_ids"].cpu(), waited


def test_on_a_cpu_nothing_moves():
    assert steps("cpu", offload=True)[2] == [0, 0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_engine_goes_on_after_a_pause_as_if_it_had_never_left_the_device():
    (weights, sampled, waited), (want, wanted, _) = steps("cuda", offload=True), steps("cuda", offload=False)
    assert waited[1] > waited[0] > 0  # the second offload includes the moments of the optimizer
    assert torch.equal(sampled, wanted)
    for name, x in want.items():
        torch.testing.assert_close(weights[name], x, rtol=0, atol=0)
