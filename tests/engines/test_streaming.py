from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.engines.decoding import Rollout
from realign.engines.streaming import Stream, StreamingEngine
from tests.tiny import tiny_engine

CONFIG = GenerationConfig(n=2, max_new_tokens=24)


def prompts(ids, length=3):
    one = {i: [2 + (i * 3 + k) % 11 for k in range(length + i % 4)] for i in ids}
    return SequenceSample.from_sequences(ids, {"prompt_ids": [[one[i]] for i in ids]})


@pytest.fixture
def open_engine():
    opened = []

    def make(*, seed=0, **settings):
        opened.append(StreamingEngine("actor", tiny_engine(model={"seed": seed}), **settings))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def other_engine():
    return tiny_engine(model={"seed": 7})


def same(a, b, *, exact=False):
    assert a.ids == b.ids
    assert a["input_ids"].tolist() == b["input_ids"].tolist()
    assert a["truncated"].tolist() == b["truncated"].tolist()
    close = torch.equal if exact else torch.allclose
    assert close(a["logprobs"], b["logprobs"], **({} if exact else {"atol": 1e-5}))


@pytest.mark.parametrize("config", [CONFIG, GenerationConfig(n=3, max_new_tokens=9, greedy=True)])
def test_a_call_alone_is_the_engines_own_bit_by_bit(open_engine, config):
    data = prompts(range(9))
    engine = open_engine(version=5)
    out = engine.generate(data, config, seed=3)
    same(out, tiny_engine().generate(data, config, seed=3), exact=True)
    assert torch.equal(out["versions"], torch.where(out["loss_mask"], 5, -1).int())
    assert len(engine.generate(prompts([]), config, seed=3)) == 0


def test_calls_of_many_threads_share_the_slots(open_engine, monkeypatch):
    rows = []
    step = Stream._step
    monkeypatch.setattr(Stream, "_step", lambda self: (rows.append(self.active), step(self))[1])
    engine = open_engine()
    want = {i: tiny_engine().generate(prompts([i]), CONFIG, seed=1) for i in range(12)}
    short = GenerationConfig(n=1, max_new_tokens=4)
    with ThreadPoolExecutor(13) as pool:
        long = {i: pool.submit(engine.generate, prompts([i]), CONFIG, seed=1) for i in range(12)}
        brief = pool.submit(engine.generate, prompts([3]), short, seed=2)
        for i, future in long.items():
            same(future.result(), want[i])
        same(brief.result(), tiny_engine().generate(prompts([3]), short, seed=2))
    assert max(rows) > CONFIG.n


def test_weights_change_between_two_steps_of_running_calls(open_engine):
    engine = open_engine()
    config = GenerationConfig(n=2, max_new_tokens=100, fixed_length=True)
    far = threading.Event()
    advance, count = Stream.advance, [0]

    def counting(self):
        count[0] += 1
        if count[0] == 30:
            far.set()
        advance(self)

    Stream.advance, before = counting, Stream.advance
    try:
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(engine.generate, prompts([i]), config, seed=1) for i in range(4)]
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
            assert int(changes.sum()) == 1  # old tokens, then new ones
    later = engine.generate(prompts(range(5)), CONFIG, seed=2)
    same(later, tiny_engine(model={"seed": 7}).generate(prompts(range(5)), CONFIG, seed=2), exact=True)


def test_texts_are_read_again_in_the_dtype_of_the_first_time(monkeypatch):
    reads, began, go_on = [], threading.Event(), threading.Event()
    read, advance = Stream._read, Stream.advance

    def noting(self, texts):
        hidden, *rest = read(self, texts)
        reads.append((hidden.dtype, torch.is_autocast_enabled("cpu")))
        return hidden, *rest

    def waiting(self):
        advance(self)
        began.set()
        go_on.wait(0.5)

    monkeypatch.setattr(Stream, "_read", noting)
    monkeypatch.setattr(Stream, "advance", waiting)
    engine = StreamingEngine("actor", tiny_engine(dtype=torch.bfloat16, fused_rollout=False))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(
            engine.generate, prompts([0]), GenerationConfig(max_new_tokens=40, fixed_length=True), seed=1
        )
        assert began.wait(60)
        engine.update(engine.engine, 1)
        go_on.set()
        assert set(call.result()["versions"].tolist()) == {-1, 0, 1}
    engine.close()
    assert len(reads) == 2
    assert len(set(reads)) == 1
    assert reads[0][1]


def test_scoring_waits_for_its_turn_between_two_steps(open_engine):
    engine = open_engine()
    data = SequenceSample.from_sequences([0, 1], {"input_ids": [[[2, 3, 4]], [[5, 6]]]})

    def score(output, part):
        return part.with_tokens(logprobs=output.logprobs())

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, prompts(range(6)), CONFIG, seed=1)
        out = engine.forward(data, MicroBatchSpec(), score)
        same(call.result(), tiny_engine().generate(prompts(range(6)), CONFIG, seed=1), exact=True)
    assert torch.equal(out["logprobs"], tiny_engine().forward(data, MicroBatchSpec(), score)["logprobs"])


def test_a_bad_call_fails_alone(open_engine):
    engine = open_engine()
    with pytest.raises(ValueError, match="stop token 9999 is not in the vocabulary"):
        engine.generate(prompts([0]), GenerationConfig(max_new_tokens=5, stop_token_ids=[9999]), seed=0)
    with pytest.raises(ValueError, match="has an empty prompt"):
        engine.generate(SequenceSample.from_sequences([0], {"prompt_ids": [[[]]]}), CONFIG, seed=0)
    with pytest.raises(ValueError, match="weights"):
        engine.update(tiny_engine(model={"num_hidden_layers": 2}), 1)
    assert engine.version == 0
    same(
        engine.generate(prompts([0]), CONFIG, seed=1), tiny_engine().generate(prompts([0]), CONFIG, seed=1), exact=True
    )


@pytest.mark.parametrize(("where", "name"), [(Rollout, "_step"), (Stream, "take")])
def test_an_error_in_the_loop_reaches_every_caller(open_engine, monkeypatch, where, name):
    def broken(*arguments):
        raise FloatingPointError("the sky fell")

    monkeypatch.setattr(where, name, broken)
    engine = open_engine()
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(engine.generate, prompts([i]), CONFIG, seed=1) for i in range(3)]
        for call in calls:
            with pytest.raises(RuntimeError, match="samples no more: the sky fell") as caught:
                call.result()
            assert isinstance(caught.value.__cause__, FloatingPointError)
    with pytest.raises(RuntimeError, match="the sky fell"):
        engine.update(other_engine(), 1)


def test_closing_wakes_who_waits(open_engine):
    engine = open_engine()
    config = GenerationConfig(n=8, max_new_tokens=100, fixed_length=True)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, prompts(range(64)), config, seed=1)
        while not engine._running:
            threading.Event().wait(0.001)
        engine.close()
        with pytest.raises(RuntimeError, match="samples no more: it was closed"):
            call.result()
    with pytest.raises(RuntimeError, match="it was closed"):
        engine.generate(prompts([0]), CONFIG, seed=0)


def test_a_model_that_cannot_generate_is_refused():
    with pytest.raises(ValueError, match="cannot sample for several callers"):
        StreamingEngine("critic", tiny_engine(model={"head": "value"}))
