from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from realign.api import GenerationConfig, MicroBatchSpec
from realign.engines import LoadBalancing, OptimizerSpec, TransformersModel
from realign.errors import ConfigError, SettingsError
from realign.models import Lora, TopLayers
from realign.models.network.compiled_layers import CompiledForward, TorchCompile
from realign.models.parts import whole
from realign.ranks import current
from tests.engines.distributed.run_ranks import run_ranks
from tests.families import family_model
from tests.samplers.in_process.rollouts import prompts, responses, sample_of
from tests.tiny import STEP, engine_over, random_sample, save_tiny, tiny_engine, tiny_model, train, weights

BATCHES = [((9 + i, 4, 6), (12,), (3, 5 + i), (8, 2, 2, 1)) for i in range(3)]
"""Lengths of batches that differ in the number of tokens."""


@pytest.fixture(autouse=True)
def empty_compiler():
    """Drop compiled code and its statistics."""
    torch._dynamo.reset()
    counters.clear()


def scores(output, data):
    return data.with_tokens(logprobs=output.logprobs())


def logprobs(engine, data):
    return engine.forward(data, MicroBatchSpec(), scores)["logprobs"]


def check_same_training(family, backend, **engine):
    """Train an engine with and without compiled layers on batches of several sizes, and compare weights and scores."""
    plain, ours = (tiny_engine(family, optimizer=STEP, torch_compile=c, **engine) for c in (TorchCompile.off, backend))
    for i, lengths in enumerate(BATCHES):
        data = random_sample(lengths, seed=i)
        for n in (1, 3):
            a, b = (train(x, data, MicroBatchSpec(n_microbatches=n)) for x in (plain, ours))
            torch.testing.assert_close(b["grad_norm"].total, a["grad_norm"].total, rtol=1e-5, atol=0)
        torch.testing.assert_close(weights(ours), weights(plain), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(logprobs(ours, data), logprobs(plain, data), atol=1e-5, rtol=1e-5)
    return ours


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt", "phi3", "qwen3_moe"])
def test_compiled_layers_train_and_score_as_the_original_layers(family):
    check_same_training(family, TorchCompile.eager)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_compiled_backward_passes_are_those_of_the_original_layers(checkpointing):
    check_same_training("qwen2", TorchCompile.aot_eager, gradient_checkpointing=checkpointing)


@pytest.mark.slow
def test_new_lengths_and_more_layers_compile_nothing_and_only_attention_breaks_graphs():
    engine = tiny_engine(
        optimizer=STEP, torch_compile=TorchCompile.eager, model={"num_hidden_layers": 12}, gradient_checkpointing=True
    )
    graphs = []
    for i, lengths in enumerate(BATCHES):
        for n in (1, 3):
            train(engine, random_sample(lengths, seed=i), MicroBatchSpec(n_microbatches=n))
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == graphs[:1] * len(graphs)
    assert 0 < graphs[0] <= 12
    assert len(counters["graph_break"]) == 1
    assert "_dispatch" in next(iter(counters["graph_break"]))


def test_rollouts_run_the_original_layers_and_copies_of_layers_use_their_own_weights():
    compiled, plain = (
        tiny_engine(torch_compile=c, fused_rollout=False) for c in (TorchCompile.eager, TorchCompile.off)
    )
    graphs = counters["stats"]["unique_graphs"]
    config = GenerationConfig(n=2, max_new_tokens=6)
    got, want = (engine.generate(sample_of(prompts()), config, seed=0) for engine in (compiled, plain))
    assert responses(got) == responses(want)
    assert torch.equal(got["logprobs"], want["logprobs"])
    assert counters["stats"]["unique_graphs"] == graphs > 0
    layer = compiled.module.model.layers[0]
    copied = copy.deepcopy(layer)
    assert isinstance(copied.forward, CompiledForward)
    assert copied.forward._layer is copied
    assert layer.forward._layer is layer


@pytest.mark.parametrize(
    ("trains", "backend"),
    [
        (Lora(rank=2, alpha=4), TorchCompile.eager),
        (Lora(rank=2, alpha=4, dropout=0.5), TorchCompile.aot_eager),
        (TopLayers(1), TorchCompile.aot_eager),
    ],
    ids=str,
)
@pytest.mark.slow
def test_adapters_and_partly_frozen_models_train_as_without_compilation(tmp_path, trains, backend):
    folder, data = str(save_tiny(tmp_path / "m")), random_sample(BATCHES[0])
    trained = []
    for compiled in (TorchCompile.off, backend):
        spec = TransformersModel(folder, trains=trains, optimizer=STEP, torch_compile=compiled, device="cpu")
        engine = spec.load("actor", seed=0).engine
        reference = engine.reference()
        start = logprobs(engine, data)
        train(engine, data)
        train(engine, data, MicroBatchSpec(n_microbatches=2))
        kept = reference(data, MicroBatchSpec(), scores)["logprobs"]
        assert (logprobs(engine, data) - start).abs().max() > 1e-4
        torch.testing.assert_close(kept, start, atol=1e-5, rtol=1e-5)
        trained.append(weights(engine))
    torch.testing.assert_close(trained[1], trained[0], atol=1e-6, rtol=1e-5)


def sharded(folder: Path, backend: TorchCompile, checkpointing: bool, dtype: str) -> dict[str, Any]:
    """Train on the ranks of a group, or alone; return the weights, responses and the number of compiled graphs."""
    torch.set_num_threads(1)
    spec = TransformersModel(
        str(folder),
        device="cpu",
        optimizer=STEP,
        torch_compile=backend,
        gradient_checkpointing=checkpointing,
        dtype=dtype,
    )
    engine = spec.load("actor", seed=0).engine
    for i, lengths in enumerate(BATCHES):
        train(engine, random_sample(lengths, seed=i), MicroBatchSpec(max_tokens_per_microbatch=16))
    out = engine.generate(sample_of(prompts()), GenerationConfig(n=1, max_new_tokens=4), seed=0)
    gathered = {name: whole(x.detach()).clone() for name, x in engine.weights().items()}
    return {
        "weights": gathered,
        "ids": out["input_ids"],
        "graphs": counters["stats"]["unique_graphs"],
        "rank": current().rank,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointing", "dtype"),
    [(False, "float32"), (True, "bfloat16"), pytest.param(True, "float32", marks=pytest.mark.very_slow)],
)
def test_ranks_train_compiled_layers_as_original_ones(tmp_path, checkpointing, dtype):
    folder = save_tiny(tmp_path / "m")
    ranks = run_ranks(2, sharded, folder, TorchCompile.aot_eager, checkpointing, dtype)
    want = run_ranks(2, sharded, folder, TorchCompile.off, checkpointing, dtype)
    for ours, plain in zip(ranks, want, strict=True):
        atol = 2e-6 if dtype == "float32" else 1e-4
        torch.testing.assert_close(ours["weights"], plain["weights"], atol=atol, rtol=1e-5)
        assert torch.equal(ours["ids"], plain["ids"])
        assert 0 < ours["graphs"] <= 12
        assert plain["graphs"] == 0


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("bloom", r"models\.actor\.torch_compile=eager: requires a model that can run packed"),
        ("lfm2", r"models\.actor\.torch_compile=eager: model family .* has recurrent layers"),
    ],
)
def test_models_whose_layers_cannot_be_compiled_are_rejected(family, message):
    model = tiny_model(family) if family == "bloom" else family_model(family)
    with pytest.raises(ConfigError, match=message):
        engine_over(model, torch_compile=TorchCompile.eager)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"load_balancing": LoadBalancing()}, "load_balancing"),
        ({"load_in_4bit": True, "trains": Lora(merge_on_save=False)}, "load_in_4bit=true"),
    ],
)
def test_settings_that_cannot_be_compiled_are_rejected(settings, key):
    with pytest.raises(SettingsError, match=f"torch_compile=inductor: incompatible with {key}"):
        TransformersModel("model", optimizer=OptimizerSpec(), torch_compile="inductor", **settings)


def test_a_compiler_that_fails_is_reported_with_the_setting(monkeypatch):
    def broken(self, *args, **keywords):
        raise RuntimeError("no C++ compiler\nlong trace")

    monkeypatch.setattr(CompiledForward, "__call__", broken)
    message = (
        r"models\.actor\.torch_compile=eager: the layers cannot be compiled: RuntimeError: no C\+\+ compiler\. Set"
    )
    with pytest.raises(ConfigError, match=message):
        tiny_engine(torch_compile=TorchCompile.eager)
