from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.api.sampler import requests_of
from realign.errors import ConfigError, DataError
from realign.models.network.decoder import ModuleTrunk, PackedDecoder
from realign.models.network.heads import read_head
from realign.samplers.in_process.background import Stream, StreamingEngine
from realign.samplers.in_process.decode import Rollout, Stopping
from realign.samplers.in_process.draw import response_keys
from realign.samplers.in_process.settings import InProcessSampling
from realign.testing import SAMPLER_CHECKS, check_sampler
from tests.samplers.in_process.rollouts import numbered_prompts, other_engine
from tests.tiny import tiny_engine, tiny_model

CONFIG = GenerationConfig(n=2, max_new_tokens=24)


@pytest.fixture
def open_engine():
    opened = []

    def make(*, seed=0, **settings):
        opened.append(StreamingEngine("actor", tiny_engine(model={"seed": seed}), **settings))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def same(a, b, *, exact=False):
    assert a.ids == b.ids
    assert a["input_ids"].tolist() == b["input_ids"].tolist()
    assert a["truncated"].tolist() == b["truncated"].tolist()
    close = torch.equal if exact else torch.allclose
    assert close(a["logprobs"], b["logprobs"], **({} if exact else {"atol": 1e-5}))


@pytest.mark.parametrize("config", [CONFIG, GenerationConfig(n=3, max_new_tokens=9, greedy=True)])
def test_a_call_alone_is_the_engines_own_bit_by_bit(open_engine, config):
    data = numbered_prompts(range(9))
    engine = open_engine(version=5)
    out = engine.generate(data, config, seed=3)
    same(out, tiny_engine().generate(data, config, seed=3), exact=True)
    assert torch.equal(out["versions"], torch.where(out["loss_mask"], 5, -1).int())
    assert len(engine.generate(numbered_prompts([]), config, seed=3)) == 0


def test_weights_change_between_two_steps_of_running_calls(open_engine):
    engine = open_engine()
    config = GenerationConfig(n=2, max_new_tokens=100, fixed_length=True)
    far = threading.Event()
    advance, count = Stream.advance, [0]

    def counting(self):
        count[0] += 1
        if count[0] == 30:
            far.set()
        while count[0] >= 30 and engine.version == 0 and not engine.loop._jobs:  # the update is on its way
            time.sleep(0.001)
        advance(self)

    Stream.advance, before = counting, Stream.advance
    try:
        with ThreadPoolExecutor(4) as pool:
            engine.pause()
            calls = [pool.submit(engine.generate, numbered_prompts([i]), config, seed=1) for i in range(4)]
            while len(engine.loop._calls) < 4:
                time.sleep(0.001)
            engine.resume()
            far.wait()
            engine.update(other_engine(), 1)
            assert engine.version == 1
            out = [call.result() for call in calls]
    finally:
        Stream.advance = before
    for one in out:
        for versions_T in one.sequences("versions"):
            changes = versions_T[versions_T >= 0].diff()
            assert changes.min() >= 0
            assert int(changes.sum()) == 1  # tokens of the old version, followed by tokens of the new one
    later = engine.generate(numbered_prompts(range(5)), CONFIG, seed=2)
    same(later, tiny_engine(model={"seed": 7}).generate(numbered_prompts(range(5)), CONFIG, seed=2), exact=True)


def test_scoring_waits_for_its_turn_between_two_steps(open_engine):
    engine = open_engine()
    data = SequenceSample.from_sequences([0, 1], {"input_ids": [[[2, 3, 4]], [[5, 6]]]})

    def score(output, part):
        return part.with_tokens(logprobs=output.logprobs())

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, numbered_prompts(range(6)), CONFIG, seed=1)
        out = engine.forward(data, MicroBatchSpec(), score)
        same(call.result(), tiny_engine().generate(numbered_prompts(range(6)), CONFIG, seed=1), exact=True)
    assert torch.equal(out["logprobs"], tiny_engine().forward(data, MicroBatchSpec(), score)["logprobs"])


def test_a_bad_call_fails_alone(open_engine):
    engine = open_engine()
    with pytest.raises(ConfigError, match="stop token 9999 is not in the vocabulary"):
        engine.generate(numbered_prompts([0]), GenerationConfig(max_new_tokens=5, stop_token_ids=[9999]), seed=0)
    with pytest.raises(DataError, match="the prompt is empty"):
        engine.generate(SequenceSample.from_sequences([0], {"prompt_ids": [[[]]]}), CONFIG, seed=0)
    with pytest.raises(ValueError, match="weights"):
        engine.update(tiny_engine(model={"num_hidden_layers": 2}), 1)
    assert engine.version == 0
    same(
        engine.generate(numbered_prompts([0]), CONFIG, seed=1),
        tiny_engine().generate(numbered_prompts([0]), CONFIG, seed=1),
        exact=True,
    )


@pytest.mark.parametrize(("where", "name"), [(Rollout, "_step"), (Stream, "take")])
def test_an_error_in_the_loop_reaches_every_caller(open_engine, monkeypatch, where, name):
    def broken(*arguments, **settings):
        raise FloatingPointError("the sky fell")

    monkeypatch.setattr(where, name, broken)
    engine = open_engine()
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(engine.generate, numbered_prompts([i]), CONFIG, seed=1) for i in range(3)]
        for call in calls:
            with pytest.raises(RuntimeError, match=r"models.actor: sampling stopped: the sky fell") as caught:
                call.result()
            assert isinstance(caught.value.__cause__, FloatingPointError)
    with pytest.raises(RuntimeError, match="the sky fell"):
        engine.update(other_engine(), 1)


LONG = GenerationConfig(n=2, max_new_tokens=100, fixed_length=True)


@pytest.mark.parametrize("name", SAMPLER_CHECKS)
@pytest.mark.parametrize("max_slots", [None, 3])
def test_the_streaming_engine_meets_the_contract_of_samplers(name, max_slots):
    def make():
        return StreamingEngine("actor", tiny_engine(sampling=InProcessSampling(max_slots=max_slots)))

    check_sampler(make, numbered_prompts(range(3)), GenerationConfig(n=3, max_new_tokens=12), other_engine(), only=name)


@pytest.fixture
def at_step(monkeypatch):
    """Run a function in another thread before decode step `number`, while the loop waits for `go_on`."""
    advance, count = Stream.advance, [0]
    reached, go_on = threading.Event(), threading.Event()

    def counting(self):
        count[0] += 1
        if count[0] == 20:
            reached.set()
            assert go_on.wait(60)
        advance(self)

    monkeypatch.setattr(Stream, "advance", counting)

    def do(action):
        assert reached.wait(60)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(action)
            go_on.set()
            return future.result()

    return do


def test_tokens_so_far_grow_and_keep_their_versions(open_engine, at_step):
    engine = open_engine()
    handle, other = (engine.submit(r) for r in requests_of(numbered_prompts([0]), LONG, 1))
    early = at_step(handle.tokens)
    assert 0 < len(early.ids) < 100
    assert set(early.versions.tolist()) == {0}
    engine.pause()
    before = handle.tokens()
    engine.update(other_engine(), 1)
    engine.resume()
    done = handle.result()
    assert done.versions.tolist() == [0] * len(before.ids) + [1] * (100 - len(before.ids))
    assert done.ids[: len(before.ids)].tolist() == before.ids.tolist()
    assert before.ids[: len(early.ids)].tolist() == early.ids.tolist()
    assert set(other.result().versions.tolist()) == {0, 1}


def test_a_canceled_response_frees_its_slot_and_leaves_the_others_as_they_are(open_engine, at_step):
    engine = open_engine()
    handles = [engine.submit(r) for r in requests_of(numbered_prompts(range(2)), LONG, 1)]
    assert at_step(handles[1].cancel)
    kept = handles[1].tokens()
    assert 0 < len(kept.ids) < 100
    with pytest.raises(CancelledError):
        handles[1].result()
    want = tiny_engine().generate(numbered_prompts(range(2)), LONG, seed=1)
    for i, (ids, given, logprobs) in enumerate(
        zip(*(want.sequences(k) for k in ("input_ids", "prompt_mask", "logprobs")), strict=True)
    ):
        response = kept if i == 1 else handles[i].result()
        count = len(response.ids)
        assert response.ids.tolist() == ids[~given][:count].tolist()
        assert torch.allclose(response.logprobs, logprobs[~given][:count], atol=1e-5)
    assert not engine.loop.streams


def test_sleep_frees_the_cache_and_waking_continues_where_it_stopped(open_engine, at_step):
    engine = open_engine()
    handles = [engine.submit(r) for r in requests_of(numbered_prompts(range(2)), LONG, 1)]
    at_step(engine.sleep)
    assert [stream.cache for stream in engine.loop.streams] == [None]
    before = handles[0].tokens()
    assert handles[3].cancel()
    engine.sleep()
    engine.wake()
    want = tiny_engine().generate(numbered_prompts(range(2)), LONG, seed=1)
    for handle, ids, given in zip(handles[:3], want.sequences()[:3], want.sequences("prompt_mask")[:3], strict=True):
        assert handle.result().ids.tolist() == ids[~given].tolist()
    assert handles[0].result().ids[: len(before.ids)].tolist() == before.ids.tolist()


def test_bad_requests_are_refused_when_they_are_made(open_engine):
    engine = open_engine()
    request = requests_of(numbered_prompts([0]), CONFIG, 1)[0]
    with pytest.raises(DataError, match=r"exceeds the context window of the model .128."):
        engine.submit(type(request)(0, 0, request.prompt_ids, GenerationConfig(max_new_tokens=200), 1))
    handle = engine.submit(
        type(request)(0, 0, request.prompt_ids, GenerationConfig(stop_token_ids=[9999], max_new_tokens=3), 1)
    )
    with pytest.raises(ConfigError, match="stop token 9999"):
        handle.result()
    assert len(handle.tokens().ids) == 0
    assert not handle.cancel()


EOS = 1


def prompt(i, length=3):
    return torch.tensor([2 + (i * 3 + k) % 11 for k in range(length + i % 4)])


def stream_of(model, config=CONFIG, version=0, max_slots=None):
    head = read_head(model)
    stopping = Stopping(config, [EOS], None, len(head.weight_VH), torch.device("cpu"))
    decoder, settings = PackedDecoder(ModuleTrunk(model)), InProcessSampling(max_slots=max_slots)
    return Stream(decoder, head, config, stopping, settings, reach=128, version=version)


def added(stream, ids, length=3):
    return stream.add([prompt(i, length) for i in ids], response_keys(4, ids, CONFIG.n))


def responses_of(stream, sequences_S):
    responses, versions_SN, _, _ = stream.take(sequences_S)
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
        responses = responses_of(alone, sequences_S)
        want |= {i: responses[2 * k : 2 * k + 2] for k, i in enumerate(ids)}
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
