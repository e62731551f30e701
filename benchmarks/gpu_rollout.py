"""The parts `rollout`, `continuous_batching` and `sampler` of `benchmarks.gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.batches import make_actor, prompts
from benchmarks.gpu_plan import Plan, attempt, positions, release, synchronize
from benchmarks.gpu_sampler import check_sampler
from benchmarks.peer.side_realign import forced_lengths
from benchmarks.peer.side_trl import ForcedLengths
from benchmarks.peer.work import EOS, PAD, Scenario
from realign.api import GenerationConfig, Lengths, SequenceSample
from realign.samplers.in_process.settings import InProcessSampling


def rollout(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield response tokens per second of realign, also with a synchronization at every step, and `generate`."""
    yield _measured(plan, "realign", _ours)
    yield _measured(plan, "realign, sync_every=1", partial(_ours, sync_every=1))
    yield _measured(plan, "generate", _generate)


def continuous_batching(plan: Plan) -> dict[str, Any]:
    """Return response tokens per second of transformers' continuous batching."""
    return _measured(plan, "continuous batching", _continuous_batching)


def _measured(plan: Plan, name: str, side: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    release(plan.device)
    scenario = plan.rollout
    rate = attempt(lambda: side(plan, prompts(scenario), scenario.lengths(1)))
    return {"side": name, "model": scenario.name, "sequences": scenario.sequences, **rate}


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
    ).engine
    cut = Lengths.of([[len(p)] for p in given])
    data = SequenceSample(tuple(range(len(given)))).with_data({"prompt_ids": torch.cat(given)}, lengths=cut)
    return engine, data, GenerationConfig(n=scenario.group, max_new_tokens=scenario.max_new)


def sampler(plan: Plan) -> dict[str, Any]:
    """Check the decode loop, see `check_sampler`. Many stop tokens give random weights different lengths."""
    engine, data, config = _actor(plan, prompts(plan.rollout))
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
