from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from realign.api import GenerationConfig, InProcessSampler, SequenceSample
from realign.api.in_process_sampler import IN_PROCESS
from realign.api.sampler import requests_of
from realign.testing import SAMPLER_CHECKS, BigramEngine, check_sampler
from tests.table_sampler import CONFIG, prompts
from tests.tiny import tiny_engine
from tests.toys import BigramModel

TEXT = GenerationConfig(n=3, max_new_tokens=8)


def texts(ids=range(4)) -> SequenceSample:
    return SequenceSample.from_sequences(
        list(ids), {"prompt_ids": [[[2 + (3 * i + k) % 11 for k in range(3 + i)]] for i in ids]}
    )


@pytest.mark.parametrize("name", SAMPLER_CHECKS)
def test_the_in_process_sampler_of_a_table_meets_the_contract(name):
    has = replace(IN_PROCESS, sampling_replay=False)  # as `EngineCapabilities` of the table
    check_sampler(
        lambda: InProcessSampler(BigramEngine(), capabilities=has), prompts(), CONFIG, BigramEngine(seed=1), only=name
    )


@pytest.mark.parametrize("name", SAMPLER_CHECKS)
def test_the_background_sampler_of_any_model_meets_the_contract(name):
    def make():
        return BigramModel().background_sampler("actor", seed=0, recompute=True)

    check_sampler(make, prompts(), CONFIG, BigramEngine(seed=1), only=name)


@pytest.mark.parametrize("name", SAMPLER_CHECKS)
def test_the_in_process_sampler_of_a_transformer_meets_the_contract(name):
    other = tiny_engine(model={"seed": 7})
    check_sampler(lambda: InProcessSampler(tiny_engine()), texts(), TEXT, other, only=name)


class Counting(BigramEngine):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.calls: list[tuple[tuple, int]] = []
        self.goes, self.go = threading.Event(), threading.Event()
        self.go.set()

    def generate(self, data, config, *, seed):
        self.calls.append((data.ids, config.n))
        self.goes.set()
        assert self.go.wait(60)
        return super().generate(data, config, seed=seed)


def test_requests_that_arrive_while_the_first_one_is_awaited_are_sampled_with_it(monkeypatch):
    engine = Counting()
    sampler = InProcessSampler(engine)
    first, *others = requests_of(prompts(), CONFIG, 1)
    late = iter(others)

    def arrives(seconds: float) -> None:  # one further request arrives in each wait
        if (request := next(late, None)) is not None:
            sampler.submit(request)

    monkeypatch.setattr("realign.api.in_process_sampler.time.sleep", arrives)
    sampler.submit(first).result()
    assert engine.calls == [(("a", "b", "c", "d"), 3)]


def test_pause_update_and_timeouts_wait_for_the_engine():
    engine = Counting()
    engine.go.clear()
    sampler = InProcessSampler(engine)
    done: list[str] = []

    def pause() -> None:
        sampler.pause()
        done.append("paused")

    sampling = threading.Thread(target=sampler.generate, args=(prompts(), CONFIG), kwargs={"seed": 0})
    sampling.start()
    assert engine.goes.wait(60)
    pausing = threading.Thread(target=pause)
    pausing.start()
    with pytest.raises(TimeoutError, match="did not finish within"):
        sampler.submit(requests_of(prompts("a"), CONFIG, 0)[0]).result(0.05)
    assert done == []
    engine.go.set()
    sampling.join()
    pausing.join()
    assert done == ["paused"]
    sampler.update(engine, 3)  # the sampler already uses the weights of this engine: nothing to load
    assert sampler.version == 3
