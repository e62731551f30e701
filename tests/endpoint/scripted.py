"""A sampler that answers with given texts, and an endpoint for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from realign.api import Capabilities, GenerationConfig, Request, SequenceSample
from realign.api.sampler import Completion, FutureHandle, Tokens, generate_by_requests
from realign.endpoint import Endpoint, EndpointLimits, Renderer, ServedPolicy, Sessions
from realign.endpoint.sessions import Session
from tests.table_sampler import TableSampler
from tests.tiny import TEXT, VOCAB, tiny_tokenizer


class GrowingHandle(FutureHandle):
    """A response that grows by some tokens each time that its tokens are read, and ends when all were read."""

    def __init__(self, request: Request, whole: Completion, step: int) -> None:
        super().__init__(request)
        self._whole, self._step = whole, step
        self._read, self._lock = 0, threading.Lock()

    def tokens(self) -> Tokens:
        with self._lock:
            self._read += self._step
            if self._read >= len(self._whole.ids) and not self.future.done():
                self.future.set_result(self._whole)
        ids, logprobs, versions = (
            x[: self._read] for x in (self._whole.ids, self._whole.logprobs, self._whole.versions)
        )
        return Tokens(ids, logprobs, versions)


class ScriptedSampler:
    """Answers the requests in order. The log-probs of the n-th answer are -n for all its tokens.

    Args:
        renderer: encodes the texts.
        texts: the answers.
        step: tokens by which an answer grows each time that its tokens are read; 0: it is complete at once.
    """

    version = 0

    def __init__(self, renderer: Renderer, texts: list[str], step: int = 0) -> None:
        self.prompts: list[str] = []
        self._renderer, self._texts, self._step = renderer, list(texts), step

    def capabilities(self) -> Capabilities:
        return Capabilities(False, logprobs_at_temperature=True, stop_strings=True, lora=False, abort=True)

    def submit(self, request: Request) -> FutureHandle:
        ids = torch.tensor(self._renderer.encode(self._texts[len(self.prompts)]))
        self.prompts.append(self._renderer.decode(request.prompt_ids.tolist()))
        logprobs = torch.full((len(ids),), -float(len(self.prompts)))
        whole = Completion(ids, logprobs, torch.zeros(len(ids), dtype=torch.int32), False)
        if self._step:
            return GrowingHandle(request, whole, self._step)
        handle = FutureHandle(request)
        handle.future.set_result(whole)
        return handle

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        return generate_by_requests(self.submit, data, config, seed=seed)


@contextmanager
def scripted(
    renderer: Renderer, texts: list[str], step: int = 0
) -> Iterator[tuple[Endpoint, Session, ScriptedSampler]]:
    """Serve a session in which the policy samples these texts."""
    sampler = ScriptedSampler(renderer, texts, step)
    backend = ServedPolicy(sampler, renderer, GenerationConfig(max_new_tokens=500))  # type: ignore[arg-type]
    session = Session(backend, "p/0")
    with closing(Endpoint(Sessions(), EndpointLimits(), model="policy")) as endpoint:
        endpoint.start()
        endpoint.sessions.open(session)
        yield endpoint, session, sampler


KEY = "the-key"
END = 0  # ends a response of the table
TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}:{% endif %}"
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<pad>{% endif %}{% endfor %}"
)


def user(text: str) -> list[dict[str, str]]:
    """Return the messages of a question."""
    return [{"role": "user", "content": text}]


HELLO = user("hello")
CONFIG = GenerationConfig(max_new_tokens=12)


def letters() -> torch.Tensor:
    """Return logits of a table that writes lower-case letters, and ends after 'z'."""
    logits = torch.full((VOCAB, VOCAB), -30.0)
    first = 3 + TEXT.index("a")
    logits[:, first : first + 26] = torch.randn(VOCAB, 26, generator=torch.Generator().manual_seed(0))
    logits[first + 25] = -30.0
    logits[first + 25, END] = 0.0
    return logits


def tokenizer():
    made = tiny_tokenizer()
    made.chat_template = TEMPLATE
    return made


@contextmanager
def served(sampler=None, config: GenerationConfig = CONFIG, limit: int | None = 100, **limits):
    """Serve a sampler; yields the endpoint and its sampler."""
    sampler = sampler or TableSampler(letters())
    with closing(sampler):
        backend = ServedPolicy(sampler, Renderer(tokenizer()), config, limit)
        with closing(Endpoint(Sessions(backend, KEY), EndpointLimits(**limits), model="tiny")) as endpoint:
            endpoint.start()
            yield endpoint, sampler
