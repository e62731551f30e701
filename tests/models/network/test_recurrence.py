from __future__ import annotations

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.engines import OptimizerSpec
from realign.samplers.in_process.settings import InProcessSampling
from tests.families import family_model
from tests.tiny import VOCAB, engine_over, random_sample

FAMILIES = ("qwen3_next", "lfm2", "falcon_h1", "mamba")
"""Gated delta rule, short convolution, attention and recurrence in one layer, and no attention at all."""
GROUPS = [[13, 11, 13], [1, 4], [9]]


def engine_of(family, **settings):
    return engine_over(family_model(family), **settings)


def alone(family):
    return family_model(family, attention="eager")


def grouped(prompt):
    """Return a batch whose groups share their first `prompt` tokens."""
    data = random_sample(GROUPS, prompt=prompt)
    first = {s: data.sequences()[s] for s in (0, 3, 5)}
    owner = [0, 0, 0, 3, 3, 5]
    ids = [x.clone() for x in data.sequences()]
    for s, text in enumerate(ids):
        n = min(prompt, len(text), len(first[owner[s]]))
        text[:n] = first[owner[s]][:n]
    return data.with_tokens(input_ids=torch.cat(ids))


def own_logprobs(model, ids):
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    after = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), after])


def scored(engine, data, **spec):
    spec = MicroBatchSpec(**spec)
    return engine.forward(data, spec, lambda out, part: part.with_tokens(again=out.logprobs()))["again"]


def random_prompts(*lengths):
    ids = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    return SequenceSample.from_sequences([f"p{n}" for n in lengths], {"prompt_ids": [[x] for x in ids]})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_those_of_each_sequence_alone(family, checkpointing):
    data, model = grouped(5), alone(family)
    sum(-own_logprobs(model, ids).sum() for ids in data.sequences()).backward()
    engine = engine_of(family, optimizer=OptimizerSpec(lr=0.0), gradient_checkpointing=checkpointing)
    engine.accumulate(data, MicroBatchSpec(), lambda out, part: (-out.logprobs().sum(), {}), torch.tensor(1.0))
    scale = max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
    for (name, want), got in zip(model.named_parameters(), engine.module.parameters(), strict=True):
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad, atol=2e-5 * scale, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_rollouts_equal_those_of_scoring(family):
    engine = engine_of(family, sampling=InProcessSampling(max_slots=5))
    config = GenerationConfig(n=4, max_new_tokens=12, stop_token_ids=list(range(3, 20)))
    out = engine.generate(random_prompts(4, 8, 2), config, seed=3)
    assert len(set(out.lengths["input_ids"].flat.tolist())) > 3
    mask = out["loss_mask"]
    torch.testing.assert_close(scored(engine, out)[mask], out["logprobs"][mask], atol=1e-5, rtol=1e-5)
