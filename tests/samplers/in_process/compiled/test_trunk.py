from __future__ import annotations

import ctypes
import logging
import platform
import resource
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from realign.api import GenerationConfig, MicroBatchSpec
from realign.engines import TransformersModel
from realign.engines.training import inference_engine
from realign.errors import ConfigError, SettingsError
from realign.functional.rounding import RoundedWeights, rounding
from realign.models import Lora
from realign.models.network.kv_cache import DecodeContext, KVCache
from realign.samplers.in_process.compiled import fusion as fusion_module
from realign.samplers.in_process.compiled import library as library_module
from realign.samplers.in_process.compiled import trunk as trunk_module
from realign.samplers.in_process.compiled.fused_layers import FusedTrunk, Linear
from realign.samplers.in_process.compiled.fusion import DecodePath, Fusion
from realign.samplers.in_process.compiled.library import CompiledDecode, LibraryError, load_library, open_library
from realign.samplers.in_process.compiled.trunk import CompiledTrunk, Form, StoredLinear, library_products
from realign.samplers.in_process.settings import InProcessSampling
from tests.samplers.in_process.compiled.native import KNOWN, adapted_model, close, requires_compiler, rollout
from tests.samplers.in_process.rollouts import prompts, responses, same, sample_of
from tests.tiny import VOCAB, engine_over, tiny_engine, tiny_model

LENGTH = 48

SHAPES = st.fixed_dictionaries(
    {
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "num_attention_heads": st.sampled_from([4, 8]),
        "head_dim": st.sampled_from([8, 24, 32, 70]),
        "hidden_size": st.sampled_from([32, 56, 104]),
        "intermediate_size": st.sampled_from([48, 101, 600]),
        "num_hidden_layers": st.integers(1, 3),
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "tie_word_embeddings": st.booleans(),
    }
)


def rounds(half):
    return rounding(RoundedWeights()) if half else nullcontext()


def in_torch(model, half=False):
    with rounds(half):
        trunk = Fusion(model, CompiledDecode.off).trunk(LENGTH, torch.float32)
    assert isinstance(trunk, FusedTrunk)
    assert trunk.rounded == half
    return trunk


def compiled(fused):
    library = load_library()
    assert isinstance(library, ctypes.CDLL), library
    return CompiledTrunk(fused, library)


def random_step(trunk, rows, seed=0, length=LENGTH):
    """Tokens and positions of one decode step, and a cache with random keys and values."""
    generator = torch.Generator().manual_seed(seed)
    size = 2 * trunk.fused.turns.shape[-1]
    cache = KVCache(
        {i: (torch.zeros(x.heads[1], 1, size),) * 2 for i, x in enumerate(trunk.fused.layers)}, rows, length
    )
    cache.reach(length)
    for i in range(len(trunk.fused.layers)):
        for kv in cache[i]:
            kv.normal_(generator=generator)
    ids = torch.randint(VOCAB, (rows,), generator=generator)
    positions = torch.randint(length, (rows,), generator=generator)
    return ids, positions, cache


def error(got, want):
    return float((got - want).abs().max() / want.abs().max())


@requires_compiler
@given(
    family=st.sampled_from(["llama", "qwen2", "qwen3", "mistral", "gemma3_text"]),
    shape=SHAPES,
    rows=st.integers(1, 20),
    half=st.booleans(),
)
def test_a_step_matches_torch_for_any_shape_and_number_of_rows(family, shape, rows, half):
    with torch.no_grad():
        model = tiny_model(family, **shape)
        for x in model.parameters():  # biases of 0 and norms of 1 would hide errors
            x.add_(0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(rows)))
        fused = in_torch(model, half)
        trunk = compiled(fused)
        ids, positions, cache = random_step(trunk, rows)
        got = trunk.decode(ids, positions, cache)
        written = [x.clone() for i in range(len(trunk.fused.layers)) for x in cache[i]]
        want = fused(ids, positions, DecodeContext(cache, positions, LENGTH - 1))
        assert error(got, want) <= close(half)
        for ours, theirs in zip(written, (x for i in range(len(trunk.fused.layers)) for x in cache[i]), strict=True):
            assert torch.allclose(ours, theirs, rtol=close(half), atol=close(half))


@requires_compiler
@given(
    form=st.sampled_from([Form.floats, Form.halves]),
    inputs=st.integers(1, 150),
    outputs=st.integers(1, 150),
    turned=st.booleans(),
    threads=st.integers(1, 3),
)
def test_a_weight_is_stored_by_panels_and_rounded_as_torch_rounds(form, inputs, outputs, turned, threads):
    library = load_library()
    assert isinstance(library, ctypes.CDLL)
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs))
    odd = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, -0.0, 1e-40])
    weight.view(-1)[: len(odd)] = odd[: weight.numel()]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        stored = StoredLinear.of(library, form, weight.t().contiguous().t() if turned else weight)
    finally:
        torch.set_num_threads(before)
    values = (weight if form is Form.floats else weight.to(torch.bfloat16)).t()
    want = F.pad(values, (0, -outputs % 64)).unflatten(1, (-1, 64)).transpose(0, 1).flatten()
    assert torch.equal(stored.values.isnan(), want.isnan())
    assert torch.equal(stored.values.nan_to_num(), want.nan_to_num())


@requires_compiler
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen2"])
def test_only_the_library_has_the_weights_if_it_multiplies_faster(monkeypatch, family):
    monkeypatch.setattr(trunk_module, "multiplies_faster", lambda _: True)
    model = tiny_model(family)
    ours, torchs = Fusion(model, CompiledDecode.on), Fusion(model, CompiledDecode.off)
    with rounding(RoundedWeights()):
        first, second, want = (rollout(model, x) for x in (ours, ours, torchs))  # the second reads no weights in torch
        trunk = ours.trunk(LENGTH, torch.float32)
    assert isinstance(trunk, CompiledTrunk)
    assert all(
        isinstance(x, StoredLinear)
        for layer in trunk.fused.layers
        for x in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )
    assert responses(first) == responses(second) == responses(want)
    assert torch.equal(first["logprobs"], second["logprobs"])
    assert torch.allclose(first["logprobs"], want["logprobs"], atol=close(True))
    assert isinstance(ours.trunk(LENGTH, torch.float32).fused.layers[0].qkv, Linear)  # without rounding: as before


@requires_compiler
@given(
    form=st.sampled_from(Form),
    rows=st.integers(1, 300),
    inputs=st.integers(1, 100),
    outputs=st.integers(1, 100),
    threads=st.integers(1, 3),
)
def test_a_product_is_that_of_fp64_in_every_form_and_with_any_number_of_threads(form, rows, inputs, outputs, threads):
    library = load_library()
    assert isinstance(library, ctypes.CDLL)
    if form is Form.tiles:
        form = Form.of_rounded(library)  # other CPUs have no tiles
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    weight = weight.to(torch.bfloat16).float()
    stored = StoredLinear.of(library, form, weight)
    got, sizes = stored.product(x, threads), x.double().abs() @ weight.double().abs().t()
    assert ((got - x.double() @ weight.double().t()).abs() <= 2**-16 * 1.01 * sizes).all()
    for some in (1, 2, rows):
        assert torch.equal(stored.product(x[:some], 1), got[:some])


@requires_compiler
@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,), (2, 0)])
def test_a_stored_layer_is_one_of_torch_for_any_shape_of_rows(shape):
    layer, x = torch.nn.Linear(40, 70), torch.randn(*shape, 40)
    with torch.no_grad():
        stored = StoredLinear.of(load_library(), Form.floats, layer.weight, layer.bias)
        want = layer(x)
        assert tuple(stored.shape) == (70, 40)
        torch.testing.assert_close(stored(x), want)
        torch.testing.assert_close(stored.add_to(torch.ones_like(want), x), 1 + want)


def test_layers_and_head_multiply_by_the_library_unless_it_is_off(monkeypatch):
    monkeypatch.setattr(trunk_module, "load_library", lambda: LibraryError("no C++ compiler is installed"))
    assert library_products() is None
    monkeypatch.setattr(inference_engine, "library_products", lambda: torch.nn.functional.linear)
    for compiled_decode, set_by in ((CompiledDecode.auto, True), (CompiledDecode.off, False)):
        engine = tiny_engine("llama", dtype=torch.bfloat16, sampling=InProcessSampling(compiled_decode=compiled_decode))
        assert (engine.network.abilities.rounded.multiply_by is not None) is set_by


@requires_compiler
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("case", KNOWN)
def test_rollouts_of_known_families_sample_the_same(case, half):
    family, overrides = KNOWN[case]
    model = tiny_model(family, **overrides)
    ours, torchs = Fusion(model, CompiledDecode.on), Fusion(model, CompiledDecode.off)
    with rounds(half):
        got, want = rollout(model, ours), rollout(model, torchs)
    assert (ours.path.now, torchs.path.now) == (DecodePath.compiled, DecodePath.fused)
    assert responses(got) == responses(want)
    assert torch.allclose(got["logprobs"], want["logprobs"], atol=close(half))


@requires_compiler
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rollouts_with_adapters_are_compiled_and_sample_what_the_modules_sample(family, half):
    model = adapted_model(family)
    engine = engine_over(model, dtype=torch.bfloat16 if half else torch.float32)
    batch = engine.generate(sample_of(prompts()), GenerationConfig(n=3, max_new_tokens=24), seed=0)
    assert engine.fusion.path.now is DecodePath.compiled
    assert difference_from_trainer(engine, batch) <= close(half)
    with Lora().without(model):
        base = engine.generate(sample_of(prompts()), GenerationConfig(n=3, max_new_tokens=24), seed=0)
        assert difference_from_trainer(engine, base) <= close(half)
    assert responses(base) != responses(batch)


@requires_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
def test_in_bf16_sampler_and_trainer_differ_as_little_as_in_fp32(monkeypatch, family, threads):
    engine = tiny_engine(family, dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    batch = engine.generate(sample_of(prompts()), GenerationConfig(n=3, max_new_tokens=24), seed=0)

    assert difference_from_trainer(engine, batch) <= close(half=True)


def difference_from_trainer(engine, batch):
    def scores(out, mb):
        return mb.with_tokens(scored=out.logprobs()).select(["scored"])

    scored = engine.forward(batch, MicroBatchSpec(), scores)["scored"]
    mask = batch["loss_mask"]
    assert mask.sum() > 50
    return (scored - batch["logprobs"])[mask].abs().max()


@requires_compiler
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("machine", ["native", *(["x86-64"] if platform.machine() == "x86_64" else [])])
@torch.no_grad()
def test_a_rows_result_depends_neither_on_other_rows_nor_on_threads(tmp_path, half, machine, monkeypatch):
    monkeypatch.setattr(library_module, "FLAGS", (*library_module.FLAGS, f"-march={machine}"))  # x86-64 has no FMA
    # which of 45 columns fill a vector depends on the number of threads
    fused = in_torch(tiny_model("qwen2", intermediate_size=45), half)
    trunk = CompiledTrunk(fused, open_library(tmp_path))
    ids, positions, cache = random_step(trunk, 19)
    together = trunk.decode(ids, positions, cache)
    for threads in (2, 3):
        assert torch.equal(trunk.decode(ids, positions, cache, threads), together)
    for rows in (1, 2, 3, 7):
        assert torch.equal(trunk.decode(ids[:rows], positions[:rows], cache), together[:rows])


@requires_compiler
@torch.no_grad()
def test_a_step_runs_with_the_threads_that_the_system_gives():
    trunk = compiled(in_torch(tiny_model("qwen2")))
    ids, positions, cache = random_step(trunk, 19)
    want, (soft, hard) = trunk.decode(ids, positions, cache), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    trunk.decode(ids, positions, cache, threads=2)  # allocates what a step needs
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, hard))  # no room for the stacks of so many threads
    try:
        got = trunk.decode(ids, positions, cache, threads=64)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert torch.equal(got, want)


def test_without_a_library_torch_decodes_and_the_log_says_why_once(monkeypatch, caplog):
    monkeypatch.setattr(fusion_module, "load_library", lambda: LibraryError("no C++ compiler is installed"))
    model = tiny_model("qwen2")
    fusion = Fusion(model)
    with caplog.at_level(logging.INFO, logger=fusion_module.__name__):
        assert same(rollout(model, fusion), rollout(model, fusion))
    assert fusion.path.now is DecodePath.fused
    lines = [r.getMessage() for r in caplog.records]
    assert lines == ["Decode steps of Qwen2ForCausalLM run in torch, since no C++ compiler is installed"]


def test_other_precisions_and_activations_run_in_torch():
    fusion = Fusion(tiny_model("qwen2"))
    fusion.trunk(8, torch.bfloat16)
    assert fusion.path._logged == "matrix products are not in float32"
    fusion = Fusion(tiny_model("llama", hidden_act="gelu"))
    fusion.trunk(8, torch.float32)
    assert fusion.path._logged == "the activation function is neither SiLU nor GELU with tanh"
    adapted = Fusion(adapted_model())
    adapted.trunk(8, torch.bfloat16)
    assert adapted.path.now is DecodePath.modules
    assert "an adapter" in adapted.obstacle


@requires_compiler
def test_a_library_that_computes_something_else_is_not_used_and_the_log_says_why_once(monkeypatch, caplog):
    measured = iter([0.01, 0.02])
    monkeypatch.setattr(CompiledTrunk, "difference", lambda *_: next(measured))
    fusion = Fusion(tiny_model("qwen2"))
    with caplog.at_level(logging.INFO, logger=fusion_module.__name__):
        for _ in range(3):
            fusion.trunk(8, torch.float32)
            assert fusion.path.now is DecodePath.fused
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.endswith("since hidden states of the compiled library differ by 1.0e-02 (relative) from torch")


@requires_compiler
def test_a_library_that_attends_wrongly_is_not_used_for_short_texts_either(monkeypatch):
    right = trunk_module._layer

    def wrong(*args):
        layer = right(*args)
        layer.scaling *= 3
        return layer

    monkeypatch.setattr(trunk_module, "_layer", wrong)
    with pytest.raises(ConfigError, match="compiled library differ by"):
        tiny_engine("llama", sampling=InProcessSampling(exact=True))
    engine = tiny_engine("llama")
    engine.generate(sample_of([[5]]), GenerationConfig(max_new_tokens=1), seed=0)
    assert engine.fusion.path.now is DecodePath.fused


@requires_compiler
@torch.no_grad()
def test_matrices_that_the_library_multiplies_are_not_also_copied_for_torch():
    model = tiny_model("llama")
    for setting, copied in ((CompiledDecode.auto, False), (CompiledDecode.off, True)):
        trunk = Fusion(model, setting).trunk(LENGTH, torch.float32)
        fused = trunk if isinstance(trunk, FusedTrunk) else trunk.fused
        for ours, layer in zip(fused.layers, model.model.layers, strict=True):
            for linear, module in ((ours.output, layer.self_attn.o_proj), (ours.down, layer.mlp.down_proj)):
                assert torch.equal(linear.weight, module.weight)
                assert (linear.weight.data_ptr() != module.weight.data_ptr()) == copied


@pytest.mark.parametrize("path", [DecodePath.compiled, DecodePath.graphs])
def test_on_accepts_a_library_and_graphs(path):
    choice = Fusion(tiny_model("llama"), CompiledDecode.on).path
    choice.record(path, "it works here")
    with pytest.raises(ConfigError, match="cannot be compiled, since it failed"):
        choice.record(DecodePath.fused, "it failed")


@requires_compiler
def test_a_resumed_run_warns_if_decode_steps_run_elsewhere():
    first = tiny_engine("qwen2", sampling=InProcessSampling(compiled_decode=CompiledDecode.on))
    data, config = sample_of(prompts()), GenerationConfig(max_new_tokens=3)
    first.generate(data, config, seed=0)
    state = first.state_dict()
    assert state["decode"] == "compiled"

    def resumed(setting):
        engine = tiny_engine("qwen2", sampling=InProcessSampling(compiled_decode=setting))
        engine.load_state_dict(state)
        assert engine.state_dict()["decode"] == "compiled"
        return engine

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed(CompiledDecode.on).generate(data, config, seed=0)
    with pytest.warns(UserWarning, match="checkpoint ran in 'compiled', and those of this run in 'fused'"):
        resumed(CompiledDecode.off).generate(data, config, seed=0)


def test_on_requires_fused_rollouts_and_a_library(monkeypatch):
    sampler = InProcessSampling(compiled_decode=CompiledDecode.on)
    with pytest.raises(SettingsError, match="fused_rollout=false: incompatible"):
        TransformersModel("model", fused_rollout=False, sampler=sampler)
    monkeypatch.setattr(
        "realign.samplers.in_process.settings.load_library", lambda: LibraryError("no C++ compiler is installed")
    )
    with pytest.raises(ConfigError, match=r"models.actor.sampler.compiled_decode=on: no C\+\+ compiler"):
        sampler.check("models.actor.sampler")
    InProcessSampling().check("models.actor.sampler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # graphs need no library, exact needs it
    sampler.check("models.actor.sampler")
    with pytest.raises(ConfigError, match=r"models.actor.sampler.exact=true: no C\+\+ compiler"):
        InProcessSampling(exact=True).check("models.actor.sampler")


@requires_compiler
@torch.no_grad()
def test_the_comparison_runs_on_keys_and_values_of_the_model():
    model = tiny_model("llama", num_hidden_layers=12)
    for layer in model.model.layers:  # computes the same of text, but keys of size 1 give scores that amplify rounding
        layer.self_attn.q_proj.weight.mul_(30)
        layer.self_attn.k_proj.weight.div_(30)
    fusion = Fusion(model)
    fusion.trunk(LENGTH, torch.float32)
    assert fusion.path.now is DecodePath.compiled
