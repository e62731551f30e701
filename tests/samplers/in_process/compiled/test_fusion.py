from __future__ import annotations

import logging

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec
from realign.engines.training.optimizer import OptimizerSpec
from realign.models.network.decoder import ModuleTrunk
from realign.samplers.in_process.compiled import fusion
from realign.samplers.in_process.compiled.fusion import Fusion
from realign.samplers.in_process.compiled.library import CompiledDecode
from tests.samplers.in_process.compiled.native import KNOWN, rollout
from tests.samplers.in_process.rollouts import prompts, responses, sample_of
from tests.tiny import random_sample, tiny_engine, tiny_model


@pytest.mark.parametrize("case", KNOWN)
def test_known_families_sample_the_same(case):
    family, overrides = KNOWN[case]
    model = tiny_model(family, **overrides)
    for norm in (m for name, m in model.named_modules() if name.endswith("norm")):  # weights of 1 would hide errors
        torch.nn.init.normal_(norm.weight, mean=1, std=0.3)
    fused = Fusion(model, CompiledDecode.off)
    got, want = rollout(model, fused), rollout(model, None)
    assert fused.obstacle is None
    assert len({len(r) for r in responses(want)}) > 3
    assert responses(got) == responses(want)
    assert torch.allclose(got["logprobs"], want["logprobs"], atol=1e-5)


def test_a_model_that_computes_something_else_runs_its_modules_and_the_log_says_why_once(caplog):
    model = tiny_model("llama")
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: 1.01 * type(mlp).forward(mlp, x)
    fused = Fusion(model, CompiledDecode.off)
    with caplog.at_level(logging.INFO, logger=fusion.__name__):
        for _ in range(2):
            assert isinstance(fused.trunk(40, torch.float32), ModuleTrunk)
            assert "hidden states differ by" in fused.obstacle
            with torch.no_grad():  # training changes the digits of the difference
                model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    assert len(caplog.records) == 1


def test_unknown_parts_run_the_modules():
    obstacles = {}

    def by_passed(what, model):
        fused = Fusion(model, CompiledDecode.off)
        assert isinstance(fused.trunk(40, torch.float32), ModuleTrunk)
        obstacles[what] = fused.obstacle

    dynamic = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
    by_passed("positions", tiny_model("llama", rope_parameters=dynamic))
    heard = tiny_model("llama")
    heard.model.layers[0].register_forward_hook(lambda *_: None)
    by_passed("hooks", heard)
    more = tiny_model("qwen2")
    more.model.layers[0].extra = torch.nn.Identity()
    by_passed("parts", more)
    half = tiny_model("qwen2")
    half.model.layers[0].mlp.down_proj.half()
    by_passed("dtypes", half)
    assert "type 'dynamic'" in obstacles["positions"]
    assert "hooks" in obstacles["hooks"]
    assert "'extra'" in obstacles["parts"]
    assert "Linear in float16" in obstacles["dtypes"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_optimizer_step_is_seen_by_the_next_rollout(checkpointing):
    def run(fused_rollout):
        engine = tiny_engine(
            optimizer=OptimizerSpec(lr=1e-2), fused_rollout=fused_rollout, gradient_checkpointing=checkpointing
        )
        config = GenerationConfig(max_new_tokens=12)
        data = sample_of(prompts())
        first = engine.generate(data, config, seed=1)

        def loss(output, minibatch):
            return -output.logprobs(temperature=1.0).sum(), {}

        spec = MicroBatchSpec(max_tokens_per_microbatch=64)
        engine.train_batch(random_sample([[9, 7], [12]]), spec, loss, lambda sample: torch.tensor(3.0))
        return first, engine.generate(data, config, seed=1), engine.fusion

    (first, second, fused), (want_first, want_second, none) = run(True), run(False)
    assert none is None
    assert fused.obstacle is None
    assert responses(first) == responses(want_first)
    assert responses(second) == responses(want_second)
    assert responses(first) != responses(second)
    assert torch.allclose(second["logprobs"], want_second["logprobs"], atol=1e-5)


def test_a_rollout_in_low_precision():
    engine = tiny_engine("qwen3", dtype=torch.bfloat16)
    out = engine.generate(sample_of(prompts()), GenerationConfig(max_new_tokens=12, n=2), seed=0)
    assert engine.fusion.obstacle is None
    spec = MicroBatchSpec(max_tokens_per_microbatch=512)
    scored = engine.forward(
        out, spec, lambda o, d: d.with_data({"again": o.logprobs()}, lengths=d.lengths["input_ids"])
    )
    mask = out["loss_mask"]
    assert (scored["again"][mask] - out["logprobs"][mask]).abs().mean() < 0.02
