"""Test decode steps between two host synchronizations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from realign.api import GenerationConfig
from realign.models.network.decoder import PackedDecoder
from realign.models.network.heads import read_head
from realign.samplers.in_process.background import StreamingEngine
from realign.samplers.in_process.compiled.fusion import Fusion
from realign.samplers.in_process.compiled.library import CompiledDecode
from realign.samplers.in_process.decode import Rollout, Stopping
from realign.samplers.in_process.generate import generate
from realign.samplers.in_process.rollout_model import RolloutModel
from realign.samplers.in_process.settings import InProcessSampling
from tests.samplers.in_process.rollouts import UNTIED, prompts, responses, sample_of
from tests.tiny import VOCAB, tiny_engine, tiny_model, tiny_tokenizer

STOPS = tuple(range(2, 8))


def rollout(model: Any, sync_every: int, *, fused: bool = True, max_slots: int | None = 5, **config: Any) -> Any:
    return generate(
        RolloutModel(model, read_head(model), fusion=Fusion(model, CompiledDecode.off) if fused else None),
        sample_of(prompts()),
        GenerationConfig(**{"max_new_tokens": 24, "n": 3, "temperature": 0.8} | config),
        InProcessSampling(max_slots=max_slots, sync_every=sync_every),
        seed=0,
        eos_token_ids=STOPS,
        tokenizer=tiny_tokenizer(),
    )


CASES: dict[str, dict[str, Any]] = {
    "stop tokens": {},
    "one slot": {"max_slots": 1, "n": 1},
    "all slots": {"max_slots": None},
    "modules": {"fused": False},
    "greedy": {"greedy": True},
    "minimum length": {"min_new_tokens": 7},
    "fixed length": {"fixed_length": True},
    "filters": {"top_k": 9, "top_p": 0.8},
    "one token": {"max_new_tokens": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_samples_do_not_depend_on_the_number_of_steps_between_synchronizations(case: str) -> None:
    model, settings = tiny_model(**UNTIED), CASES[case]
    want = rollout(model, 1, **settings)
    for k in (3, 50):
        got = rollout(model, k, **settings)
        assert responses(got) == responses(want)
        assert torch.equal(got["truncated"], want["truncated"])
        torch.testing.assert_close(got["logprobs"], want["logprobs"], atol=1e-5, rtol=0)
    if case == "stop tokens":
        assert len({len(r) for r in responses(want)}) > 3
        assert 0 < int(want["truncated"].sum()) < len(want["truncated"])


@pytest.mark.parametrize("recompute", [True, False])
def test_versions_and_samples_of_asynchronous_rollouts_do_not_depend_on_it(recompute: bool) -> None:
    """New weights arrive when all responses have the same number of tokens, whatever the number of steps."""
    rollouts = []
    for k in (1, 2, 4):
        sampling = InProcessSampling(sync_every=k, compiled_decode=CompiledDecode.off)
        engine = tiny_engine("llama", model=UNTIED, sampling=sampling)
        sampler = StreamingEngine("actor", engine, recompute=recompute)
        try:
            weights = {
                name: x + 0.01 * torch.sin(torch.arange(x.numel()).view_as(x)) for name, x in engine.weights().items()
            }
            steps = _at_count(sampler, 9, lambda s=sampler, w=weights: s.loop._engine.load_weights(w))
            out = sampler.generate(sample_of(prompts()), GenerationConfig(n=2, max_new_tokens=21), seed=0)
        finally:
            sampler.close()
        assert steps == [9]
        rollouts.append(out)
    for out in rollouts[1:]:
        assert torch.equal(out["input_ids"], rollouts[0]["input_ids"])
        assert torch.equal(out["versions"], rollouts[0]["versions"])
        assert torch.equal(out["truncated"], rollouts[0]["truncated"])
        torch.testing.assert_close(out["logprobs"], rollouts[0]["logprobs"], atol=1e-5, rtol=0)
    assert set(rollouts[0]["versions"].tolist()) == {-1, 0, 1}


def _at_count(sampler: StreamingEngine, count: int, load: Any) -> list[int]:
    """Update the weights of a sampler once, when its responses have `count` tokens; return that count when it did."""
    loop, done, advance = sampler.loop, [], sampler.loop._advance

    def watched() -> bool:
        left = advance()
        for stream in loop.streams:
            if not done and stream.active and int(stream.rows[3, 0]) >= count:
                done.append(int(stream.rows[3, 0]))
                load()
                loop.version = 1
                decoder, head = loop._prepare(stream.config, stream.reach)
                stream.update(decoder, head, 1, recompute=loop._recompute)
        return left

    loop._advance = watched  # type: ignore[method-assign]
    return done


SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique_consecutive", "_unique2")


class Synchronizations(TorchDispatchMode):
    """Counts operators after which the host waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in SYNCS or masked:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [{}, {"min_new_tokens": 3}, {"top_k": 5, "top_p": 0.7}, {"greedy": True}], ids=str)
@torch.no_grad()
def test_decode_steps_do_not_wait_for_the_device_and_the_end_of_a_block_does(settings: dict[str, Any]) -> None:
    model = tiny_model(**UNTIED)
    decoder = Fusion(model, CompiledDecode.off).trunk(60, torch.float32)
    config = GenerationConfig(n=1, max_new_tokens=40, **settings)
    stopping = Stopping(config, STOPS, None, VOCAB, torch.device("cpu"))
    run = Rollout(PackedDecoder(decoder), read_head(model), config, stopping, InProcessSampling(sync_every=20))
    run.add(prompts(), torch.arange(4))
    run.advance()
    with Synchronizations() as steps:
        for step in range(20):
            run._step(some_ended=step > 0)
    assert steps.found == []
    with Synchronizations() as end:
        run._retire_ended(0)
    assert end.found
