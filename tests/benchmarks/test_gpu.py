from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import gpu, gpu_plan
from realign.engines.sampling.decode import Rollout


@pytest.mark.slow
def test_on_a_cpu_every_part_runs_and_the_last_line_is_json(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    draw = Rollout._draw
    gpu.main(["device=cpu"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["peak_tflops"] > 0
    (trained,) = report["training"]
    assert "error" not in trained
    assert trained["attention"] == "sdpa"
    assert trained["utilisation"] == pytest.approx(trained["tflops"] / report["peak_tflops"], rel=0.3, abs=2e-3)
    assert trained["compiled"]["tokens_per_s"] > 0
    assert report["sampler"]["equal_tokens"] > 0.99
    assert 0 < report["sampler"]["ended_rows"] < 0.8
    sides = [report["rollout"][name] for name in ("realign", "generate", "continuous_batching")]
    sides += [report["rollout"][f"realign_{name}"] for name in ("sync_every_step", "kept_memory")]
    assert all("error" not in side for side in sides), sides
    assert sides[0]["tokens"] == sides[1]["tokens"] == sum(gpu.CPU.rollout.lengths(1))
    assert 0 < sides[2]["tokens"] <= sides[0]["tokens"]
    assert report["trl"] == {"left_out": "trl is not installed"}
    assert Rollout._draw is draw


def test_trl_is_compared_on_the_device_where_it_is_installed(monkeypatch):
    import benchmarks.peer.__main__ as peer

    seen = {}

    def compare(scenario, **options):
        seen.update(options, scenario=scenario.name)
        keys = ("scenario", "seconds", "ratio", "ratio_range", "tokens_per_second", "utilisation")
        return dict.fromkeys((*keys, "trl", "trl_tried", "overhead", "peak_mib", "step_mib", "peak_gflops"), 0.0)

    monkeypatch.setattr(gpu, "find_spec", lambda name: object())
    monkeypatch.setattr(peer, "compare", compare)
    found = gpu.trl(gpu.CUDA, 7e14)
    assert (seen["scenario"], seen["device"], seen["peak"]) == ("gpu", "cuda", 7e14)
    assert not found.keys() & {"overhead", "peak_mib", "step_mib"}


@pytest.mark.parametrize(("scenario", "parameters"), list(zip(gpu.CUDA.training, (0.494, 1.544), strict=True)))
def test_the_shapes_are_those_of_qwen2(scenario, parameters):
    config = scenario.config(tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(parameters, abs=1e-3)


@pytest.mark.slow
def test_the_budget_is_halved_until_the_step_fits(monkeypatch):
    tried = []

    def train(plan, scenario, budget, peak, **engine):
        tried.append(budget)
        if budget > fits:
            raise torch.cuda.OutOfMemoryError("no memory")
        return {"microbatch_tokens": budget}

    monkeypatch.setattr(gpu, "_train", train)
    plan = replace(gpu.CUDA, device="cpu")
    fits = 16_384
    assert gpu.training(plan, gpu_plan.LARGE, 1.0) == {"microbatch_tokens": 16_384, "compiled": {}}
    assert tried == [32_768, 16_384, 16_384]  # the last one with compiled layers
    fits = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        gpu.training(plan, gpu_plan.LARGE, 1.0)
    assert tried[-1] >= gpu.positions(gpu_plan.LARGE)  # a longer sequence would exceed the budget


def test_a_part_that_fails_is_reported_and_the_others_run(capsys, monkeypatch):
    def fail(*args):
        raise RuntimeError("this card is not here\nmore")

    monkeypatch.setattr(gpu, "training", fail)
    gpu.main(["device=cpu", "parts=training"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["training"] == [{"model": "tiny", "error": "RuntimeError: this card is not here"}]


def test_an_unknown_part_is_refused():
    with pytest.raises(SystemExit, match="unknown part 'trianing'; valid: peak, training, rollout, sampler, trl"):
        gpu.main(["device=cpu", "parts=trianing"])
