from __future__ import annotations

import math
import re
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from realign.api import MicroBatchSpec, stat_values
from realign.engines import OptimizerSpec, TransformersModel
from realign.errors import ConfigError
from realign.functional.packed import cu_seqlens_of
from realign.models.network import kernels
from realign.models.network.attention import ATTENTION, PackedContext, packed_inputs
from realign.models.network.kernels import AttentionArgs, Backend
from tests.flash_stand_in import forget_kernels, install_broken, install_flash, pretend_cuda
from tests.tiny import FAMILIES, OTHERS, VOCAB, random_sample, save_tiny, tiny_engine, tiny_model

LENGTHS = (7, 1, 12, 0, 4)
MOE = ("qwen3_moe", "mixtral")


def packed_ids(seed=0, lengths=LENGTHS):
    return torch.randint(3, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(seed))


def packed_logits(model, ids_T, lengths=LENGTHS):
    cu_seqlens = cu_seqlens_of(lengths)
    return model(**packed_inputs(ids_T, cu_seqlens), realign_context=PackedContext(cu_seqlens)).logits[0]


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_trap_a2_packed_equals_alone(family):
    alone, packed = tiny_model(family, attention="eager"), tiny_model(family)
    packed.load_state_dict(alone.state_dict())
    ids_T = packed_ids()
    want = torch.cat([alone(input_ids=x[None], use_cache=False).logits[0] for x in ids_T.split(LENGTHS) if len(x)])
    got = packed_logits(packed, ids_T)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)

    probe_V = torch.linspace(-1, 1, VOCAB)
    (want.softmax(-1) * probe_V).sum().backward()
    (got.softmax(-1) * probe_V).sum().backward()
    scale = max(p.grad.abs().max().item() for p in alone.parameters() if p.grad is not None)
    for (name, a), b in zip(alone.named_parameters(), packed.named_parameters(), strict=True):
        assert (a.grad is None) == (b[1].grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(b[1].grad, a.grad, atol=1e-5 * scale, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_trap_a2_sequences_do_not_see_each_other(family):
    model = tiny_model(family)
    ids_T = packed_ids()
    changed_T = ids_T.clone()
    changed_T[:7] = packed_ids(seed=1)[:7]
    with torch.no_grad():
        before, after = packed_logits(model, ids_T), packed_logits(model, changed_T)
    assert not torch.allclose(before[:7], after[:7])
    if family in MOE:  # experts process the tokens of all sequences together, so rounding may depend on other sequences
        torch.testing.assert_close(before[7:], after[7:], atol=1e-6, rtol=1e-6)
    else:
        assert torch.equal(before[7:], after[7:])


def test_trap_a3_left_padded_forward_equals_packed_with_learned_positions():
    packed, padded = tiny_model("gpt2"), tiny_model("gpt2", attention="eager")
    lengths = (7, 3, 12)
    ids_T = packed_ids(lengths=lengths)
    width = max(lengths)
    ids_SL, mask_SL = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    for s, x in enumerate(ids_T.split(lengths)):
        ids_SL[s, width - len(x) :], mask_SL[s, width - len(x) :] = x, 1
    positions_SL = (mask_SL.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        out = padded(input_ids=ids_SL, attention_mask=mask_SL, position_ids=positions_SL, use_cache=False).logits
        torch.testing.assert_close(packed_logits(packed, ids_T, lengths), out[mask_SL.bool()], atol=1e-5, rtol=1e-5)


def reference(q, k, v, lengths, args):
    """Compute attention token by token in float64."""
    q, k, v = q[0].double(), k[0].double(), v[0].double()
    group = q.shape[0] // k.shape[0]
    out = torch.zeros(q.shape[1], q.shape[0], v.shape[-1], dtype=torch.float64)
    start = 0
    for n in lengths:
        for t in range(start, start + n):
            for h in range(q.shape[0]):
                first = start if args.sliding_window is None else max(start, t - args.sliding_window + 1)
                scores = [args.scaling * float(q[h, t] @ k[h // group, u]) for u in range(first, t + 1)]
                if args.softcap is not None:
                    scores = [args.softcap * math.tanh(x / args.softcap) for x in scores]
                weights = [math.exp(x) for x in scores]
                total = sum(weights) + (0.0 if args.sinks_H is None else math.exp(float(args.sinks_H[h])))
                for u, w in zip(range(first, t + 1), weights, strict=True):
                    out[t, h] += w / total * v[h // group, u]
        start += n
    return out[None]


def qkv(seed=0, heads=4, kv_heads=2, size=8, value_size=8, lengths=LENGTHS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((heads, size), (kv_heads, size), (kv_heads, value_size))
    return [torch.randn(1, h, sum(lengths), d, generator=generator, dtype=dtype) for h, d in sizes]


FLASH = {Backend.flash: "flash_attn", Backend.flash3: "flash_attn_interface"}
PACKING = kernels.Packing(cu_seqlens_of(LENGTHS), max(LENGTHS), cu_seqlens_of(LENGTHS), max(LENGTHS))
ARGS = {
    "plain": AttentionArgs(0.3, 0.0, None, None, None),
    "window": AttentionArgs(0.3, 0.0, 3, None, None),
    "window of one": AttentionArgs(0.3, 0.0, 1, None, None),
    "softcap": AttentionArgs(0.3, 0.0, None, 1.5, None),
    "softcap and window": AttentionArgs(0.3, 0.0, 3, 1.5, None),
    "sinks": AttentionArgs(0.3, 0.0, None, None, torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "sinks and window": AttentionArgs(0.3, 0.0, 4, None, torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize("what", ARGS)
@pytest.mark.parametrize("value_size", [8, 6])
def test_packed_context_against_float64(what, value_size):
    q, k, v = qkv(value_size=value_size)
    got = PackedContext(cu_seqlens_of(LENGTHS)).attend(0, q, k, v, ARGS[what])
    assert got.shape == (1, sum(LENGTHS), 4, value_size)
    torch.testing.assert_close(got.double(), reference(q, k, v, LENGTHS, ARGS[what]), atol=1e-5, rtol=1e-5)


def stand_in(version):
    """Return `varlen_attn` with the signature of a torch version, computed on the CPU."""

    def compute(q, k, v, cu, window, scale):
        args = AttentionArgs(scale, 0.0, None if window == (-1, 0) else window[0] + 1, None, None)
        packed = PackedContext(cu, Backend.sdpa)
        return packed.attend(0, *(x.transpose(0, 1)[None] for x in (q, k, v)), args)[0]

    def today(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ):
        assert max_q == max(LENGTHS)
        assert torch.equal(cu_seq_q, cu_seq_k)
        assert enable_gqa == (query.shape[1] != key.shape[1])
        return compute(query, key, value, cu_seq_q, window_size, scale)

    def first(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        assert is_causal
        assert query.shape == key.shape
        return compute(query, key, value, cu_seq_q, (-1, 0), query.shape[-1] ** -0.5)

    return {"today": today, "first": first}[version]


@pytest.mark.parametrize(("version", "what"), [("today", "plain"), ("today", "window"), ("first", "plain")])
def test_varlen_is_called_as_its_version_wants(monkeypatch, version, what):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in(version))
    q, k, v = qkv()
    got = kernels.varlen_attention(q, k, v, ARGS[what], PACKING)
    torch.testing.assert_close(got.double(), reference(q, k, v, LENGTHS, ARGS[what]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", FLASH)
@pytest.mark.parametrize("what", ["plain", "window", "softcap", "softcap and window"])
def test_flash_is_called_as_its_package_wants(monkeypatch, backend, what):
    calls = install_flash(monkeypatch, FLASH[backend])
    q, k, v = qkv()
    got = kernels.flash_attention(backend, q, k, v, ARGS[what], PACKING)
    torch.testing.assert_close(got.double(), reference(q, k, v, LENGTHS, ARGS[what]), atol=1e-5, rtol=1e-5)
    (call,) = calls
    assert (call["max_seqlen_q"], call["max_seqlen_k"], call["deterministic"]) == (max(LENGTHS), max(LENGTHS), False)
    assert ("dropout_p" in call) == (backend is Backend.flash)


def test_a_kernel_of_the_hub_has_the_interface_of_flash_attn(monkeypatch):
    calls, asked = install_flash(monkeypatch, "flash_attn"), []
    package = ModuleType("kernels")
    package.get_kernel = lambda name: asked.append(name) or sys.modules["flash_attn"]
    monkeypatch.setitem(sys.modules, "kernels", package)
    kernels._hub_module.cache_clear()
    q, k, v = qkv()
    for _ in range(2):
        got = kernels.flash_attention(Backend.hub, q, k, v, ARGS["plain"], PACKING)
    kernels._hub_module.cache_clear()
    torch.testing.assert_close(got.double(), reference(q, k, v, LENGTHS, ARGS["plain"]), atol=1e-5, rtol=1e-5)
    assert (len(calls), asked) == (2, [kernels.HUB_KERNEL])


def on_device(monkeypatch, installed=(), capability=(9, 0)):
    """Pretend that these modules are installed and work, and that the GPU has this compute capability."""
    forget_kernels()
    monkeypatch.setattr(kernels, "find_spec", lambda name: object() if name in installed else None)
    monkeypatch.setattr(kernels, "capability", lambda device: capability)


class TensorOn:
    """Fake tensor with the attributes that `choose_backend` reads."""

    def __init__(self, device="cuda", dtype=torch.bfloat16, size=64):
        self.device, self.dtype, self.shape = torch.device(device), dtype, (1, 4, 24, size)


@pytest.mark.parametrize(
    ("backend", "tensor", "what", "expected"),
    [
        ("auto", TensorOn("cpu", torch.float32), "plain", "sdpa"),
        ("auto", TensorOn(dtype=torch.float32), "plain", "sdpa"),
        ("auto", TensorOn(), "plain", "varlen"),
        ("auto", TensorOn(), "window", "varlen"),
        ("auto", TensorOn(), "softcap", "sdpa"),
        ("auto", TensorOn(), "sinks", "sdpa"),
        ("auto", TensorOn(size=512), "plain", "sdpa"),
        ("sdpa", TensorOn(), "plain", "sdpa"),
        ("varlen", TensorOn("cpu"), "plain", "needs a CUDA device"),
        (
            "varlen",
            TensorOn(dtype=torch.float32),
            "plain",
            "supports float16 and bfloat16, but the model computes in float32",
        ),
        ("varlen", TensorOn(), "softcap", "neither soft caps nor dropout"),
        ("flash", TensorOn(), "plain", "needs flash-attn 2 .pip install 'realign-rl.flash-attn.'"),
        ("flash3", TensorOn(), "plain", "needs flash-attn 3 .build"),
        ("hub", TensorOn(), "plain", "needs kernels-community/flash-attn2 .pip install kernels"),
        ("varlen", TensorOn(), "sinks", "does not support attention sinks"),
    ],
)
def test_choice_of_backend(monkeypatch, backend, tensor, what, expected):
    on_device(monkeypatch)
    if expected in Backend.__members__:
        assert kernels.choose_backend(Backend(backend), tensor, tensor, ARGS[what]) is Backend(expected)
    else:
        with pytest.raises(ConfigError, match=f"attention={backend}: .*{expected}"):
            kernels.choose_backend(Backend(backend), tensor, tensor, ARGS[what])


@pytest.mark.parametrize(
    ("installed", "capability", "what", "expected"),
    [
        (("flash_attn",), (8, 0), "softcap", Backend.flash),
        (("flash_attn",), (7, 5), "plain", Backend.sdpa),
        ((), (7, 5), "plain", Backend.sdpa),
        (("flash_attn", "flash_attn_interface"), (9, 0), "plain", Backend.flash3),
        (("flash_attn", "flash_attn_interface"), (8, 9), "plain", Backend.flash),
        (("flash_attn_interface",), (10, 0), "plain", Backend.varlen),
        (("flash_attn", "flash_attn_interface"), (9, 0), "dropout", Backend.flash),
        (("flash_attn", "flash_attn_interface"), (9, 0), "sinks", Backend.sdpa),
        (("kernels",), (9, 0), "plain", Backend.varlen),
        (("flash_attn",), None, "plain", Backend.flash),
    ],
)
def test_auto_takes_the_fastest_kernel_that_is_installed_and_able(monkeypatch, installed, capability, what, expected):
    on_device(monkeypatch, installed, capability)
    args = {**ARGS, "dropout": ARGS["plain"]._replace(dropout=0.1)}[what]
    assert kernels.choose_backend(Backend.auto, TensorOn(), TensorOn(), args) is expected


BROKEN = {
    "flash-attn 4 alone": (None, "ImportError: cannot import name 'flash_attn_varlen_func' from 'flash_attn'"),
    "another torch": (
        "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2')",
        "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2",
    ),
    "no library": ("raise OSError('libcudart.so.12: no such file\\nmore')", "OSError: libcudart.so.12: no such file"),
    "another device": (
        "def flash_attn_varlen_func(*args, **keywords): raise RuntimeError('no kernel image is available')",
        "RuntimeError: no kernel image is available",
    ),
    "another interface": (
        "def flash_attn_varlen_func(q, k, v): ...",
        "TypeError: flash_attn_varlen_func() got an unexpected keyword argument 'cu_seqlens_q'",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_kernel_is_skipped_and_the_model_runs_packed(monkeypatch, caplog, tmp_path, what):
    code, why = BROKEN[what]
    install_broken(monkeypatch, tmp_path, "flash_attn", code)
    pretend_cuda(monkeypatch)
    calls, compute = [], stand_in("today")
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn",
        lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False: (
            calls.append(len(query))
            or compute(query, key, value, cu_seq_q, cu_seq_q, 12, 12, scale=scale, enable_gqa=enable_gqa)
        ),
    )
    assert kernels.preferred_kernel(Backend.auto, torch.device("cpu"), torch.bfloat16) == "varlen of torch"
    network = tiny_engine("llama", dtype=torch.bfloat16).network
    sample = random_sample([[6, 3]])
    calls.clear()
    assert network.run(sample, sample).hidden_TH.isfinite().all()
    assert calls == [9] * network.module.config.num_hidden_layers
    assert network.abilities.unpacked is None
    (line,) = [r.getMessage() for r in caplog.records if "skips" in r.getMessage()]
    assert line.startswith(f"attention=auto skips flash-attn 2, which fails: {why}")


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_kernel_that_is_set_is_an_error_with_its_own_message(monkeypatch, tmp_path, what):
    code, why = BROKEN[what]
    install_broken(monkeypatch, tmp_path / "packages", "flash_attn", code)
    pretend_cuda(monkeypatch)
    with pytest.raises(ConfigError, match=rf"attention=flash: this backend fails: {re.escape(why)}.* Set attention="):
        tiny_engine("llama", dtype=torch.bfloat16, attention=Backend.flash)
    model = TransformersModel(str(save_tiny(tmp_path / "model")), attention=Backend.flash)
    if what.startswith("another ") and what != "another torch":  # only a call shows it
        model.check("actor")
        return
    with pytest.raises(
        ConfigError,
        match=rf"models\.actor\.attention=flash: needs flash-attn 2 \(.*\), whose import fails: {re.escape(why)}",
    ):
        model.check("actor")


def test_an_error_of_a_kernel_is_not_taken_for_a_property_of_the_family(monkeypatch):
    def fail(*_):
        raise RuntimeError("an illegal instruction was encountered")

    install_flash(monkeypatch, "flash_attn")
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(kernels, "_failure", lambda *_: None)  # fails only with the model's own inputs
    monkeypatch.setattr(kernels, "flash_attention", fail)
    with pytest.raises(ConfigError, match=r"attention=auto failed, and runs with sdpa: RuntimeError: an illegal ins"):
        tiny_engine("llama", dtype=torch.bfloat16)


def test_model_without_context_is_refused():
    with pytest.raises(ValueError, match="'llama' was called without realign_context"):
        tiny_model("llama")(input_ids=packed_ids()[None])


@pytest.mark.parametrize(
    ("keywords", "config", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, {}, "a mask of shape"),
        ({"position_bias": torch.ones(1)}, {}, "passes an unknown 'position_bias'"),
        ({"is_causal": False}, {}, "not causal"),
        ({}, {"layer_types": ["chunked_attention"]}, "'chunked_attention'"),
        ({}, {"layer_types": ["sliding_attention"]}, "'sliding_attention' pass no window"),
    ],
)
def test_what_would_change_the_result_unseen_is_refused(keywords, config, message):
    from transformers import AttentionInterface, PretrainedConfig

    layer = nn.Module()
    layer.layer_idx, layer.config = 0, PretrainedConfig(**config)
    layer.config.model_type = "strange"
    q, k, v = qkv()
    arguments = {"attention_mask": None, "realign_context": PackedContext(cu_seqlens_of(LENGTHS)), **keywords}
    with pytest.raises(ConfigError, match=f"model family 'strange'.*{message}"):
        AttentionInterface()[ATTENTION](layer, q, k, v, **arguments)


@pytest.mark.parametrize("name", FLASH.values())
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_engine_in_bf16_trains_through_flash_where_it_is_installed(monkeypatch, name, family):
    calls = install_flash(monkeypatch, name)
    pretend_cuda(monkeypatch)
    engine = tiny_engine(family, optimizer=OptimizerSpec(lr=1e-3), dtype=torch.bfloat16)
    calls.clear()
    data = random_sample([[6, 3]])
    stats = engine.train_batch(
        data, MicroBatchSpec(), lambda out, mb: (out.logprobs().sum(), {}), lambda mb: torch.tensor(1.0)
    )
    assert stat_values(stats)["grad_norm"] > 0
    assert len(calls) == engine.module.config.num_hidden_layers
    assert {call["q"].dtype for call in calls} == {torch.bfloat16}
