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
