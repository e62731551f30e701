"""Test what decoding and training may cost: kernel launches and synchronizations, so that nobody spends them unnoticed.

`python -m benchmarks.gpu_budget` prints today's numbers. A synchronization that is allowed is listed with its reason.
"""

from __future__ import annotations

import gc

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model
from realign.interfaces.grpo import GRPOActorInterface
from tests.virtual_cuda.budgets import batch, decode, engine_of, of_layers, prompts_of, train, train_sharded
from tests.virtual_cuda.device import limit

STEP = "realign/models/host.py"
METRICS = "realign/api/stats.py"
ALLOWED = {
    STEP: "whether loss and gradient are finite decides whether a step is taken",
    METRICS: "the metrics of all ranks are merged on the host, in one transfer",
}
"""Files that may wait in an optimizer step, once each."""


@pytest.mark.parametrize(("dtype", "launches"), [(torch.bfloat16, 16), (torch.float32, 15)])
def test_a_decode_step_launches_few_kernels_and_waits_once_in_8_tokens(dtype, launches):
    cost = of_layers(lambda layers: decode(layers, dtype=dtype))
    assert cost.per_layer <= launches
    assert cost.rest <= 40
    assert cost.four.waits <= 1 / 8


def test_the_weights_of_a_frozen_model_are_cast_once_per_rollout():
    frozen, trains = (decode(2, fused_rollout=False, frozen=frozen) for frozen in (True, False))
    assert frozen.launches == trains.launches


def test_a_rollout_is_fused_in_the_memory_that_a_card_of_80_gb_leaves_for_7b():
    engine = engine_of(hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    layers = sum(p.numel() for p in engine.module.model.layers.parameters())
    # 7B on 8 ranks: the gathered copy and the shards leave 39.7 GB, and the layers have 26.1 GB in fp32
    with limit(int(4 * layers * 39.7 / 26.1)):
        engine.generate(prompts_of(), GenerationConfig(n=2, max_new_tokens=8), seed=0)
    assert engine.fusion.obstacle is None


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"dtype": torch.float32}])
def test_a_micro_batch_never_waits_and_an_optimizer_step_once(settings):
    micro_batch, rest = train(2, **settings)
    assert not micro_batch.synchronizations
    assert {line.partition(":")[0] for _, line in rest.synchronizations} == {STEP}
    assert rest.waits == 1


def test_an_optimizer_step_of_fsdp_waits_twice_at_any_number_of_ranks():
    micro_batch, rest = train_sharded(2, ranks=8)
    assert not micro_batch.synchronizations
    assert {line.partition(":")[0] for _, line in rest.synchronizations} == set(ALLOWED)
    assert rest.waits == 2


def test_rollouts_leave_only_weights_behind_and_steps_only_moments():
    engine = engine_of(num_hidden_layers=2)
    model = Model("actor", engine, engine.tokenizer)
    actor = GRPOActorInterface(generation=GenerationConfig(n=2, max_new_tokens=14))
    weights = 4 * sum(p.numel() for p in engine.module.parameters())
    before = live() - weights

    def rollout() -> int:
        engine.generate(prompts_of(), actor.generation, seed=0)
        return live() - before

    def step() -> int:
        actor.train_step(model, batch(), MicroBatchSpec())
        return live() - before

    assert [rollout(), rollout()] == [weights] * 2
    first = step()
    assert 3 * weights <= first <= 3 * weights + 1024  # two moments, and the counters of the optimizer
    assert [step(), rollout(), step()] == [first] * 3


def live() -> int:
    """Return the bytes that tensors hold on the device."""
    gc.collect()
    return torch.cuda.memory_allocated()
