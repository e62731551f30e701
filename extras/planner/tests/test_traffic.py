"""Test the bytes that ranks send. `test_counted_traffic.py` compares them with counted ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from extras.planner.tests.cluster import MODEL, SHAPE
from realign_planner.traffic import Traffic, traffic

MODEL = replace(MODEL, shape=replace(SHAPE, parameters=150, trained=150, embeddings=50))
"""100 weights in 5 layers with 8 heads, and 50 outside."""


def test_one_rank_sends_nothing():
    assert traffic(MODEL, 1, 64, trains=True) == Traffic()


def test_fsdp_gathers_layers_twice_in_training_and_sums_gradients_in_fp32():
    gathered = 2 * 2 * 100 + 4 * 50
    assert traffic(MODEL, 4, 64, trains=True) == Traffic(shard=0.75 * (gathered + 4 * 150))
    assert traffic(MODEL, 4, 64, trains=False) == Traffic(shard=0.75 * (2 * 100 + 4 * 50))
    kept = replace(MODEL, reshard=False)
    assert traffic(kept, 4, 64, trains=True).shard == 0.75 * (2 * 100 + 4 * 50 + 4 * 150)


def test_replicas_sum_the_gradients_of_their_slices():
    sent = traffic(replace(MODEL, replicate=2), 8, 64, trains=True)
    assert sent == Traffic(shard=0.75 * (2 * 2 * 100 + 4 * 50 + 4 * 150), replicate=2 * 0.5 * 4 * 150 / 4)
    alone = traffic(replace(MODEL, replicate=8), 8, 64, trains=True)
    assert alone == Traffic(replicate=2 * 7 / 8 * 4 * 150)


@pytest.mark.parametrize(("checkpointing", "passes"), [(False, 2), (True, 3)])
def test_context_exchanges_attention_in_each_pass(checkpointing, passes):
    model = replace(MODEL, context=4, gradient_checkpointing=checkpointing)
    one_pass = 0.75 * 2 * 64 / 4 * (2 * 8 + 2 * 8) * 5
    assert traffic(model, 4, 64, trains=True).context == passes * one_pass
    assert traffic(model, 4, 64, trains=False).context == one_pass
    two_heads = replace(model, shape=replace(model.shape, keys=2))  # repeated for four ranks
    assert traffic(two_heads, 4, 64, trains=False).context == 0.75 * 2 * 64 / 4 * (2 * 8 + 2 * 4) * 5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tensor_sums_outputs_and_the_gradients_of_inputs(checkpointing):
    model = replace(MODEL, tensor=2, gradient_checkpointing=checkpointing)
    sent = traffic(model, 8, 64, trains=True)
    layers = 5 * (2 * (2 + checkpointing) + 4 * 2)
    assert sent.tensor == 2 * 0.5 * 64 * 10 * (layers + 2 * 4)  # and of embeddings and the head
    assert sent.shard == 0.75 * (2 * 2 * 50 + 4 * 25 + 4 * 75)  # of half of the weights
    assert sent.expert == 0
    assert traffic(model, 8, 64, trains=False).tensor == 2 * 0.5 * 64 * 10 * (5 * 2 * 2 + 4)


def test_ranks_with_different_experts_exchange_tokens_instead_of_weights():
    shape = replace(SHAPE, parameters=150, trained=150, embeddings=50, in_experts=80, experts=4, experts_per_token=2)
    model = replace(MODEL, shape=shape, expert=2)
    sent = traffic(model, 4, 64, trains=True)
    assert sent.shard == 0.75 * ((4 + 4) * 20 + (4 + 4) * 50) + 0.5 * (4 + 4) * 40
    assert sent.expert == 0.5 * 4 * (2 * 64 * 2 * 10 * 5) * 2
    assert traffic(model, 4, 64, trains=False).expert == 0.5 * 4 * (2 * 64 * 2 * 10 * 5)


def test_stages_send_hidden_states_and_gradients_and_have_a_part_of_the_weights_each():
    model = replace(MODEL, pipeline=2)
    sent = traffic(model, 4, 64, trains=True)
    assert sent.shard == traffic(MODEL, 2, 64, trains=True).shard / 2
    assert sent.pipeline == 0.5 * 4 * 64 * 10 * 2  # half of the stages have one after them
    assert traffic(model, 4, 64, trains=False).pipeline == 0.5 * 4 * 64 * 10
