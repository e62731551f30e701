from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from realign.models.files.unread import Unread, has_unread, read_now, weights_in
from tests.tiny import tiny_model

CPU = torch.device("cpu")


def unread(folder: Path, family: str, dtype: torch.dtype = torch.float32):
    """Return a module whose weights are in a folder, and the same module with values."""
    whole = tiny_model(family)
    copy.deepcopy(whole).to(dtype).save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    return type(whole).from_pretrained(None, config=config, state_dict=weights_in(str(folder), CPU)), whole


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "qwen3_moe", "mixtral", "gpt_oss"])
def test_a_slice_of_any_weight_is_read_as_transformers_converts_it(tmp_path, family):
    module, whole = unread(tmp_path, family)
    weights = dict(module.named_parameters())
    assert weights.keys() == dict(whole.named_parameters()).keys()
    for name, x in whole.named_parameters():
        assert isinstance(weights[name], Unread)
        middle = len(x) // 2
        for slices in ([], [slice(0, middle)], [slice(middle, len(x))], [slice(len(x), len(x))]):
            torch.testing.assert_close(weights[name].read(slices), x.detach()[tuple(slices)], rtol=0, atol=0)
        if x.ndim > 1:
            both = [slice(middle, len(x)), slice(1, 3)]
            torch.testing.assert_close(weights[name].read(both), x.detach()[tuple(both)], rtol=0, atol=0)


def test_unread_weights_have_no_memory_and_become_fp32_on_their_device(tmp_path):
    module, whole = unread(tmp_path, "llama", torch.bfloat16)
    assert has_unread(module)
    assert next(module.parameters()).device == CPU
    assert all(p.untyped_storage().device.type == "meta" for p in module.parameters())
    copied = copy.deepcopy(module)
    read_now(copied)
    assert not has_unread(copied)
    for name, p in copied.named_parameters():
        torch.testing.assert_close(p, whole.get_parameter(name).bfloat16().float(), rtol=0, atol=0)
