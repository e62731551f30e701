"""`ServerProtocol`: what a sampler needs from the HTTP interface of an inference server."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from realign.api.generation import GenerationConfig

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

_LONGEST_ANSWER = 300
_HIGHEST_LOGPROB = 1e-3
"""Log-probs may exceed 0 by rounding errors."""


class Unavailable(Exception):
    """The server did not answer, or it failed. Another server, or the same one later, may serve the request."""


class Refused(ValueError):
    """The server rejects the request, and would reject it again."""


class End(Enum):
    """Why a server stopped to sample a response."""

    stop = auto()
    """A stop token or a stop string."""
    length = auto()
    """The maximum number of tokens."""
    aborted = auto()
    """The server was paused. The response can be continued."""


@dataclass(frozen=True)
class Part:
    """Tokens that one HTTP request sampled."""

    ids: list[int]
    logprobs: list[float]
    end: End
    label: str | None = None
    """Label of the weights, if the server reports it with the tokens."""


@dataclass(frozen=True)
class Ask:
    """One HTTP request for tokens."""

    ids: Sequence[int]
    """Prompt, and the tokens of the response that were sampled before."""
    config: GenerationConfig
    """Sampling parameters. `max_new_tokens` and `min_new_tokens` count the tokens that are missing."""
    stop_ids: Sequence[int]
    """Tokens that end the response."""
    seed: int
    """Seed of this request, 63 bits."""
    adapter: str | None = None
    """Name of the LoRA adapter to sample with; None: the weights of the model."""


ENDS = MappingProxyType({"stop": End.stop, "length": End.length, "abort": End.aborted})
"""Reasons by which vLLM and SGLang name the end of a response."""


def sampling_settings(config: GenerationConfig, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Return the sampling settings that vLLM and SGLang call by the same names.

    They are complete, because servers take missing ones from the `generation_config.json` of the model.
    """
    neutral = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "n": 1}
    return neutral | {
        "temperature": 0.0 if config.greedy else config.temperature,
        "top_p": config.top_p,
        "ignore_eos": True,  # `stop_token_ids` contains the end tokens
        "stop_token_ids": [] if config.fixed_length else list(stop_ids),
        "stop": list(config.stop_strings),
        "skip_special_tokens": False,
    }


def least_tokens(config: GenerationConfig) -> int:
    """Return the minimum number of tokens for a server, which also blocks end tokens that do not end a response."""
    return 0 if config.fixed_length else config.min_new_tokens


class ServerProtocol(ABC):
    """The HTTP interface of one kind of inference server. Token ids in, token ids out."""

    title: ClassVar[str]
    """Name of the server, for messages."""
    keeps_weights: ClassVar[frozenset[int]] = frozenset()
    """Levels of `sleep` that keep the weights in the memory of the host."""

    @abstractmethod
    async def sample(self, http: AsyncClient, ask: Ask) -> Part:
        """Sample tokens.

        Raises:
            Unavailable: the server did not answer, or failed.
            Refused: the server rejects the request.
        """

    @abstractmethod
    async def stop(self, http: AsyncClient) -> None:
        """Stop sampling. The requests that are being served end, with the tokens sampled so far."""

    @abstractmethod
    async def start(self, http: AsyncClient) -> None:
        """Continue after `stop`."""

    @abstractmethod
    async def load(self, http: AsyncClient, folder: Path, label: str) -> None:
        """Load the weights of a model folder and forget everything that was computed with other weights.

        Call it between `stop` and `start`. If it fails, `label` returns another label than the given one.
        """

    @abstractmethod
    async def load_adapter(self, http: AsyncClient, folder: Path, label: str) -> None:
        """Load the LoRA adapter of a folder of peft as an adapter called `label`.

        Call it between `stop` and `start`. If it fails, `label` returns another label than the given one.
        """

    @abstractmethod
    async def unload_adapter(self, http: AsyncClient, name: str) -> None:
        """Remove an adapter.

        Raises:
            Refused: the server does not have it.
        """

    @abstractmethod
    async def sleep(self, http: AsyncClient, level: int) -> None:
        """Free the memory of the KV cache and the weights, of which `keeps_weights` says whether they are kept.

        Call it after `stop`. The server has to be started for it; see `ServerSettings.sleep_level`.
        """

    @abstractmethod
    async def wake(self, http: AsyncClient) -> None:
        """Allocate the memory that `sleep` freed. The server may then be started or stopped."""

    @abstractmethod
    async def label(self, http: AsyncClient) -> str | None:
        """Return the label of the weights; None or an arbitrary text before the first `load`."""

    @abstractmethod
    async def score(self, http: AsyncClient, ids: Sequence[int], adapter: str | None = None) -> list[float]:
        """Return the log-probs of all tokens of a text but the first, at temperature 1.

        Args:
            http: the server.
            ids: the text.
            adapter: see `Ask.adapter`.

        Raises:
            Unavailable: the server did not answer, or failed.
            Refused: the server rejects the request.
        """

    async def check_health(self, http: AsyncClient) -> None:
        """Raise Unavailable unless the server answers."""
        await get(http, "/health")


async def post(http: AsyncClient, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Send a POST request and return the JSON answer; None if the answer is empty.

    Args:
        http: the server.
        path: path of the URL.
        body: JSON body.
        options: further arguments of the HTTP client; `text=True` returns the answer as text.

    Raises:
        Unavailable: the server did not answer, or failed.
        Refused: the server rejects the request.
    """
    return await _answer(http, "POST", path, json=body, **options)


async def get(http: AsyncClient, path: str) -> Any:
    """Send a GET request; see `post`."""
    return await _answer(http, "GET", path)


async def _answer(http: AsyncClient, method: str, path: str, *, text: bool = False, **options: Any) -> Any:
    from httpx2 import HTTPError, InvalidURL

    try:
        answer = await http.request(method, path, **options)
    except (HTTPError, InvalidURL, OSError) as error:
        raise Unavailable(f"{method} {path}: {type(error).__name__}: {error}") from error
    what = f"{method} {path}: status {answer.status_code}"
    if answer.status_code >= 500 or answer.status_code in (408, 425, 429):
        raise Unavailable(f"{what}: {_text(answer)}")
    if answer.status_code >= 300:  # redirects are not followed
        raise Refused(f"{what}: {_text(answer)}")
    if text:
        return answer.text
    if not answer.content:
        return None
    try:
        return json.loads(answer.content)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"{what}, but the answer is not valid JSON: {_text(answer)}") from error


def _text(answer: Response) -> str:
    text = " ".join(answer.text.split())
    return text if len(text) <= _LONGEST_ANSWER else f"{text[:_LONGEST_ANSWER]}..."


def checked_part(ids: Any, logprobs: Any, reason: Any, ask: Ask, label: str | None = None) -> Part:
    """Return the tokens of an answer.

    Raises:
        Unavailable: the answer is malformed: the lengths differ, there are too many tokens, values are no valid token
            ids or log-probs, or the reason of the end is unknown.
    """
    if reason not in ENDS:
        raise Unavailable(f"the answer ended for an unknown reason: {reason!r:.100}")
    end = ENDS[reason]
    valid_ids = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
    valid_logprobs = isinstance(logprobs, list) and all(map(_is_logprob, logprobs))
    if not valid_ids or not valid_logprobs or len(ids) != len(logprobs):
        raise Unavailable(f"the answer has no valid token ids and log-probs: {ids!r:.150} and {logprobs!r:.150}")
    if len(ids) > ask.config.max_new_tokens or (not ids and end is not End.aborted):
        raise Unavailable(f"the answer has {len(ids)} tokens, of at most {ask.config.max_new_tokens}")
    return Part(ids, [min(float(x), 0.0) for x in logprobs], end, label)


def checked_scores(found: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-probs of a text without its first token.

    Raises:
        Unavailable: there are too few, or a value is no log-prob.
    """
    if not isinstance(found, list) or len(found) != len(ids) - 1 or not all(map(_is_logprob, found)):
        raise Unavailable(f"the answer has no valid log-probs of a text with {len(ids)} tokens: {found!r:.300}")
    return [float(x) for x in found]


def _is_logprob(x: Any) -> bool:
    return isinstance(x, int | float) and math.isfinite(x) and x <= _HIGHEST_LOGPROB


def item(answer: Any, *path: str | int) -> Any:
    """Return an item inside of a JSON answer.

    Raises:
        Unavailable: the answer has no such item.
    """
    found = answer
    try:
        for key in path:
            found = found[key]
    except (LookupError, TypeError) as error:
        raise Unavailable(f"the answer has no {'.'.join(map(str, path))}: {answer!r:.300}") from error
    return found
