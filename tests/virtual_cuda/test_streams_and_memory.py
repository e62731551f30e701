"""What a run decides by the memory of the device, and the streams of asynchronous sampling."""

from __future__ import annotations

import contextlib
import threading

import torch

from realign.api import GenerationConfig
from realign.api.memory import MemoryChoice
from realign.cli.launch_table import derived_rows
from realign.config import build_experiment, compose
from realign.engines.training import transformers_engine
from realign.engines.transformers_model import TransformersModel
from realign.runtime.checks.auto_memory import USABLE, with_memory_choices
from realign.runtime.checks.device_estimate import estimate
from realign.runtime.models import load_models
from realign.samplers.in_process.background import StreamingEngine
from tests.samplers.in_process.rollouts import numbered_prompts
from tests.virtual_cuda.device import STREAM, Event, Stream, limit


def test_auto_recomputes_layers_where_the_memory_of_the_device_asks_for_it(overrides, monkeypatch):
    enabled = []
    enable = transformers_engine._enable_checkpointing
    monkeypatch.setattr(
        transformers_engine, "_enable_checkpointing", lambda *given: (enabled.append(given), enable(*given))[1]
    )
    experiment = build_experiment(compose(overrides("experiment=grpo_arithmetic", "batch_prompts=64")))
    (device,) = estimate(experiment)
    needed = device.during("actor", device.roles["actor"].training)
    for free, on in ((2 * needed, False), (round(needed / USABLE) - 10_000, True)):
        with limit(free):
            row = dict(derived_rows(experiment))[MemoryChoice.checkpointing]
            load_models(with_memory_choices(experiment))
        assert row.startswith("on (auto: " if on else "off (auto: ")
        assert len(enabled) == on


def test_asynchronous_sampling_has_its_own_stream_and_publication_waits(task, monkeypatch):
    log, threads = [], set()

    class Own(Stream):
        def wait_stream(self, stream):
            assert stream is STREAM
            log.append("the loop waits for the publisher")

        def record_event(self, event=None):
            log.append("the end of the copy is marked")
            return Event()

    @contextlib.contextmanager
    def entered(stream):
        assert isinstance(stream, Own)
        threads.add(threading.current_thread().name)
        yield

    source, copy = (TransformersModel(str(task.model)).load("actor", seed=0).engine for _ in range(2))
    load = copy.load_weights
    copy.load_weights = lambda weights: (log.append("weights are copied"), load(weights))
    monkeypatch.setattr(torch.cuda, "Stream", Own)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(STREAM, "wait_event", lambda event: log.append("the publisher waits"), raising=False)
    sampler = StreamingEngine("actor", copy)
    try:
        log.clear()  # the stream also waits for the model to be loaded
        sampler.update(source, 1)
        order = ["the loop waits for the publisher", "weights are copied", "the end of the copy is marked"]
        assert log == [*order, "the publisher waits"]
        out = sampler.generate(numbered_prompts(range(2)), GenerationConfig(max_new_tokens=4), seed=0)
        assert out["versions"][out["loss_mask"]].eq(1).all()
        assert threads == {"rollout of actor", threading.current_thread().name}
    finally:
        sampler.close()
