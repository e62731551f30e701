"""Hardware utilization of training and rollout. The last line is one JSON object.

    python -m benchmarks.gpu                      # CUDA: Qwen2 with 0.5B and 1.5B weights
    python -m benchmarks.gpu parts=peak,training  # some parts only
    python -m benchmarks.gpu device=cpu           # smoke test of the same code with tiny shapes, in seconds

peak       Peak rate of matrix products: the best of several square products in bf16.
training   GRPO training steps of each shape with bf16 compute and fp32 weights. Batches have long-tailed lengths and
           are packed to 32k tokens per micro-batch, halved until a micro-batch fits in memory. Reports tokens per
           second, useful FLOP/s and their fraction of the peak, peak memory with the full vocabulary of 152k, and the
           kernel of packed attention. The prompt of a group counts once, and recomputation does not count. The same
           steps also run with `torch_compile`.
rollout    Tokens of responses per second for the same prompts and lengths: realign, realign with a synchronization at
           every decode step, with kept memory and with CUDA graphs, transformers' `generate` (a batch runs until its
           longest response ends) and transformers' continuous batching.
sampler    The decode loop: a step that waits for the device is an error. Compares samples with and without
           synchronization at every step, and counts the memory that a further rollout allocates.
trl        GRPO steps of realign and TRL in alternation, as in `benchmarks.peer`. Skipped if TRL is not installed.

A failing part is reported with its error, and the other parts still run.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.batches import TrainStep, make_actor, make_rollout, prompts
from benchmarks.gpu_sampler import check_sampler
from benchmarks.memory import MemoryCount
from benchmarks.peer.side_realign import forced_lengths
from benchmarks.peer.side_trl import ForcedLengths
from benchmarks.peer.work import EOS, PAD, SCENARIOS, Scenario
from benchmarks.report import arguments, facts, table
from realign.api import GenerationConfig, Lengths, SequenceSample
from realign.engines.network.compiled_layers import TorchCompile
from realign.engines.network.kernels import AttentionArgs, Backend, choose_backend
from realign.engines.network.settings import NetworkSettings
from realign.engines.sampling.in_process import InProcessSampling

GIB = 2**30
PARTS = ("peak", "training", "rollout", "sampler", "trl")


@dataclass(frozen=True)
class Plan:
    """Settings of the benchmark for a kind of device."""

    device: str
    dtype: torch.dtype
    matrix: tuple[int, ...]
    """Sizes of the matrix products that measure the peak."""
    training: tuple[Scenario, ...]
    budget: int
    """Token budget of a micro-batch."""
    rollout: Scenario
    trl: Scenario
    steps: int
    """Number of measured training steps, after one warm-up step."""
    compiler: TorchCompile
    """Backend for training with compiled layers."""


LARGE = Scenario(
    "qwen2_0.5b",
    prompts=24,
    group=8,
    max_new=4096,
    mean_new=512,
    prompt_low=64,
    prompt_high=256,
    vocabulary=151_936,
    hidden=896,
    layers=24,
    heads=14,
    kv_heads=2,
    mlp=4864,
)
CUDA = Plan(
    device="cuda",
    dtype=torch.bfloat16,
    matrix=(4096, 8192, 16_384),
    training=(LARGE, replace(LARGE, name="qwen2_1.5b", hidden=1536, layers=28, heads=12, mlp=8960)),
    budget=32_768,
    rollout=replace(LARGE, name="rollout_0.5b", prompts=32, max_new=512, mean_new=128),
    trl=SCENARIOS["gpu"],
    steps=3,
    compiler=TorchCompile.inductor,
)
CPU = Plan(
    device="cpu",
    dtype=torch.bfloat16,
    matrix=(64, 128),
    training=(SCENARIOS["tiny"],),
    budget=64,
    rollout=SCENARIOS["tiny"],
    trl=SCENARIOS["tiny"],
    steps=1,
    compiler=TorchCompile.eager,
)


def synchronize(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], object], device: str) -> float:
    """Return the seconds of a call, including its work on the device."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def release(device: str) -> None:
    """Free unreferenced memory of the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def matrix_peak(plan: Plan, repeats: int = 10) -> float:
    """Return the FLOP/s of the best of several matrix products."""
    best = 0.0
    for n in plan.matrix:
        a, b = (torch.randn(n, n, device=plan.device, dtype=plan.dtype) for _ in range(2))
        timed(lambda a=a, b=b: a @ b, plan.device)
        seconds = timed(lambda a=a, b=b: [a @ b for _ in range(repeats)], plan.device)
        best = max(best, repeats * 2 * n**3 / seconds)
    return best


def attention_backend(plan: Plan, scenario: Scenario) -> str:
    """Return the kernel of packed attention for layers of this shape."""
    size = scenario.hidden // scenario.heads
    q = torch.empty(1, scenario.heads, 1, size, device=plan.device, dtype=plan.dtype)
    return choose_backend(Backend.auto, q, q, AttentionArgs(size**-0.5, 0.0, None, None, None)).value


def positions(scenario: Scenario) -> int:
    """Return the number of positions that a model needs for this scenario."""
    return max(2048, scenario.prompt_high + scenario.max_new)


def training(plan: Plan, scenario: Scenario, peak: float) -> dict[str, Any]:
    """Measure training steps of one shape at the largest token budget that fits in memory."""
    budget = plan.budget
    while True:
        try:
            found = _train(plan, scenario, budget, peak)
            break
        except torch.cuda.OutOfMemoryError:
            if budget < 2 * positions(scenario):
                raise
            budget //= 2
        release(plan.device)
    release(plan.device)
    compiled = attempt(
        lambda: _train(plan, scenario, budget, peak, network=NetworkSettings(torch_compile=plan.compiler))
    )
    keys = ("step_s", "tokens_per_s", "utilisation", "peak_gib", "error")
    return found | {"compiled": {key: compiled[key] for key in keys if key in compiled}}


def _train(plan: Plan, scenario: Scenario, budget: int, peak: float, **engine: Any) -> dict[str, Any]:
    actor = make_actor(
        scenario,
        device=plan.device,
        dtype=plan.dtype,
        config={"tie_word_embeddings": True, "max_position_embeddings": positions(scenario)},
        **engine,
    )
    step, batch = TrainStep(actor, scenario), make_rollout(scenario)
    step(batch, budget)
    seconds = statistics.median(timed(lambda: step(batch, budget), plan.device) for _ in range(plan.steps))
    loaded, most = _memory(plan, lambda: step(batch, budget))
    given = [int(mask.sum()) for mask in batch.sequences("prompt_mask")][:: scenario.group]
    flops = scenario.flops(given, scenario.lengths(1))["training"]
    sampled, tokens = int(batch["loss_mask"].sum()), batch.lengths["input_ids"].total
    return {
        "parameters": sum(p.numel() for p in actor.machine.network.parameters()),
        "vocabulary": scenario.vocabulary,
        "microbatch_tokens": budget,
        "tokens": tokens,
        "step_s": round(seconds, 4),
        "tokens_per_s": round(tokens / seconds),
        "tflops": round(flops / seconds / 1e12, 4),
        "utilisation": round(flops / seconds / peak, 4),
        "loaded_gib": round(loaded / GIB, 3),
        "peak_gib": round(most / GIB, 3),
        "logits_gib": round(4 * min(sampled, budget) * scenario.vocabulary / GIB, 3),
        "attention": attention_backend(plan, scenario),
    }


def _memory(plan: Plan, call: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes on the device before a call (0 on a CPU) and the peak during the call."""
    if plan.device != "cuda":
        with MemoryCount() as count:
            call()
        return 0, count.peak
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return before, torch.cuda.max_memory_allocated()


def rollout(plan: Plan) -> dict[str, Any]:
    """Measure response tokens per second of realign, `generate` and continuous batching."""
    scenario = plan.rollout
    sides = {
        "realign": _ours,
        "realign_sync_every_step": partial(_ours, sync_every=1),
        "realign_kept_memory": partial(_ours, keep_memory=True),
        **({"realign_graphs": partial(_ours, keep_memory=True, cuda_graphs=True)} if plan.device == "cuda" else {}),
        "generate": _generate,
        "continuous_batching": _continuous_batching,
    }
    found: dict[str, Any] = {"model": scenario.name, "sequences": scenario.sequences}
    for name, side in sides.items():
        release(plan.device)
        found[name] = attempt(lambda side=side: side(plan, prompts(scenario), scenario.lengths(1)))
    ours = found["realign"].get("tokens_per_s")
    for name in ("generate", "continuous_batching"):
        theirs = found[name].get("tokens_per_s")
        found[f"ratio_to_{name}"] = round(ours / theirs, 2) if ours and theirs else None
    return found


def _rate(plan: Plan, call: Callable[[], int]) -> dict[str, Any]:
    """Measure the tokens per second of a call that returns its number of tokens, after one warm-up call."""
    call()
    synchronize(plan.device)
    started = time.perf_counter()
    tokens = call()
    synchronize(plan.device)
    seconds = time.perf_counter() - started
    return {"tokens": tokens, "seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds)}


def _actor(plan: Plan, given: list[Tensor], **settings: Any) -> tuple[Any, SequenceSample, GenerationConfig]:
    """Return an engine, the prompts and the sampling settings of the rollout scenario."""
    scenario = plan.rollout
    engine = make_actor(
        scenario,
        device=plan.device,
        dtype=plan.dtype,
        config={"tie_word_embeddings": True, "max_position_embeddings": positions(scenario)},
        sampling=InProcessSampling(**settings),
    ).machine
    cut = Lengths.of([[len(p)] for p in given])
    data = SequenceSample(tuple(range(len(given)))).with_data({"prompt_ids": torch.cat(given)}, lengths=cut)
    return engine, data, GenerationConfig(n=scenario.group, max_new_tokens=scenario.max_new)


def sampler(plan: Plan) -> dict[str, Any]:
    """Check the decode loop, see `check_sampler`. Many stop tokens give random weights different lengths."""
    engine, data, config = _actor(plan, prompts(plan.rollout), keep_memory=True)
    stops = tuple(range(0, plan.rollout.vocabulary, 2 * config.max_new_tokens // 3))
    return check_sampler(engine, data, replace(config, stop_token_ids=stops))


def _ours(plan: Plan, given: list[Tensor], lengths: list[int], **settings: Any) -> dict[str, Any]:
    engine, data, config = _actor(plan, given, **settings)

    def call() -> int:
        out = engine.generate(data, config, seed=0)
        found = [int(mask.sum()) for mask in out.sequences("loss_mask")]
        assert found == lengths, "wrong response lengths"
        return sum(found)

    with forced_lengths(SimpleNamespace(lengths=lengths)):
        return _rate(plan, call)


def _peer_model(plan: Plan) -> Any:
    """Build a transformers model of the same shape, with all weights in the data type of the products."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = plan.rollout.config(tie_word_embeddings=True, max_position_embeddings=positions(plan.rollout))
    with torch.device(plan.device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=plan.dtype)
    return model.eval()


def _sampling(scenario: Scenario) -> Any:
    from transformers import GenerationConfig as Settings

    return Settings(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=scenario.max_new,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def _generate(plan: Plan, given: list[Tensor], lengths: list[int]) -> dict[str, Any]:
    model, group = _peer_model(plan), plan.rollout.group
    longest = max(map(len, given))
    ids = torch.stack([torch.cat([p.new_full((longest - len(p),), PAD), p]) for p in given for _ in range(group)])
    mask = torch.stack([torch.arange(longest) >= longest - len(p) for p in given for _ in range(group)]).long()
    settings = _sampling(plan.rollout)
    ids, mask = ids.to(plan.device), mask.to(plan.device)

    @torch.no_grad()
    def call() -> int:
        replay = [ForcedLengths(lengths)]
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings, logits_processor=replay)
        assert out.shape[1] == longest + max(lengths), "wrong response lengths"
        return sum(lengths)

    return _rate(plan, call)


def _continuous_batching(plan: Plan, given: list[Tensor], lengths: list[int]) -> dict[str, Any]:
    """Measure continuous batching. The start of its manager is not timed.

    The maximum length of a request is its forced length. A few requests end earlier at random.
    """
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    model, group = _peer_model(plan), plan.rollout.group
    requests = [p.tolist() for p in given for _ in range(group)]
    hints = WorkloadHints(max(map(len, given)), max(lengths), len(requests))
    # The default cache uses nearly all memory of the device. On a CPU this is the memory of the whole machine.
    small = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256) if plan.device == "cpu" else None
    manager_of = model.continuous_batching_context_manager
    with torch.no_grad(), manager_of(_sampling(plan.rollout), True, 5, small, workload_hints=hints) as manager:

        def call() -> int:
            made, waiting = 0, len(requests)
            for ids, length in zip(requests, lengths, strict=True):
                manager.add_request(ids, max_new_tokens=length)
            while waiting:
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError("continuous batching returned no result for 60 s")
                if result.is_finished():
                    made, waiting = made + len(result.generated_tokens), waiting - 1
            return made

        return _rate(plan, call)


def trl(plan: Plan, peak: float) -> dict[str, Any]:
    """Compare GRPO steps with TRL, or return the reason why TRL is not measured."""
    if find_spec("trl") is None:
        return {"left_out": "trl is not installed"}
    from benchmarks.peer.__main__ import compare

    threads = torch.get_num_threads()
    found = compare(plan.trl, steps=2, threads=threads, device=plan.device, micro_batches=(32, 64), peak=peak)
    # The other results describe the host: its memory, and timings that do not wait for the device.
    told = ("scenario", "seconds", "ratio", "ratio_range", "tokens_per_second", "utilisation", "trl", "trl_tried")
    return {key: found[key] for key in told}


def attempt(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the results of a part, or its error, so that a failure does not discard the results of other parts."""
    try:
        return part()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def show(report: dict[str, Any]) -> str:
    """Format the results as tables."""
    lines = [f"{report['device']}, matrix peak {report['peak_tflops']:,.2f} TFLOP/s in {report['dtype']}"]
    keys = ("microbatch_tokens", "tokens_per_s", "tflops", "utilisation", "peak_gib", "logits_gib", "attention")
    if done := [r for r in report.get("training", []) if "error" not in r]:
        cells = [[r["model"], *(f"{r[k]:,}" if isinstance(r[k], (int, float)) else r[k] for k in keys)] for r in done]
        lines += [table(["training", *keys], cells)]
        plain = {r["model"]: r["step_s"] / r["compiled"]["step_s"] for r in done if "step_s" in r["compiled"]}
        lines += [f"torch_compile: {name} {ratio:.2f}x" for name, ratio in plain.items()]
    if found := report.get("rollout"):
        sides = {name: r for name, r in found.items() if isinstance(r, dict) and "tokens_per_s" in r}
        cells = [[name, f"{r['tokens_per_s']:,}", f"{r['seconds']:.2f}"] for name, r in sides.items()]
        lines += [table(["rollout", "tokens/s", "s"], cells)]
    if "decode_steps" in (found := report.get("sampler", {})):
        lines += [f"sampler: no decode step waits for the device, {100 * found['equal_tokens']:.1f}% equal tokens"]
    if "ratio" in report.get("trl", {}):
        lines += [f"GRPO step: TRL's time over ours {report['trl']['ratio']['wall']}"]
    return "\n\n".join(lines)


def main(given: list[str] | None = None) -> None:
    """Run the requested parts; print tables and the JSON line."""
    available = "cuda" if torch.cuda.is_available() else "cpu"
    words = arguments({"device": available, "parts": ",".join(PARTS)}, given)
    parts = words["parts"].split(",")
    if wrong := [part for part in parts if part not in PARTS]:
        sys.exit(f"unknown part {wrong[0]!r}; valid: {', '.join(PARTS)}")
    plan = {"cuda": CUDA, "cpu": CPU}[words["device"]]
    name = torch.cuda.get_device_name() if plan.device == "cuda" else "CPU (smoke test; the figures are not meaningful)"
    started = time.perf_counter()
    peak = matrix_peak(plan)
    report: dict[str, Any] = {"benchmark": "gpu", "device": name, **facts()}
    report |= {"dtype": str(plan.dtype).removeprefix("torch."), "peak_tflops": round(peak / 1e12, 4)}
    if "training" in parts:
        report["training"] = []
        for scenario in plan.training:
            found = attempt(lambda scenario=scenario: training(plan, scenario, peak))
            report["training"].append({"model": scenario.name, **found})
            release(plan.device)
    if "rollout" in parts:
        report["rollout"] = attempt(lambda: rollout(plan))
    if "sampler" in parts:
        release(plan.device)
        report["sampler"] = attempt(lambda: sampler(plan))
    if "trl" in parts:
        release(plan.device)  # the two sides run in separate processes
        report["trl"] = attempt(lambda: trl(plan, peak))
    report["seconds"] = round(time.perf_counter() - started, 1)
    print(show(report))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
