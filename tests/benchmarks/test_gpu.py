from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import gpu, gpu_plan, gpu_training
from benchmarks.batches import prompts
from realign.engines.sampling.decode import Rollout


def results(folder):
    return [json.loads(line) for line in (folder / gpu.RESULTS).read_text().splitlines()]


@pytest.mark.slow
def test_each_part_is_a_process_whose_results_are_on_disk_and_a_finished_part_is_not_repeated(tmp_path, capfd):
    words = ["size=tiny", "device=cpu", f"folder={tmp_path}"]
    assert gpu.main([*words, "parts=ratio,update"]) == 0
    machine, fp32, bf16, done, left_out, _ = results(tmp_path)
    assert machine["part"] == "machine"
    assert (fp32["dtype"], bf16["dtype"]) == ("float32", "bfloat16")
    assert fp32["logprob_diff_max"] < 1e-4
    assert done["done"]
    assert "vllm=PYTHON" in left_out["left_out"]
    assert gpu.finished(tmp_path) == {"ratio", "update"}


def test_a_part_that_takes_too_long_ends_and_keeps_its_results(tmp_path, monkeypatch, capsys):
    def run(command, timeout, check):
        gpu.append(tmp_path, {"part": "training", "model": "small"})
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(gpu.subprocess, "run", run)
    assert gpu.main(["size=tiny", f"folder={tmp_path}", "parts=training", "limit=7"]) == 1
    assert results(tmp_path)[1:] == [
        {"part": "training", "model": "small"},
        {"part": "training", "error": "ended after 7 s"},
    ]
    assert not gpu.finished(tmp_path)


def test_no_part_runs_when_the_time_of_all_is_over(tmp_path, monkeypatch, capsys):
    def run(command, timeout, check):
        limits.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout)

    limits: list[float] = []
    monkeypatch.setattr(gpu.subprocess, "run", run)
    assert gpu.main(["size=tiny", f"folder={tmp_path}", "parts=ratio,update", "limit=7", "total=0"]) == 1
    assert limits == [0, 0]


def test_a_shape_that_fails_does_not_end_its_part_but_an_error_of_the_part_does(tmp_path, monkeypatch, capsys):
    def shapes(plan):
        yield {"model": "a", "error": "OutOfMemoryError"}
        yield {"model": "b"}

    def broken(plan):
        raise RuntimeError("this card is not here\nmore")

    monkeypatch.setitem(gpu.PARTS, "training", shapes)
    monkeypatch.setitem(gpu.PARTS, "rollout", broken)
    plan = replace(gpu_plan.TINY, device="cpu", folder=tmp_path)
    gpu.run_part("training", plan)
    gpu.run_part("rollout", plan)
    assert [line.get("model") for line in results(tmp_path)[:2]] == ["a", "b"]
    assert results(tmp_path)[-1] == {"part": "rollout", "error": "RuntimeError: this card is not here"}
    assert gpu.finished(tmp_path) == {"training"}


@pytest.mark.slow
def test_on_a_cpu_every_part_runs(tmp_path, monkeypatch, capsys):
    plan = replace(gpu_plan.TINY, device="cpu", folder=tmp_path)
    draw = Rollout._draw
    for part in gpu.PARTS.keys() - {"trl", "llm"}:  # what these run is tested elsewhere
        gpu.run_part(part, plan)
    lines = results(tmp_path)
    assert gpu.finished(tmp_path) == gpu.PARTS.keys() - {"trl", "llm"}
    assert not [line for line in lines if "error" in line]
    told = {part: [line for line in lines if line["part"] == part] for part in gpu.PARTS}
    peak, trained, compiled, _ = told["training"]
    assert trained["attention"] == "sdpa"
    assert trained["utilization"] == pytest.approx(trained["tflops"] / peak["peak_tflops"], rel=0.3, abs=2e-3)
    assert compiled["torch_compile"] == "eager"
    assert compiled["tokens_per_s"] > 0
    assert trained["estimated_peak_gib"] > 0
    assert told["sampler"][0]["equal_tokens"] > 0.99
    assert 0 < told["sampler"][0]["ended_rows"] < 0.8
    ours, every_step, generate, _ = told["rollout"]
    batching, _ = told["continuous_batching"]
    assert ours["tokens"] == every_step["tokens"] == generate["tokens"] == sum(plan.rollout.lengths(1))
    assert 0 < batching["tokens"] <= ours["tokens"]
    timed, profiled, *_ = told["decode"]
    assert timed["step_ms"] != 0  # the difference of two times
    assert profiled == {"part": "decode", "rows": len(prompts(plan.rollout)), "launches_per_step": 0, "device_ms": 0}
    assert all(told[part][0]["grad_norm"]["equal"] for part in ("resume", "resume_deterministic"))
    kernels = {line["kernel"]: line for line in told["attention"] if "kernel" in line}
    assert kernels["sdpa"]["output"] < 0.02
    assert kernels["sdpa"]["packed_minus_alone"] == 0
    assert "left_out" in kernels["flash"]
    assert Rollout._draw is draw


def test_trl_is_compared_on_the_device_where_it_is_installed(monkeypatch):
    import benchmarks.peer.__main__ as peer

    seen = {}

    def measurements(scenario, steps, threads, **options):
        seen.update(options, scenario=scenario.name)
        yield {"trl_tried": [], "peak_gflops": 1.0}
        keys = ("scenario", "seconds", "ratio", "ratio_range", "tokens_per_second", "utilisation")
        yield dict.fromkeys((*keys, "trl", "trl_tried", "overhead", "peak_mib", "step_mib", "peak_gflops"), 0.0)

    monkeypatch.setattr(gpu, "find_spec", lambda name: object())
    monkeypatch.setattr(peer, "measurements", measurements)
    monkeypatch.setattr(gpu, "matrix_peak", lambda plan: 7e14)
    tried, found = gpu.trl(gpu_plan.FULL)
    assert tried == {"trl_tried": []}
    assert (seen["scenario"], seen["device"], seen["peak"]) == ("gpu", "cuda", 7e14)
    assert not found.keys() & {"overhead", "peak_mib", "step_mib"}


@pytest.mark.parametrize(
    ("scenario", "parameters"), list(zip(gpu_plan.FULL.training, (0.494, 1.544, 1.477), strict=True))
)
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

    monkeypatch.setattr(gpu_training, "_train", train)
    plan = replace(gpu_plan.FULL, device="cpu")
    fits = 16_384
    assert gpu_training.fitting(plan, gpu_plan.LARGE, 1.0) == {"microbatch_tokens": 16_384}
    assert tried == [32_768, 16_384]
    fits = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        gpu_training.fitting(plan, gpu_plan.LARGE, 1.0)
    assert tried[-1] >= gpu_plan.positions(gpu_plan.LARGE)  # a longer sequence would exceed the budget


def test_an_unknown_part_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="unknown part 'trianing'; valid: attention, llm, decode"):
        gpu.main(["device=cpu", f"folder={tmp_path}", "parts=trianing"])
