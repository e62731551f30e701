"""`Session`: calls that share a sampler and a capture; `Sessions`: the open sessions of an endpoint and their keys."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

import torch

from realign.api.generation import GenerationConfig
from realign.api.sampler import Completion, Handle, Request, Sampler
from realign.api.seeds import derive_seed
from realign.endpoint.capture import Capture, CapturedCall, Prompt
from realign.endpoint.renderer import Renderer
from realign.endpoint.requests import ApiError, Parameters, unsupported
from realign.endpoint.scoring import Scorer, TokenScores

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedPolicy:
    """The policy behind calls, and its limits."""

    sampler: Sampler
    renderer: Renderer
    generation: GenerationConfig
    """Default sampling parameters; `max_new_tokens` is also the maximum of a call."""
    max_sequence_tokens: int | None = None
    """Maximum number of tokens of a prompt and its response; None: no limit."""
    fixed_sampling: bool = False
    """Whether `temperature`, `top_p` and `seed` of requests are ignored, as training on the samples requires."""
    scorer: Scorer | None = None
    """Scores other tokens than the sampled ones; None: requests cannot ask for `top_logprobs`."""


@dataclass(eq=False)
class Session:
    """Calls of one agent in one episode. All methods are thread-safe."""

    backend: ServedPolicy
    name: str
    """Name of the episode, which seeds the sampling of its calls."""
    seed: int = 0
    """Seed of the run or of the batch."""
    max_calls: int | None = None
    """Maximum number of calls; None: no limit."""
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    roles: tuple[str, ...] = ()
    """Names of the roles of the episode, one of which each request names as its model; empty: no roles."""
    capture: Capture = field(default_factory=Capture)
    """Calls of a session without roles."""
    logs_errors: bool = False
    """Whether to log the first error of the sampler. A run reads `error` instead."""
    error: BaseException | None = None
    """First error of the sampler in this session."""
    ignored: list[str] = field(default_factory=list)
    """Parameters of the first request with sampling parameters that have no effect."""
    started: int = 0
    """Number of calls that were sent to the sampler, including canceled ones."""
    captures: dict[str, Capture] = field(init=False)
    """Calls of each role."""
    preparing: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    """Held while a prompt of the session is prepared, on the event loop of the endpoint."""
    _closed: bool = False
    _handles: set[Handle] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.captures = {role: Capture() for role in self.roles}

    def capture_of(self, model: Any) -> Capture:
        """Return the capture of calls with this model.

        Raises:
            ApiError: the session has roles, and the model is none of them.
        """
        if not self.roles:
            return self.capture
        if model not in self.roles:
            known = ", ".join(self.roles)
            raise ApiError(404, f"The model must be a role: {known}.", param="model", code="model_not_found")
        return self.captures[model]

    def check_length(self, text: str) -> None:
        """Refuse a text that is far too long, before all of it is tokenized.

        Raises:
            ApiError: it has more tokens than a sequence may have.
            ValueError: the tokenizer cannot encode the text.
        """
        most = self.backend.max_sequence_tokens
        if most is not None and self.backend.renderer.exceeds(text, most):
            raise _too_long(f"more than {most}", most)

    def submit(self, prompt: Prompt, parameters: Parameters) -> list[Handle]:
        """Request the responses of one call.

        Raises:
            ApiError: the session is closed or has made all its calls, the prompt is empty or too long, or the sampler
                cannot serve the request.
        """
        config = self._config(prompt, parameters)
        with self._lock:
            if self._closed:
                raise closed_error()
            if self.max_calls is not None and self.started >= self.max_calls:
                raise ApiError(
                    403, f"The session has reached its limit of {self.max_calls} calls.", code="max_calls_exceeded"
                )
            number, self.started = self.started, self.started + 1
            if self.backend.fixed_sampling and not self.ignored:
                self.ignored = parameters.list_ignored(self.backend.generation)
        # A seed of a request names its responses, so that equal requests get equal ones in every session.
        fixed = self.backend.fixed_sampling or parameters.seed is None
        name = f"{self.name}/turn{number}" if fixed else f"seed{parameters.seed}"
        seed = derive_seed(self.seed, "turn", number) if fixed else 0
        ids_P = torch.tensor(prompt.ids, dtype=torch.int64)
        handles: list[Handle] = []
        try:
            for choice in range(parameters.n):
                id = f"{name}/choice{choice}" if choice else name
                handles.append(self.backend.sampler.submit(Request(id, 0, ids_P, config, seed)))
        except BaseException as error:
            for handle in handles:
                handle.cancel()
            raise self.error_of(error) from error
        with self._lock:
            self._handles.update(handles)
        if self._closed:  # closed meanwhile
            self._cancel()
        return handles

    def result(self, handle: Handle) -> Completion:
        """Wait for a response.

        Raises:
            ApiError: the response was canceled, or the sampler failed.
        """
        try:
            return handle.result()
        except CancelledError as error:
            raise closed_error() from error
        except BaseException as error:
            raise self.error_of(error) from error
        finally:
            with self._lock:
                self._handles.discard(handle)

    def keep(self, capture: Capture, prompt: Prompt, completions: Sequence[Completion]) -> list[CapturedCall]:
        """Add the responses of one call to a capture of the session.

        Raises:
            ApiError: the session is closed.
        """
        with self._lock:
            if self._closed:
                raise closed_error()
            return [capture.add(self.backend.renderer, prompt, completion) for completion in completions]

    def score(self, prompt: Prompt, response: Sequence[int], parameters: Parameters) -> TokenScores:
        """Return the log-probs of the tokens of a response, and the most likely tokens.

        Raises:
            ApiError: the scorer failed.
        """
        assert self.backend.scorer is not None  # `submit` has checked it
        temperature = parameters.scoring_temperature(self.backend.generation)
        top = min(parameters.top_logprobs, len(self.backend.renderer.tokenizer))
        try:
            return self.backend.scorer.score(prompt.ids, response, top, temperature)
        except RuntimeError as error:
            raise self.error_of(error) from error

    def close(self) -> None:
        """End the session: cancel unfinished calls, and capture no further ones. Idempotent."""
        with self._lock:
            self._closed = True
        self._cancel()

    def error_of(self, error: BaseException) -> ApiError:
        """Return the error for the client, and store errors that are not the client's."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ValueError):
            return ApiError(400, f"The sampler cannot serve the request: {error}.", code="invalid_request")
        with self._lock:
            first, self.error = self.error is None, self.error or error
        if first and self.logs_errors:
            logger.error("the sampler failed in a request (%s)", self.name, exc_info=error)
        return ApiError(503, "The sampler failed.", code="sampler_failed")

    def _cancel(self) -> None:
        with self._lock:
            handles, self._handles = self._handles, set()
        for handle in handles:
            handle.cancel()

    def _config(self, prompt: Prompt, parameters: Parameters) -> GenerationConfig:
        backend = self.backend
        if not prompt.ids:
            raise ApiError(400, "The prompt has no tokens.", code="empty_prompt")
        most = backend.generation.max_new_tokens
        room = most if backend.max_sequence_tokens is None else backend.max_sequence_tokens - len(prompt.ids)
        if room < 1:
            raise _too_long(len(prompt.ids), backend.max_sequence_tokens)
        if parameters.top_logprobs and backend.scorer is None:
            raise unsupported("top_logprobs", "'top_logprobs' is not supported during training")
        if parameters.stop and not backend.sampler.capabilities().stop_strings:
            raise unsupported("stop", "'stop' is not supported by this sampler")
        return parameters.config(backend.generation, room, fixed=backend.fixed_sampling)


class Sessions:
    """The open sessions of an endpoint, by id and by key. All methods are thread-safe.

    Args:
        main: backend of calls without a session; None if every call needs a session.
        key: key of calls without a session.
        seed: seed of calls without a session that set none.
    """

    def __init__(self, main: ServedPolicy | None = None, key: str = "", *, seed: int = 0) -> None:
        self.main = main
        self._key = key
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}
        self._single = 0
        self._seed = seed
        self._lock = threading.Lock()

    def open(self, session: Session) -> None:
        """Accept calls of a session."""
        with self._lock:
            self._by_id[session.id] = session
            self._by_key[_digest(session.key)] = session

    def close(self, session: Session) -> None:
        """End a session: cancel its calls, and accept no further ones."""
        with self._lock:
            self._by_id.pop(session.id, None)
            self._by_key.pop(_digest(session.key), None)
        session.close()

    def find(self, key: str, id: str | None) -> Session:
        """Return the session of a call.

        Args:
            key: key that the client sent.
            id: id of the session in the path; None if the path has none. The key then determines the session.

        Raises:
            ApiError: the key is wrong, or there is no such session.
        """
        with self._lock:
            # By digests, so that the time of the look-up tells nothing about keys.
            known = self._by_key.get(_digest(key)) if id is None else self._by_id.get(id)
            own = known.key if known is not None else self._key
        # Without a key, only calls of sessions are accepted: an empty key is never right.
        right = hmac.compare_digest(own.encode(), key.encode(errors="surrogatepass")) and bool(own)
        if not right or (known is None and id is not None):
            raise ApiError(401, "Incorrect API key, or unknown session.", code="invalid_api_key")
        if known is not None:
            return known
        if self.main is None:
            raise ApiError(404, "This endpoint serves sessions only.", code="session_required")
        with self._lock:
            self._single += 1
            return Session(self.main, f"call{self._single}", self._seed, logs_errors=True)


def _too_long(tokens: int | str, most: int | None) -> ApiError:
    message = f"The prompt has {tokens} tokens, but a prompt and its response may have at most {most} tokens."
    return ApiError(400, message, param="messages", code="context_length_exceeded")


def closed_error() -> ApiError:
    """Return the error of a call in a session that has ended."""
    return ApiError(409, "The session has ended.", code="session_closed")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
