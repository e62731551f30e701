from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from realign.api import MicroBatchSpec, masked_mean
from realign.engines import OptimizerSpec, TransformersModel
from realign.errors import ConfigError
from realign.models import Causal, ValueHead
from realign.models.network.branches import Branch
from realign.models.network.probe import probe_branch
from tests.tiny import random_sample, save_tiny, tiny_model

ONE = MicroBatchSpec()
LENGTHS = ((9, 4, 6), (12,), (3, 5))
STEP = OptimizerSpec(lr=1e-2, eps=1.0, grad_clip=None)


def load(folder, *, optimizer=STEP, head=None, **fields):
    spec = ValueHead(init="normal") if head is None else head
    model = TransformersModel(str(folder), device="cpu", optimizer=optimizer, head=Causal(spec), **fields)
    return model.load("actor", seed=0).engine


def keep(out, mb):
    mb = mb.with_tokens(logprobs=out.logprobs(), values=out.values())
    return mb.with_sequences(scores=out.scores())


def joint(out, mb):
    logprobs_T, values_T = out.logprobs(where_T=mb["loss_mask"]), out.values()
    stats = {"value": masked_mean(values_T, mb["loss_mask"])}
    return -logprobs_T.sum() + (values_T.square() * mb["loss_mask"]).sum(), stats


def values_only(out, mb):
    return (out.values() * mb["loss_mask"]).sum(), {}


def tokens(data):
    return data["loss_mask"].sum()


def test_a_branch_that_differs_from_its_trunk_is_refused_by_name():
    module = tiny_model("llama")
    branch = Branch(module, 1)
    with torch.no_grad():
        branch.layers[0].mlp.down_proj.weight.mul_(1.05)
    with pytest.raises(
        ConfigError, match="model family 'llama' cannot have a branch: a copy of its top layers differs"
    ):
        probe_branch(module, branch)
    del module.model.norm
    with pytest.raises(ConfigError, match="model family 'llama' has no known list of layers followed by a norm"):
        Branch(module, 1)


@pytest.mark.parametrize(("family", "layers"), [("qwen2", 0), ("qwen2", 2), ("llama", 1), ("gpt2", 2)])
def test_values_packed_equal_values_alone_and_an_independent_branch(tmp_path, family, layers):
    engine = load(save_tiny(tmp_path / "m", family), head=ValueHead(layers, "mlp", "normal"))
    data = random_sample(LENGTHS)
    engine.train_batch(data, ONE, joint, tokens)  # from here on the weights of the branch differ from the trunk
    packed = engine.forward(data, MicroBatchSpec(max_tokens_per_microbatch=20), keep)
    cu = data.cu_seqlens().tolist()
    # The independent branch is a whole model with the top layers and norm of the branch, run on one sequence at a
    # time.
    module = copy.deepcopy(engine.module)
    if layers:
        base = module.base_model
        stack, norm = (base.h, "ln_f") if family == "gpt2" else (base.layers, "norm")
        for i, layer in enumerate(engine.value_head.branch.layers):
            stack[len(stack) - layers + i].load_state_dict(layer.state_dict())
        getattr(base, norm).load_state_dict(engine.value_head.branch.after[0].state_dict())
    module.set_attn_implementation("eager")
    first, _, last = engine.value_head.head
    for s, ids in enumerate(data.sequences()):
        hidden = module.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        after = (hidden @ first.weight.T + first.bias).clamp(min=0) @ last.weight[0] + last.bias
        values = packed["values"][cu[s] : cu[s + 1]]
        torch.testing.assert_close(values[1:], after[:-1].detach(), atol=1e-5, rtol=1e-4)
        assert values[0] == 0
        torch.testing.assert_close(packed["scores"][s], after[-1].detach(), atol=1e-5, rtol=1e-4)
    assert packed["values"].abs().max() > 1e-2


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_of_values_reaches_head_branch_and_trunk(tmp_path, layers, checkpointing):
    engine = load(save_tiny(tmp_path / "m", "qwen2"), head=ValueHead(layers, init="normal"))
    other = load(tmp_path / "m", head=ValueHead(layers, init="normal"), gradient_checkpointing=checkpointing)
    data = random_sample(LENGTHS)
    before = {n: p.detach().clone() for n, p in engine.network.named_parameters()}
    engine.train_batch(data, ONE, values_only, tokens)
    other.train_batch(data, MicroBatchSpec(n_microbatches=3), values_only, tokens)
    moved = {n for n, p in engine.network.named_parameters() if not torch.equal(p, before[n])}
    assert {
        "module.model.embed_tokens.weight",
        "module.model.layers.0.mlp.up_proj.weight",
        "value_head.head.0.weight",
    } <= moved
    assert ("module.model.layers.2.mlp.up_proj.weight" in moved) == (
        layers == 0
    )  # layers above the branch point get no gradient from values
    assert ("value_head.branch.layers.1.mlp.up_proj.weight" in moved) == (layers == 2)
    assert ("value_head.branch.after.0.weight" in moved) == (layers == 2)
    for (name, p), q in zip(engine.network.named_parameters(), other.network.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("layers", [0, 1])
def test_a_value_head_is_saved_beside_the_model_and_loaded_back(tmp_path, layers):
    engine = load(save_tiny(tmp_path / "m", "qwen2"), head=ValueHead(layers, init="normal"))
    data = random_sample(LENGTHS)
    engine.train_batch(data, ONE, joint, tokens)
    engine.save(tmp_path / "out")
    want = engine.forward(data, ONE, keep)
    again = load(tmp_path / "out", head=ValueHead(layers)).forward(data, ONE, keep)
    for key in want.keys:
        assert torch.equal(want[key], again[key]), key
    assert len(load_file(tmp_path / "out" / "value_head.safetensors")) == (2 if layers == 0 else 15)
    plain, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    assert torch.equal(plain.lm_head.weight, engine.module.lm_head.weight)
    with pytest.raises(
        ConfigError, match=rf"models\.actor\.head\.value_head\.layers=2: '.*' was saved with layers={layers}"
    ):
        load(tmp_path / "out", head=ValueHead(2))
    with pytest.raises(
        ConfigError, match=r"models\.actor\.head\.value_head\.hidden=mlp: '.*' was saved with hidden=linear"
    ):
        load(tmp_path / "out", head=ValueHead(layers, "mlp"))


def test_a_model_with_a_value_head_continues_exactly(tmp_path):
    folder = save_tiny(tmp_path / "m", "llama")
    data = [random_sample(LENGTHS, seed=s) for s in range(2)]
    whole, first = load(folder, head=ValueHead(1)), load(folder, head=ValueHead(1))
    for sample in data:
        whole.train_batch(sample, ONE, joint, tokens)
    first.train_batch(data[0], ONE, joint, tokens)
    second = load(folder, head=ValueHead(1))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.train_batch(data[1], ONE, joint, tokens)
    for p, q in zip(whole.network.parameters(), second.network.parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(ValueError, match=r"models.actor: the saved state has a value head, but the engine does not"):
        TransformersModel(str(folder), optimizer=STEP).load("actor", seed=0).engine.load_state_dict(first.state_dict())


def test_bad_value_heads_are_refused(tmp_path):
    folder = save_tiny(tmp_path / "m", "llama")
    with pytest.raises(ConfigError, match=r"models\.actor\.head\.value_head\.layers=4: must be between 1 and 3"):
        load(folder, head=ValueHead(4))
