from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import gpu, gpu_plan
from benchmarks.batches import prompts
from realign.samplers.in_process.decode import Rollout


def results(folder):
    return [json.loads(line) for line in (folder / gpu.RESULTS).read_text().splitlines()]


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
    assert told["long"][0]["utilization"] > 0
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
