"""`ServerProtocol`: what a sampler needs from the HTTP interface of an inference server."""

from __future__ import annotations

import asyncio
import json
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from realign.api.generation import GenerationConfig

if TYPE_CHECKING:
    from httpx2 import AsyncClient

LARGEST_ANSWER = 4 * 2**20
_BYTES_PER_TOKEN = 1000
"""An answer may have `LARGEST_ANSWER` bytes, and these for each token of its prompt and its response. Larger ones could
fill the memory of the run, since hundreds of requests wait for theirs. vLLM sends about 100 bytes per token."""
_SHOWN = 300
_LOGPROBS = (-1e4, 1e-3)
"""Valid log-probs. They may exceed 0 by rounding errors. A token with a lower one cannot have been sampled, and much
lower ones are infinite in fp32. vLLM replaces those below -9999."""
ANY_TOKEN = 2**31 - 1
"""Size of a vocabulary that is not known."""
LOADING = "loading"
"""Label of a server while it loads weights."""
_brief = reprlib.repr


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
class ResponsePart:
    """Tokens that one HTTP request sampled."""

    ids: list[int]
    logprobs: list[float]
    end: End
    label: str | None = None
    """Label of the weights, if the server reports it with the tokens."""
    kept: list[list[int]] = field(default_factory=list)
    """Ids of the tokens that each token was drawn from, with `GenerationConfig.sampling_replay`."""


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
    words: int = ANY_TOKEN
    """Size of the vocabulary."""
    adapter: str | None = None
    """Name of the LoRA adapter to sample with; None: the weights of the model."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the prompt and of the longest answer, which limits the size of the answer.

        The ids of a sampling mask take a hundredth each.
        """
        masks = self.config.max_new_tokens * self.config.top_k if self.config.sampling_replay else 0
        return len(self.ids) + self.config.max_new_tokens + masks // 100


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself."""

    dtype: str | None = None
    """Dtype in which it computes, such as bfloat16."""
    receives: bool = False
    """Whether its workers have the methods of `realign_worker.WeightReceiver`."""


@dataclass(frozen=True)
class Received:
    """The copy of the weights that a server has made."""

    digest: str | None
    """See `realign_worker.digest`; None if there is no copy."""
    paths: list[str]
    """Files of the copy, for the workers of the server."""


ENDS = MappingProxyType({"stop": End.stop, "length": End.length, "abort": End.aborted})
"""Reasons by which vLLM and SGLang name the end of a response."""


def sampling_settings(config: GenerationConfig, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Return the sampling settings that vLLM and SGLang call by the same names.

    They are complete, because servers take missing ones from the `generation_config.json` of the model.
    """
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "n": 1}
    return neutral | {
        "temperature": 0.0 if config.greedy else config.temperature,
        "top_p": config.top_p,
        "min_p": config.min_p,
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
    async def sample(self, http: AsyncClient, ask: Ask) -> ResponsePart:
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

    async def facts(self, http: AsyncClient) -> ServerFacts:
        """Return what the server says about itself."""
        return ServerFacts()

    async def receive(self, http: AsyncClient, folder: Path, base: str | None = None) -> Received:
        """Let the server copy the weights of a folder, or apply a folder of deltas if its copy has the digest `base`.

        Called only if `ServerFacts.receives`, as `load_received`.
        """
        raise NotImplementedError(f"{self.title} has no method for it")

    async def load_received(self, http: AsyncClient, paths: Sequence[str], label: str) -> None:
        """Load the files of a copy; see `load` and `receive`."""
        raise NotImplementedError(f"{self.title} has no method for it")

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
    async def wake_weights(self, http: AsyncClient) -> None:
        """Allocate the memory of the weights that `sleep` freed. The server may then be started or stopped.

        It can load weights, but not compute before `wake_cache`. Loading needs memory that the KV cache would take.
        """

    @abstractmethod
    async def wake_cache(self, http: AsyncClient) -> None:
        """Allocate all other memory that `sleep` freed, after `wake_weights`; see there."""

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


async def post(
    http: AsyncClient,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    tokens: int = 0,
    text: bool = False,
    params: Mapping[str, Any] | None = None,
) -> Any:
    """Send a POST request and return the JSON answer; None if the answer is empty.

    Args:
        http: the server.
        path: path of the URL.
        body: JSON body.
        tokens: number of tokens of the prompt and the response, which limits the size of the answer.
        text: return the answer as text.
        params: parameters of the URL.

    Raises:
        Unavailable: the server did not answer in time, its answer is too large, or it failed.
        Refused: the server rejects the request.
    """
    return await _answer(http, "POST", path, body, params, LARGEST_ANSWER + _BYTES_PER_TOKEN * tokens, text)


async def get(http: AsyncClient, path: str, params: Mapping[str, Any] | None = None) -> Any:
    """Send a GET request; see `post`."""
    return await _answer(http, "GET", path, None, params, LARGEST_ANSWER, False)


async def _answer(
    http: AsyncClient,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    params: Mapping[str, Any] | None,
    largest: int,
    text: bool,
) -> Any:
    from httpx2 import HTTPError, InvalidURL

    try:
        async with asyncio.timeout(http.timeout.read):  # that of the client starts again with every byte
            status, content = await _read(http, method, path, body, params, largest)
    except (HTTPError, InvalidURL, OSError) as error:  # OSError includes TimeoutError
        raise Unavailable(f"{method} {path}: {type(error).__name__}: {error}") from error
    what = f"{method} {path}: status {status}"
    # These say that the same request may succeed later: time-out, too early, too many requests.
    if status >= 500 or status in (408, 425, 429):
        raise Unavailable(f"{what}: {_shorten(content)}")
    if status >= 300:  # redirects are not followed
        raise Refused(f"{what}: {_shorten(content)}")
    if text:
        return content.decode("utf-8", "replace")
    if not content:
        return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"{what}, but the answer is not valid JSON: {_shorten(content)}") from error


async def _read(
    http: AsyncClient,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    params: Mapping[str, Any] | None,
    largest: int,
) -> tuple[int, bytes]:
    """Return the status and the content of an answer, of which nothing is decompressed."""
    content = bytearray()
    headers = {"Accept-Encoding": "identity"}
    async with http.stream(method, path, json=body, params=params, headers=headers) as answer:
        # The limit counts bytes as they arrive, and compressed ones could become far more.
        if (coding := answer.headers.get("Content-Encoding", "identity").lower()) != "identity":
            raise Unavailable(f"{method} {path}: the answer is compressed ({coding!r:.50}), which was not asked for")
        async for part in answer.aiter_raw():
            content += part
            if len(content) > largest:
                raise Unavailable(f"{method} {path}: the answer has more than {largest:,} bytes")
    return answer.status_code, bytes(content)


def _shorten(content: bytes) -> str:
    text = " ".join(content[: 4 * _SHOWN].decode("utf-8", "replace").split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_part(
    ids: Any, logprobs: Any, reason: Any, ask: Ask, label: str | None = None, kept: Any = ()
) -> ResponsePart:
    """Return the tokens of an answer.

    Raises:
        Unavailable: the answer is malformed. The lengths differ, there are too many tokens or some after an end token,
            or values are no valid token ids or log-probs. A sampling mask lacks its token, or the reason of the end is
            unknown.
    """
    end = ENDS.get(reason) if isinstance(reason, str) else None
    if end is None:
        raise Unavailable(f"the answer ended for an unknown reason: {_brief(reason)}")
    if not isinstance(ids, list) or not isinstance(logprobs, list) or len(ids) != len(logprobs):
        raise Unavailable(f"the answer has no equal lists of ids and log-probs: {_brief(ids)} and {_brief(logprobs)}")
    if len(ids) > ask.config.max_new_tokens or (not ids and end is not End.aborted):
        raise Unavailable(f"the answer has {len(ids)} tokens, of at most {ask.config.max_new_tokens}")
    for token, logprob in zip(ids, logprobs, strict=True):
        # `isinstance` would accept true and false.
        if type(token) is not int or not 0 <= token < ask.words:
            raise Unavailable(f"the answer has the token id {_brief(token)}, but the last valid one is {ask.words - 1}")
        if not _is_logprob(logprob):
            raise Unavailable(f"the answer has the log-prob {_brief(logprob)}, which no sampled token has")
    # A server that ignores its end tokens would otherwise train the policy on text after the end of its responses.
    stops = () if ask.config.fixed_length else ask.stop_ids
    if (ended := next((token for token in ids[:-1] if token in stops), None)) is not None:
        raise Unavailable(f"the answer continues after the end token {ended}")
    kept = _check_masks(kept, ids, ask) if ask.config.sampling_replay else []
    return ResponsePart(ids, [min(float(x), 0.0) for x in logprobs], end, label, kept)


def _check_masks(kept: Any, ids: Sequence[int], ask: Ask) -> list[list[int]]:
    if not isinstance(kept, list) or len(kept) != len(ids):
        raise Unavailable(f"the answer has no sampling mask for each of its {len(ids)} tokens: {_brief(kept)}")
    for mask, token in zip(kept, ids, strict=True):
        if not isinstance(mask, list) or not all(type(x) is int and 0 <= x < ask.words for x in mask):
            raise Unavailable(f"the answer has a sampling mask that is no list of token ids: {_brief(mask)}")
        if token not in mask:
            raise Unavailable(f"the answer has the token {token}, but not in its sampling mask: {_brief(mask)}")
    return kept


def check_scores(logprobs: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-probs of a text without its first token.

    Raises:
        Unavailable: there are too few, or a value is no log-prob.
    """
    if not isinstance(logprobs, list) or len(logprobs) != len(ids) - 1 or not all(map(_is_logprob, logprobs)):
        raise Unavailable(f"the answer has no valid log-probs of a text with {len(ids)} tokens: {_brief(logprobs)}")
    return [float(x) for x in logprobs]


def _is_logprob(x: Any) -> bool:
    return type(x) in (int, float) and _LOGPROBS[0] <= x <= _LOGPROBS[1]


def item(answer: Any, *path: str | int) -> Any:
    """Return an item inside of a JSON answer.

    Raises:
        Unavailable: the answer has no such item.
    """
    value = answer
    try:
        for key in path:
            value = value[key]
    except (LookupError, TypeError) as error:
        raise Unavailable(f"the answer has no {'.'.join(map(str, path))}: {_brief(answer)}") from error
    return value


def items(answer: Any, *path: str | int) -> list[Any]:
    """Return a list inside of a JSON answer; see `item`."""
    value = item(answer, *path)
    if not isinstance(value, list):
        raise Unavailable(f"the answer has no list {'.'.join(map(str, path))}: {_brief(answer)}")
    return value
