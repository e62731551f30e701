from __future__ import annotations

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.engines import OptimizerSpec
from realign.models.network.decoder import ModuleTrunk, PackedDecoder
from realign.models.network.heads import read_head
from realign.samplers.in_process.background import Stream, StreamingEngine
from realign.samplers.in_process.decode import Stopping
from realign.samplers.in_process.draw import response_keys
from realign.samplers.in_process.settings import InProcessSampling
from tests.tiny import tiny_engine

CONFIG = GenerationConfig(n=2, max_new_tokens=12, fixed_length=True, router_replay=True)


def moe_engine(seed=0):
    optimizer = OptimizerSpec(lr=1e-3)
    return tiny_engine("qwen3_moe", optimizer=optimizer, model={"seed": seed, "tie_word_embeddings": False})


def prompts(ids):
    given = {i: [2 + (i * 3 + k) % 11 for k in range(3 + i % 4)] for i in ids}
    return SequenceSample.from_sequences(ids, {"prompt_ids": [[given[i]] for i in ids]})


def logprobs(engine, data):
    return engine.forward(data, MicroBatchSpec(), lambda output, mb: mb.with_tokens(x=output.logprobs()))["x"]


def decoder_of(engine):
    return PackedDecoder(ModuleTrunk(engine.module), engine.network.abilities.replay.routers)


@torch.no_grad()
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("slots", [None, 3])
def test_tokens_keep_the_choices_of_the_weights_that_read_them_first(recompute, slots):
    old, new, ids = moe_engine(), moe_engine(seed=7), range(4)
    head = read_head(old.module)
    stopping = Stopping(CONFIG, [1], None, len(head.weight_VH), torch.device("cpu"))
    stream = Stream(decoder_of(old), head, CONFIG, stopping, InProcessSampling(max_slots=slots), reach=32, version=0)
    given = list(prompts(ids).sequences("prompt_ids"))
    sequences_S = stream.add(given, response_keys(0, ids, 2))
    for _ in range(6):
        stream.advance()
    stream.update(decoder_of(new), read_head(new.module), 1, recompute=recompute)
    stream.run()
    responses, versions_SN, experts, _ = stream.take(sequences_S)
    begun = 0
    for s, recorded in enumerate(experts):
        text = torch.cat([given[s // 2], responses.tokens[s]])
        assert len(recorded) == len(text)
        assert recorded[-1].unique().tolist() == [-1]
        sampled_by_old = versions_SN[s].tolist().count(0)
        first_new = len(given[s // 2]) + sampled_by_old - 1 if sampled_by_old else 0  # the first token that `new` reads
        begun += sampled_by_old > 0
        if recompute or not sampled_by_old:  # otherwise its keys and values are those of both
            assert torch.equal(recorded[first_new:-1].sort(-1).values, choices(new, text)[first_new:-1].sort(-1).values)
        assert torch.equal(recorded[:first_new].sort(-1).values, choices(old, text)[:first_new].sort(-1).values)
    assert 0 < begun <= (slots or 8)
    assert not stream.experts._prompts  # released with the rows


def choices(engine, text):
    """Return the experts [T, L * K] of a pass over a whole text."""
    decoder = decoder_of(engine)
    decoder.prefill([text])
    return decoder.chosen_NW


def test_a_rollout_over_a_weight_update_is_trained_with_its_choices():
    sampler, trainer = StreamingEngine("actor", moe_engine()), moe_engine(seed=7)
    try:
        out = sampler.generate(prompts(range(3)), CONFIG, seed=1)
        sampler.update(trainer, 1)
        later = sampler.generate(prompts(range(3)), CONFIG, seed=2)
    finally:
        sampler.close()
    sampled_T = later["loss_mask"]
    torch.testing.assert_close(logprobs(trainer, later)[sampled_T], later["logprobs"][sampled_T], atol=1e-5, rtol=1e-4)
    assert logprobs(trainer, out).isfinite().all()
