"""Compare the sizes that are read from configs with those of built models."""

from __future__ import annotations

import pytest

from realign.models import Causal, Lora, TopLayers
from realign.models.model_shape import shape_of
from tests.tiny import FAMILIES, OTHERS, tiny_config, tiny_model


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_the_shape_of_every_family_counts_its_weights(family):
    shape = shape_of(tiny_config(family), Causal())
    model = tiny_model(family)
    weights = sum(p.numel() for p in model.parameters())
    assert (shape.parameters, shape.trained, shape.adapters) == (weights, weights, 0)
    assert shape.words == len(model.get_output_embeddings().weight)
    assert 0 < shape.matrices <= shape.in_layers < weights


@pytest.mark.parametrize("trains", [TopLayers(1), Lora(rank=3), Lora(rank=2, target_modules=["q_proj"])])
def test_trained_weights_and_adapters_are_those_of_a_prepared_model(trains):
    model = tiny_model("llama")
    loaded = sum(p.numel() for p in model.parameters())
    trains.prepare(model, path="", seed=0)
    shape = shape_of(tiny_config("llama"), Causal(), trains=trains)
    assert shape.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert shape.adapters == sum(p.numel() for p in model.parameters()) - loaded


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", (False, 0, 4, False)),
        ("gpt2", (False, 0, 4, True)),
        ("opt", (False, 0, 2, True)),
        ("gemma2", (False, 2, 4, False)),
        ("gpt_oss", (False, 1, 4, False)),
        ("bloom", (True, 1, 2, True)),
        ("falcon", (True, 0, 2, True)),
    ],
)
def test_the_tensors_that_a_layer_saves_are_read_from_the_config(family, expected):
    shape = shape_of(tiny_config(family), Causal())
    assert (shape.unpacked, shape.pair_tensors, shape.mlp_tensors, shape.layer_norms) == expected
