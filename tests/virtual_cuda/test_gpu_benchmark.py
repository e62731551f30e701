"""Every part of `python -m benchmarks.gpu` runs on the device: the first minutes on a GPU are too dear for typos."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import gpu, gpu_plan, gpu_rollout
from tests.data.text_tokenizer import make_tokenizer
from tests.demo.reasoning_package import installed
from tests.tiny import tiny_model

ELSEWHERE = {"trl"}  # in processes of its own, with TRL


@pytest.fixture
def plan(tmp_path):
    return replace(gpu_plan.TINY, device="cuda", folder=tmp_path)


def results(plan, part):
    gpu.run_part(part, plan)
    lines = [json.loads(line) for line in (plan.folder / gpu.RESULTS).read_text().splitlines()]
    assert not [line for line in lines if "error" in line]
    assert lines.pop()["done"]
    return lines


@pytest.mark.parametrize("part", sorted(gpu.PARTS.keys() - ELSEWHERE - {"llm"}))
def test_a_part_runs(part, plan, monkeypatch):
    # transformers' continuous batching needs real streams and graphs
    monkeypatch.setattr(gpu_rollout, "_continuous_batching", lambda *_: {"left_out": "not on this device"})
    lines = results(plan, part)
    assert lines
    if part == "attention":  # the device has a stand-in for torch's kernel
        assert {"varlen", "sdpa"} <= {line["kernel"] for line in lines if "left_out" not in line}
    if part.startswith("resume"):
        assert lines[0]["grad_norm"]["equal"]


def test_the_language_model_runs(plan, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    tokenizer = make_tokenizer(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    tiny_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(gpu.gpu_checks, "find_spec", lambda name: object())
    monkeypatch.setattr("realign.demo.llm.smollm2", lambda: folder)
    reward, main = tmp_path / "reward.py", gpu.gpu_checks.llm.main  # a random model answers nothing right
    reward.write_text("def score(prompt, response, row):\n    return len(response) / 100\n")
    own = [f"interfaces.reward.function={reward}:score", "interfaces.reward.known_answer=null"]
    small = ["evaluation.batch_prompts=8", "interfaces.reward.workers=0"]
    monkeypatch.setattr(gpu.gpu_checks.llm, "main", lambda words: main([*words, *own, *small]))
    with pytest.MonkeyPatch.context() as patch:
        package = installed(tmp_path / "packages", patch)
        next(package)
        (line,) = results(plan, "llm")
        next(package, None)
    assert len(line["reward_curve"]) == plan.llm_steps
