"""External sampler for tests: a table of logits and a thread in pure Python replace a server."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from realign.api import Capabilities, GenerationConfig, Model, ModelSpec, Request, SequenceSample, WeightSource
from realign.api.sampler import Completion, FutureHandle, SamplerSpec, Tokens, generate_by_requests
from realign.testing import BigramEngine
from tests.toys import Digits


class TableHandle(FutureHandle):
    """Response in progress."""

    def __init__(self, request: Request, sampler: TableSampler) -> None:
        super().__init__(request)
        self.sampler = sampler
        self.generator = torch.Generator().manual_seed(request.response_seed)
        self.sampled: list[tuple[int, float, int]] = []

    def tokens(self) -> Tokens:
        with self.sampler.changed:
            rows = list(zip(*self.sampled, strict=True)) or [(), (), ()]
        ids, logprobs, versions = (torch.tensor(row) for row in rows)
        return Tokens(ids.long(), logprobs.float(), versions.int())

    def cancel(self) -> bool:
        with self.sampler.changed:
            if self not in self.sampler.active:
                return False
            self.sampler.active.remove(self)
        self.future.set_exception(CancelledError())
        return True


class TableSampler:
    """Implements `realign.api.Sampler`. The next token depends on the last one, and token 0 ends a response."""

    def __init__(self, logits_VV: Tensor, *, bitwise: bool = True) -> None:
        self.logits_VV, self.version, self.bitwise = logits_VV.clone(), 0, bitwise
        self.changed = threading.Condition()
        self.active: list[TableHandle] = []
        self.stopped: set[str] = set()
        self.updates: list[int] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def capabilities(self) -> Capabilities:
        return Capabilities(self.bitwise, logprobs_at_temperature=True, stop_strings=False, lora=False, abort=True)

    def submit(self, request: Request) -> TableHandle:
        handle = TableHandle(request, self)
        with self.changed:
            if "closed" in self.stopped:
                raise RuntimeError("the table is closed")
            self.active.append(handle)
            self.changed.notify_all()
        return handle

    def generate(self, data, config, *, seed: int) -> SequenceSample:
        return generate_by_requests(self.submit, data, config, seed=seed)

    def update(self, source: WeightSource, version: int) -> None:
        logits_VV = source.weights()["logits"].clone()
        with self.changed:
            self.logits_VV, self.version = logits_VV, version
            self.updates.append(version)

    def pause(self) -> None:
        self._stop("paused")

    def resume(self) -> None:
        self._go("paused")

    def sleep(self) -> None:
        self._stop("asleep")

    def wake(self) -> None:
        self._go("asleep")

    def close(self) -> None:
        self._stop("closed")
        self.thread.join()
        for handle in self.active:
            handle.future.set_exception(RuntimeError("the table is closed"))
        self.active = []

    def _stop(self, why: str) -> None:
        with self.changed:
            self.stopped.add(why)
            self.changed.notify_all()

    def _go(self, why: str) -> None:
        with self.changed:
            self.stopped.discard(why)
            self.changed.notify_all()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: "closed" in self.stopped or (self.active and not self.stopped))
                if "closed" in self.stopped:
                    return
                for handle in list(self.active):
                    self._draw(handle)

    def _draw(self, handle: TableHandle) -> None:
        config = handle.request.config
        last = handle.sampled[-1][0] if handle.sampled else int(handle.request.prompt_ids[-1])
        row_V = (self.logits_VV / config.temperature).log_softmax(-1)[last]
        token = int(row_V.argmax() if config.greedy else torch.multinomial(row_V.exp(), 1, generator=handle.generator))
        handle.sampled.append((token, float(row_V[token]), self.version))
        ended = token == 0 and not config.fixed_length
        if ended or len(handle.sampled) == config.max_new_tokens:
            self.active.remove(handle)
            tokens = handle.tokens()
            truncated = not ended and not config.fixed_length
            handle.future.set_result(Completion(tokens.ids, tokens.logprobs, tokens.versions, truncated))


@dataclass
class TableSampling(SamplerSpec):
    """Samples the responses of a role from a table with the weights of its engine."""

    opened: ClassVar[list[TableSampler]] = []

    bitwise: bool = False
    words: int = field(default=0)
    """Vocabulary size of a random table, for engines without a table. With 0, the table of the engine is used."""

    def check(self, where: str) -> None:
        if self.words < 0:
            raise ValueError(f"{where}.words={self.words} must not be negative.")

    def capabilities(self) -> Capabilities:
        return Capabilities(self.bitwise, logprobs_at_temperature=True, stop_strings=False, lora=False, abort=True)

    def open(self, name: str, source: WeightSource, tokenizer: object) -> TableSampler:
        if self.words:
            logits_VV = torch.randn(self.words, self.words, generator=torch.Generator().manual_seed(0))
        else:
            logits_VV = source.weights()["logits"]
        self.opened.append(TableSampler(logits_VV, bitwise=self.bitwise))
        return self.opened[-1]


CONFIG = GenerationConfig(n=3, max_new_tokens=6)


def prompts(ids="abcd") -> SequenceSample:
    return SequenceSample.from_sequences(list(ids), {"prompt_ids": [[[1 + ord(i) % 7, 2]] for i in ids]})


class TrainsOnly(BigramEngine):
    """Engine that fails if it samples."""

    def generate(self, data, config, *, seed):
        raise AssertionError("the engine must not sample")


@dataclass
class Served(ModelSpec):
    """Model whose responses come from a table with its trained weights."""

    sampler: SamplerSpec = field(default_factory=lambda: TableSampling(bitwise=True))

    def load(self, name: str, *, seed: int) -> Model:
        engine = TrainsOnly(seed=seed) if self.sampler.external else BigramEngine(seed=seed)
        return Model(name, engine, Digits(), seed)
