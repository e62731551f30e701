from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Request, SequenceSample
from realign.api.in_process_sampler import InProcessSampler
from realign.api.sampler import generate_by_requests
from realign.api.sampling_mask import SAMPLING_MASK, masks_of
from realign.engines import OptimizerSpec
from realign.models.network.attention import ATTENTION, use_attention
from realign.samplers.in_process.background import StreamingEngine
from realign.samplers.in_process.settings import InProcessSampling
from tests.tiny import VOCAB, tiny_engine

CONFIG = GenerationConfig(n=3, max_new_tokens=9, temperature=0.4, top_k=20, top_p=0.8, min_p=0.02, sampling_replay=True)
SPEC = MicroBatchSpec(60)


def engine(family="llama", **settings):
    return tiny_engine(family, optimizer=OptimizerSpec(lr=1e-3), **settings)


def prompts(ids=range(4)):
    given = {i: [2 + (i * 3 + k) % 11 for k in range(3 + i % 4)] for i in ids}
    return SequenceSample.from_sequences(ids, {"prompt_ids": [[given[i]] for i in ids]})


def scored(engine, data, spec=SPEC):
    """Return log-probs and entropies under the masks of `data`."""

    def hook(output, mb):
        where_T = mb["loss_mask"]
        logprobs_T, entropy_T = output.logprobs_and_entropy(temperature=CONFIG.temperature, where_T=where_T)
        assert torch.equal(logprobs_T, output.logprobs(temperature=CONFIG.temperature, where_T=where_T))
        return mb.with_tokens(x=logprobs_T, h=entropy_T)

    out = engine.forward(data, spec, hook)
    return out["x"], out["h"]


def by_hand(engine, data):
    """Return log-probs and entropies, differentiable, with one pass of transformers per sequence."""
    logprobs, entropies = [], []
    use_attention(engine.module, "eager")
    for ids, mask in zip(data.sequences("input_ids"), masks_of(data), strict=True):
        logits_TV = engine.module(input_ids=ids[None], use_cache=False).logits[0] / CONFIG.temperature
        for t, kept in enumerate(mask.ids_K.split(mask.counts_N.tolist())):
            row = logits_TV[t - 1, kept.long()].log_softmax(-1) if len(kept) else torch.zeros(1)
            logprobs.append(row[kept.tolist().index(int(ids[t]))] if len(kept) else row[0])
            entropies.append(-(row.exp() * row).sum())
    if engine.network.abilities.unpacked is None:
        use_attention(engine.module, ATTENTION)
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
def test_log_probs_over_the_recorded_tokens_are_those_of_the_rollout(family):
    """Also with soft caps, with shared prompts, and unpacked."""
    policy = engine(family)
    out = policy.generate(prompts(), CONFIG, seed=0)
    sampled_T = out["loss_mask"]
    counts = torch.cat([m.counts_N for m in masks_of(out)])
    assert (counts > 0).equal(sampled_T)
    assert 1 < counts[sampled_T].float().mean() < CONFIG.top_k
    logprobs_T, entropy_T = scored(policy, out)
    torch.testing.assert_close(logprobs_T, out["logprobs"], atol=5e-6, rtol=0)
    wanted = by_hand(policy, out)
    torch.testing.assert_close((logprobs_T, entropy_T), tuple(x.detach() for x in wanted), atol=5e-6, rtol=1e-4)
    full_T, _ = scored(policy, out.select(out.keys - {SAMPLING_MASK}))
    assert (full_T - out["logprobs"])[sampled_T].min() < -0.01


def test_the_gradient_is_that_of_softmaxes_over_the_recorded_tokens():
    policy = engine()
    out = policy.generate(prompts(), CONFIG, seed=0)
    weight_T = torch.linspace(-1, 2, len(out["loss_mask"])) * out["loss_mask"]
    data = out.with_tokens(w=weight_T)

    def loss(output, mb):
        logprobs_T, entropy_T = output.logprobs_and_entropy(temperature=CONFIG.temperature, where_T=mb["loss_mask"])
        return (mb["w"] * (logprobs_T + 0.3 * entropy_T)).sum(), {}

    policy.accumulate(data, SPEC, loss, torch.tensor(1.0))
    gradients = {n: p.grad.clone() for n, p in policy.module.named_parameters()}
    policy.module.zero_grad()
    logprobs_T, entropy_T = by_hand(policy, out)
    (weight_T * (logprobs_T + 0.3 * entropy_T)).sum().backward()
    for name, p in policy.module.named_parameters():
        torch.testing.assert_close(
            gradients[name], p.grad, atol=5e-5, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_every_kind_of_sampling_records_the_same():
    wanted = engine().generate(prompts(), CONFIG, seed=3)
    sampler = StreamingEngine("actor", engine())
    few = engine(sampling=InProcessSampling(max_slots=2, sync_every=4)).generate(prompts(), CONFIG, seed=3)
    own = InProcessSampler(engine())
    try:
        for recorded in (
            few,
            sampler.generate(prompts(), CONFIG, seed=3),
            sampler.generate(prompts(), CONFIG, seed=3),  # in rows that the first call released
            generate_by_requests(sampler.submit, prompts(), CONFIG, seed=3),
            generate_by_requests(own.submit, prompts(), CONFIG, seed=3),
        ):
            for key in ("input_ids", SAMPLING_MASK):
                assert recorded[key].tolist() == wanted[key].tolist()
        plain = replace(CONFIG, sampling_replay=False)
        for alone in (own.submit(Request(0, 0, torch.tensor([5, 6]), plain, 0)).result(),):
            assert alone.mask is None
        out = sampler.generate(prompts(), plain, seed=3)
        assert SAMPLING_MASK not in out
        assert torch.equal(out["input_ids"], wanted["input_ids"])
    finally:
        sampler.close()


def test_stop_tokens_that_may_not_be_drawn_yet_are_in_no_set():
    config = replace(CONFIG, min_new_tokens=4, top_k=VOCAB, top_p=1.0, min_p=0.0)
    policy = engine()
    out = policy.generate(prompts(), config, seed=0)
    for tokens, mask in zip(out.sequences(), masks_of(out), strict=True):
        sets = mask.last(int((mask.counts_N > 0).sum())).ids_K.split(mask.counts_N[mask.counts_N > 0].tolist())
        assert [2 in x.tolist() for x in sets] == [t >= 4 for t in range(len(sets))]
        assert 4 <= len(sets) < len(tokens)
    torch.testing.assert_close(scored(policy, out)[0], out["logprobs"], atol=5e-6, rtol=0)
