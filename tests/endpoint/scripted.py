"""A sampler that answers with given texts, and an endpoint for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from realign.api import Capabilities, GenerationConfig, Request, SequenceSample
from realign.api.requests import Completion, FutureHandle
from realign.api.sampler import generate_by_requests
from realign.endpoint import Backend, Endpoint, EndpointLimits, Renderer, Session, Sessions


class ScriptedSampler:
    """Answers the requests in order. The log-probs of the n-th answer are -n for all its tokens."""

    version = 0

    def __init__(self, renderer: Renderer, texts: list[str]) -> None:
        self.prompts: list[str] = []
        self._renderer, self._texts = renderer, list(texts)

    def capabilities(self) -> Capabilities:
        return Capabilities(False, logprobs_at_temperature=True, stop_strings=False, lora=False, abort=True)

    def submit(self, request: Request) -> FutureHandle:
        handle = FutureHandle(request)
        ids = torch.tensor(self._renderer.encode(self._texts[len(self.prompts)]))
        self.prompts.append(self._renderer.decode(request.prompt_ids.tolist()))
        logprobs = torch.full((len(ids),), -float(len(self.prompts)))
        handle.future.set_result(Completion(ids, logprobs, torch.zeros(len(ids), dtype=torch.int32), False))
        return handle

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        return generate_by_requests(self.submit, data, config, seed=seed)


@contextmanager
def scripted(renderer: Renderer, texts: list[str]) -> Iterator[tuple[Endpoint, Session, ScriptedSampler]]:
    """Serve a session in which the policy samples these texts."""
    sampler = ScriptedSampler(renderer, texts)
    backend = Backend(sampler, renderer, GenerationConfig(max_new_tokens=500))  # type: ignore[arg-type]
    session = Session(backend, "p/0")
    with closing(Endpoint(Sessions(), EndpointLimits(), model="policy")) as endpoint:
        endpoint.start()
        endpoint.sessions.open(session)
        yield endpoint, session, sampler
