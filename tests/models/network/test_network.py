"""Test that sampler and loss ignore tokens beyond `vocabulary`."""

from __future__ import annotations

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.engines import TransformersModel
from realign.errors import ConfigError
from realign.models import Causal
from realign.models.network.passes import ParallelPasses
from realign.models.network.settings import NetworkSettings, TorchCompile
from tests.tiny import save_tiny, tiny_model

WORDS = 60


def load(path, vocabulary=WORDS, **fields):
    model = TransformersModel(str(path), device="cpu", head=Causal(vocabulary=vocabulary), **fields)
    return model.load("actor", seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "m", "gpt2")


def rollout(machine, n=20):
    prompts = SequenceSample.from_sequences(["a", "b"], {"prompt_ids": [[[5, 90, 7]], [[8]]]})  # prompts may contain 90
    return machine.generate(prompts, GenerationConfig(n=n, max_new_tokens=8, fixed_length=True), seed=3)


def keep(out, mb):
    return mb.with_tokens(now=out.logprobs(where_T=mb["loss_mask"]))


def test_seed_a7_other_tokens_are_never_sampled_and_log_probs_are_of_the_rest(folder):
    machine = load(folder).engine
    data = rollout(machine)
    sampled = data["input_ids"][data["loss_mask"]]
    assert int(sampled.max()) < WORDS
    assert int(rollout(load(folder, vocabulary=None).engine)["input_ids"][data["loss_mask"]].max()) >= WORDS
    ids, mask, logprobs = (data.sequences(key)[0] for key in ("input_ids", "loss_mask", "logprobs"))
    logits = tiny_model("gpt2", attention="eager")(ids[None]).logits[0, :-1, :WORDS].double()
    expected = logits.log_softmax(-1).gather(-1, ids[1:, None].clamp(max=WORDS - 1))[:, 0]
    torch.testing.assert_close(logprobs[1:][mask[1:]].double(), expected[mask[1:]], atol=1e-5, rtol=0)
    scored = machine.forward(data, MicroBatchSpec(), keep)
    torch.testing.assert_close(scored["now"], data["logprobs"], atol=1e-5, rtol=0)


def test_a_response_with_another_token_and_settings_out_of_range_are_refused(folder):
    machine = load(folder).engine
    data = SequenceSample.from_sequences(["a"], {"input_ids": [[[5, 90]]], "loss_mask": [[[False, True]]]})
    with pytest.raises(ValueError, match=r"targets_N must be ids in \[0, 60\), found 90 to 90"):
        machine.forward(data, MicroBatchSpec(), keep)
    with pytest.raises(ConfigError, match=r"models\.actor\.head\.vocabulary=98: must be at most 97"):
        load(folder, vocabulary=98)


def test_load_balancing_and_compiled_layers_rule_out_parallel_passes() -> None:
    plain, compiled = NetworkSettings(), NetworkSettings(torch_compile=TorchCompile.eager)
    assert plain.restrict(load_balancing=False) == plain
    for restricted in (plain.restrict(load_balancing=True), compiled.restrict(load_balancing=False)):
        assert restricted.parallel_passes is ParallelPasses.off
