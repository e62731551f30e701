from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from realign.api import GenerationConfig, MicroBatchSpec
from realign.errors import ConfigError
from realign.models.network.compiled_layers import CompiledForward, TorchCompile
from tests.families import family_model
from tests.samplers.in_process.rollouts import prompts, responses, sample_of
from tests.tiny import STEP, engine_over, random_sample, tiny_engine, tiny_model, train, weights

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
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_compiled_layers_train_and_score_as_the_original_layers(family):
    check_same_training(family, TorchCompile.eager)


@pytest.mark.slow
def test_gradients_of_compiled_backward_passes_are_those_of_the_original_layers():
    check_same_training("qwen2", TorchCompile.aot_eager, gradient_checkpointing=True)


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


def test_a_compiler_that_fails_is_reported_with_the_setting(monkeypatch):
    def broken(self, *args, **keywords):
        raise RuntimeError("no C++ compiler\nlong trace")

    monkeypatch.setattr(CompiledForward, "__call__", broken)
    message = (
        r"models\.actor\.torch_compile=eager: the layers cannot be compiled: RuntimeError: no C\+\+ compiler\. Set"
    )
    with pytest.raises(ConfigError, match=message):
        tiny_engine(torch_compile=TorchCompile.eager)
