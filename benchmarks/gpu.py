"""The first 10 minutes on a GPU: correctness first, then speed. Each result is on disk as soon as it is known.

    python -m benchmarks.gpu                      # every part that has no result in runs/gpu yet
    python -m benchmarks.gpu parts=training,trl   # these parts, again
    python -m benchmarks.gpu size=tiny            # smoke test of the same code with tiny shapes, on any device

A part runs in a process of its own and ends after `limit` seconds (150), or when all parts together have taken `total`
seconds (600). It appends JSON lines to `folder`/results.jsonl, so whatever stops the benchmark loses only the
unfinished result.

attention  Outputs and gradients of every attention kernel against fp32, and a packed sequence against itself alone.
llm        `make llm` with 30 steps.
decode     Time of a decode step, its launches, and their time on the device: does the device wait for the host?
ratio      Log-probs of the sampler against those of the training pass, in fp32 and bf16.
training   Peak of matrix products, then GRPO steps of 0.5B, 1.5B and 7B shapes (the last with 4 layers): tokens per
           second, utilization, and peak memory beside the planner's estimate. A micro-batch has 32k tokens, halved
           until it fits. Each once more with `torch_compile`.
long       GRPO steps of the shape and lengths of prime-rl's baselines, with recomputed layers.
update     Weights to vLLM, with vllm=PYTHON: seconds, and log-probs against the trainer's.
resume     A run that was interrupted against one that was not; resume_deterministic: with deterministic=true.
sampler    The decode loop: a step that waits for the device is an error.
rollout    Tokens of responses per second: realign, and transformers' `generate`.
trl        GRPO steps of realign and TRL in alternation, as in `benchmarks.peer`.
continuous_batching  Tokens of responses per second of transformers' continuous batching.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_checks
from benchmarks.gpu_plan import FULL, TINY, Plan, attempt
from benchmarks.gpu_rollout import continuous_batching, rollout, sampler
from benchmarks.gpu_training import long, matrix_peak, training
from benchmarks.report import arguments, facts

RESULTS = "results.jsonl"


def trl(plan: Plan) -> Iterator[dict[str, Any]]:
    """Compare GRPO steps with TRL, or yield the reason why TRL is not measured."""
    if find_spec("trl") is None:
        yield {"left_out": "trl is not installed"}
        return
    from benchmarks.peer.__main__ import measurements

    threads, peak = torch.get_num_threads(), matrix_peak(plan)
    # The other results describe the host: its memory, and timings that do not wait for the device.
    told = (
        "scenario",
        "step",
        "seconds",
        "ratio",
        "ratio_range",
        "tokens_per_second",
        "utilisation",
        "trl",
        "trl_tried",
    )
    for result in measurements(plan.trl, 2, threads, device=plan.device, micro_batches=(32, 64), peak=peak):
        yield {key: result[key] for key in told if key in result}


PARTS: dict[str, Callable[[Plan], dict[str, Any] | Iterator[dict[str, Any]]]] = {
    "attention": gpu_checks.attention,
    "llm": gpu_checks.language,
    "decode": gpu_checks.decode,
    "ratio": gpu_checks.ratio,
    "training": training,
    "long": long,
    "update": gpu_checks.update,
    "resume": gpu_checks.resume,
    "resume_deterministic": partial(gpu_checks.resume, deterministic=True),
    "sampler": sampler,
    "rollout": rollout,
    "trl": trl,
    "continuous_batching": continuous_batching,
}
"""Parts, the most telling first."""


def run_part(name: str, plan: Plan) -> None:
    """Append the results of a part to the file of results; a last line with `done` marks a part that did not fail."""
    started = time.perf_counter()
    made = attempt(lambda: PARTS[name](plan))
    results = iter([made]) if isinstance(made, dict) else made
    while result := attempt(lambda: next(results, {})):
        append(plan.folder, {"part": name, **result})
        if result.keys() == {"error"}:  # of the part, not of one of its kernels or shapes
            return
    append(plan.folder, {"part": name, "done": True, "part_s": round(time.perf_counter() - started, 1)})


def append(folder: Path, line: dict[str, Any]) -> None:
    """Add a line to the file of results, and print it."""
    text = json.dumps(line)
    with (folder / RESULTS).open("a", encoding="utf-8") as file:
        file.write(text + "\n")
    print(text, flush=True)


def finished(folder: Path) -> set[str]:
    """Return the parts that have run to their end."""
    if not (folder / RESULTS).exists():
        return set()
    lines = map(json.loads, (folder / RESULTS).read_text(encoding="utf-8").splitlines())
    return {line["part"] for line in lines if line.get("done")}


def main(given: list[str] | None = None) -> int:
    """Run the requested parts one after another, each in a process of its own; return 1 if one of them failed."""
    cuda = torch.cuda.is_available()
    defaults = {"parts": "", "size": "full" if cuda else "tiny", "device": "cuda" if cuda else "cpu", "limit": "150"}
    words = arguments({**defaults, "total": "600", "folder": str(FULL.folder), "vllm": "", "child": ""}, given)
    plan = replace(
        {"full": FULL, "tiny": TINY}[words["size"]],
        device=words["device"],
        folder=Path(words["folder"]),
        vllm=words["vllm"],
    )
    if words["child"]:
        run_part(words["child"], plan)
        return 0
    plan.folder.mkdir(parents=True, exist_ok=True)
    parts = words["parts"].split(",") if words["parts"] else [p for p in PARTS if p not in finished(plan.folder)]
    if wrong := [part for part in parts if part not in PARTS]:
        sys.exit(f"unknown part {wrong[0]!r}; valid: {', '.join(PARTS)}")
    name = torch.cuda.get_device_name() if plan.device == "cuda" else "CPU (smoke test; its figures mean nothing)"
    append(plan.folder, {"part": "machine", "device": name, "size": words["size"], **facts()})
    settings = [f"{key}={words[key]}" for key in ("size", "device", "folder", "vllm")]
    end, failed = time.monotonic() + float(words["total"]), False
    for part in parts:
        command = [sys.executable, "-m", "benchmarks.gpu", f"child={part}", *settings]
        try:
            limit = min(float(words["limit"]), max(0.0, end - time.monotonic()))
            code = subprocess.run(command, timeout=limit, check=False).returncode
            if code:
                append(plan.folder, {"part": part, "error": f"ended with exit code {code}"})
        except subprocess.TimeoutExpired:
            append(plan.folder, {"part": part, "error": f"ended after {limit:.0f} s"})
        failed |= part not in finished(plan.folder)
    print(f"results: {plan.folder / RESULTS}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
