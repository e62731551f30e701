"""Test the small models that are probed in place of those whose weights are unread."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from realign.models.network import probe
from realign.models.network.heads import read_head
from realign.models.network.kernels import Backend
from tests.tiny import FAMILIES, tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", [*FAMILIES])
def test_a_small_model_of_every_family_passes_the_probe(family):
    small = probe.small_model(tiny_model(family), AutoModelForCausalLM, CPU)
    probe.probe(small, read_head(small), attention=Backend.auto, autocast=None, share=True)


def test_a_small_model_has_every_kind_of_layer_and_few_tokens():
    kinds = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2
    module = tiny_model("gemma3_text", num_hidden_layers=6, layer_types=kinds, vocab_size=2000, pad_token_id=1999)
    small = probe.small_model(module, AutoModelForCausalLM, CPU)
    assert small.config.layer_types == kinds[:4]
    assert len(small.get_input_embeddings().weight) == 512
    assert module.config.num_hidden_layers == 6
    dense = probe.small_model(tiny_model("llama", num_hidden_layers=5), AutoModelForCausalLM, CPU)
    assert dense.config.num_hidden_layers == 2
    assert probe.small_model(dense, AutoModelForCausalLM, CPU, layers=2).config.num_hidden_layers == 2


def test_attention_matters_in_a_small_model():
    small = probe.small_model(tiny_model("llama", attention="eager"), AutoModelForCausalLM, CPU)
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        whole = small.model(input_ids=ids).last_hidden_state[0, -1]
        changed = small.model(input_ids=torch.cat((ids[:, :1] + 1, ids[:, 1:]), 1)).last_hidden_state[0, -1]
    assert (whole - changed).abs().max() > 1e-2
