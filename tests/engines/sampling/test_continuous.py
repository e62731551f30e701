from __future__ import annotations

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.engines.network.heads import read_head
from realign.engines.sampling.continuous import Stream
from realign.engines.sampling.counter_rng import response_keys
from realign.engines.sampling.decoder import PackedDecoder
from realign.engines.sampling.stopping import Stopping
from realign.engines.sampling.trunk import ModuleTrunk
from tests.tiny import resources, tiny_engine, tiny_model

CONFIG = GenerationConfig(n=2, max_new_tokens=24)
EOS = 1


def prompt(i, length=3):
    return torch.tensor([2 + (i * 3 + k) % 11 for k in range(length + i % 4)])


def stream_of(model, config=CONFIG, version=0, max_slots=None):
    head = read_head(model)
    stopping = Stopping(config, [EOS], None, len(head.weight_VH), torch.device("cpu"))
    decoder, settings = PackedDecoder(ModuleTrunk(model)), resources(max_slots=max_slots)
    return Stream(decoder, head, config, stopping, settings, reach=128, version=version)


def added(stream, ids, length=3):
    return stream.add([prompt(i, length) for i in ids], response_keys(4, ids, CONFIG.n))


def responses_of(stream, sequences_S):
    responses, versions_SN, _ = stream.take(sequences_S)
    rows = zip(responses.tokens, responses.logprobs, versions_SN, responses.lengths.tolist(), strict=True)
    return [(t[:n].tolist(), p[:n], v[:n].tolist()) for t, p, v, n in rows]


@pytest.fixture(scope="module")
def models():
    return tiny_model(), tiny_model(seed=7)


@torch.no_grad()
def fresh_logprobs(model, ids, response):
    """Return the log-prob of each response token from one plain pass over the whole text."""
    text = torch.cat([ids, torch.tensor(response)])
    engine = tiny_engine()
    engine.load_weights(dict(model.named_parameters()))
    data = SequenceSample.from_sequences([0], {"input_ids": [[text.tolist()]]})
    out = engine.forward(data, MicroBatchSpec(), lambda output, part: part.with_tokens(logprobs=output.logprobs()))
    return out["logprobs"][len(ids) :]


@torch.no_grad()
def test_prompts_may_join_at_any_time_and_change_nothing_for_the_others(models):
    """The cache gets more slots and longer slots while sequences use it, and rows of responses are reused."""
    want = {}
    for length, ids in ((3, range(10)), (40, range(10, 13))):
        alone = stream_of(models[0])
        sequences_S = added(alone, ids, length)
        alone.run()
        found = responses_of(alone, sequences_S)
        want |= {i: found[2 * k : 2 * k + 2] for k, i in enumerate(ids)}
    stream = stream_of(models[0])
    calls, got = {}, {}
    for i in range(13):
        calls[i] = added(stream, [i], 40 if i > 9 else 3)
        for _ in range(5):
            if stream.busy:
                stream.advance()
        ended = {s for x in stream.finished for s in x.tolist()}
        for j in [j for j, sequences_S in calls.items() if ended >= set(sequences_S.tolist())]:
            sequences_S = calls.pop(j)
            got[j] = responses_of(stream, sequences_S)
            stream.finished = [x[[s not in sequences_S for s in x]] for x in stream.finished]
    stream.run()
    got |= {j: responses_of(stream, sequences_S) for j, sequences_S in calls.items()}
    assert stream.cache.length >= 43 + 24
    assert len(stream.responses.lengths) < 26  # rows were reused
    for i in range(13):
        for (tokens, logprobs, _), (want_tokens, want_logprobs, _) in zip(got[i], want[i], strict=True):
            assert tokens == want_tokens
            assert torch.allclose(logprobs, want_logprobs, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("slots", [None, 5])
def test_new_weights_take_effect_at_the_next_token(models, slots):
    config = GenerationConfig(
        n=2,
        max_new_tokens=24,
        fixed_length=True,
    )
    stream = stream_of(models[0], config, version=3, max_slots=slots)
    sequences_S = added(stream, range(6))
    for _ in range(8):
        stream.advance()
    stream.update(PackedDecoder(ModuleTrunk(models[1])), read_head(models[1]), 4, recompute=True)
    stream.run()
    begun = 0
    for k, (tokens, logprobs, versions) in enumerate(responses_of(stream, sequences_S)):
        cut = versions.index(4)
        assert versions == [3] * cut + [4] * (24 - cut)
        begun += cut > 0
        ids = prompt(k // 2)
        assert torch.allclose(logprobs[:cut], fresh_logprobs(models[0], ids, tokens)[:cut], atol=1e-5)
        assert torch.allclose(logprobs[cut:], fresh_logprobs(models[1], ids, tokens)[cut:], atol=1e-5)
    assert begun == (12 if slots is None else 5)


@torch.no_grad()
def test_kept_keys_and_values_are_those_of_the_old_weights(models):
    config = GenerationConfig(n=2, max_new_tokens=24, fixed_length=True)
    found = {}
    for recompute in (True, False):
        stream = stream_of(models[0], config)
        sequences_S = added(stream, range(3))
        for _ in range(8):
            stream.advance()
        stream.update(PackedDecoder(ModuleTrunk(models[1])), read_head(models[1]), 1, recompute=recompute)
        stream.run()
        found[recompute] = responses_of(stream, sequences_S)
    again, kept = found[True][0], found[False][0]
    assert again[2] == kept[2]
    assert again[0][:8] == kept[0][:8]
    assert not torch.allclose(again[1][8:], kept[1][8:], atol=1e-3)
    assert not torch.allclose(kept[1][8:], fresh_logprobs(models[1], prompt(0), kept[0])[8:], atol=1e-3)


@torch.no_grad()
def test_the_same_weights_under_a_new_version_change_no_token(models):
    stream, other = stream_of(models[0]), stream_of(models[0])
    sequences_S = added(stream, range(6))
    added(other, range(6))
    for _ in range(5):
        stream.advance()
    stream.update(PackedDecoder(ModuleTrunk(models[0])), read_head(models[0]), 1, recompute=True)
    stream.run()
    other.run()
    want = responses_of(other, sequences_S)
    for (tokens, logprobs, _), (want_tokens, want_logprobs, _) in zip(
        responses_of(stream, sequences_S), want, strict=True
    ):
        assert tokens == want_tokens
        assert torch.allclose(logprobs, want_logprobs, atol=1e-5)


def test_reading_again_goes_in_several_passes(models, monkeypatch):
    monkeypatch.setattr("realign.engines.sampling.continuous.PREFILL_TOKENS", 12)
    test_new_weights_take_effect_at_the_next_token(models, None)
