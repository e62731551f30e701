"""Reward computed by an HTTP server: the reward workers send one JSON POST request per response."""

from __future__ import annotations

import functools
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from http.client import HTTPException, IncompleteRead
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    UnknownHandler,
    getproxies,
    proxy_bypass,
)

from realign.cells import read_column
from realign.errors import TransientError
from realign.secrets import check_url, fill_url, redact
from realign.text import visible

_REACH_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
_TRANSIENT = (429, 502, 503, 504)
LARGEST_ANSWER = 64 * 2**20
"""Bytes that an answer may have: enough for dense rewards of any response. Larger ones could fill the memory."""
_READ = 64 * 2**10
AS_IT_IS = {"Accept-Encoding": "identity"}
"""Header of a request. Compressed, an answer could be much larger than what `limit_answer` counts."""


class Unreachable(RuntimeError):
    """Raised when the server did not answer in time: it is busy, restarting or down. A later retry may succeed."""


def reach(url: str, name: str, hidden: Callable[[str], str] = str) -> None:
    """Connect once to the server of a URL without sending a request, so that a wrong address fails at startup.

    Args:
        url: address of the server.
        name: name of the reward function, for the message.
        hidden: removes secrets from the text of an error.

    Raises:
        TransientError: no server accepts connections at the address.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme in getproxies() and not proxy_bypass(host):
        return  # behind a proxy, only the proxy can check the server
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        socket.create_connection((host, port), timeout=_REACH_S).close()
    except OSError as error:
        raise TransientError(
            f"{name}: no server accepts connections ({hidden(str(error))}). Start it, or correct the URL."
        ) from error


@dataclass(frozen=True)
class HttpReward:
    """A reward function that queries the server at `url`. `load_function` returns it for a name that is a URL.

    The request is `{"prompt": text, "response": text, "row": object}`. The expected answer is `{"reward": number}`,
    with null for no reward. For dense rewards, the request also has `"tokens": [text, ...]` and the reward is a list.

    If the server is silent, busy or unreachable, the request is retried for `within_s`, with growing pauses. Any other
    status is an error. The pool then retries the response, see `patience_s`. Values of the row that JSON cannot
    represent are sent as text.
    """

    url: str
    """Address of the server: `http://host:port/path`, or https. `${oc.env:NAME}` inserts an environment variable into
    the path or the query, also a secret that `REALIGN_URL_VARIABLES` lists."""
    within_s: float = 30.0
    """Time limit for one response in seconds, all retries included."""

    _target: str = field(init=False, repr=False, compare=False)
    _secrets: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_url(self.url)
        target, secrets = fill_url(self.url)
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_secrets", tuple(secrets))

    def reach(self) -> None:
        """Connect once without sending a request, so that a run with a wrong address fails at startup.

        Raises:
            TransientError: no server accepts connections at the address.
        """
        reach(self.url, f"reward function '{redact(self.url)}'", self._hide_secrets)

    def __call__(self, prompt: str, response: str, row: dict[str, Any], tokens: list[str] | None = None) -> Any:
        """Return the reward from the server unchecked; the reward workers check that it is a number.

        Raises:
            Unreachable: the server did not answer.
            RuntimeError: the server rejected the request, or its answer has another format.
        """
        asked = {"prompt": prompt, "response": response, "row": row}
        if tokens is not None:
            asked["tokens"] = tokens
        return self._field("reward", asked, '{"reward": number}')

    def _field(self, name: str, asked: dict[str, Any], expected: str) -> Any:
        """Post `asked` as JSON, and return the field `name` of the answer; `expected` describes the answer."""
        answer = self._post(json.dumps(asked, default=str).encode())
        try:
            return json.loads(answer)[name]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            shown = self._hide_secrets(repr(answer[:200]))
            raise RuntimeError(f"{redact(self.url)} answered {shown}; expected {expected}") from error

    def _post(self, body: bytes) -> bytes:
        request = Request(self._target, body, {"Content-Type": "application/json"}, method="POST")
        opener = _opener()
        url = redact(self.url)
        deadline, pause_s = time.monotonic() + self.within_s, _FIRST_PAUSE_S
        while True:
            try:
                # A timeout of 0 would mean a socket that never waits.
                with opener.open(request, timeout=max(0.01, deadline - time.monotonic())) as reply:
                    return self._read(reply, deadline)
            except HTTPError as error:
                problem = f"status {error.code} {self._hide_secrets(str(error.reason))}"
                location = error.headers.get("Location")
                error.close()
                if error.code not in _TRANSIENT:
                    raise RuntimeError(f"{url}: {problem}{self._describe_redirect(error.code, location)}") from None
            except (OSError, HTTPException) as error:  # HTTPException: the server died during its answer
                problem = f"{type(error).__name__}: {self._hide_secrets(str(error))}"
            if time.monotonic() + pause_s >= deadline:
                raise Unreachable(f"{url} gave no answer within {self.within_s:g} s: {problem}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _read(self, reply: Any, deadline: float) -> bytes:
        """Return the content of an answer, if it is not too large or too late."""
        content = bytearray()
        while part := reply.read1(_READ):
            content += part
            if len(content) > LARGEST_ANSWER:
                raise RuntimeError(f"{redact(self.url)}: the answer has more than {LARGEST_ANSWER:,} bytes")
            if time.monotonic() > deadline:  # the timeout of the connection starts again with every byte
                raise TimeoutError("the answer was not complete")
        # Unlike `read`, `read1` does not say that a connection ended too early.
        if reply.length:
            raise IncompleteRead(bytes(content), reply.length)
        return bytes(content)

    def _describe_redirect(self, status: int, location: str | None) -> str:
        if not 300 <= status < 400:
            return ""
        to = "" if location is None else f" to {self._hide_secrets(repr(redact(location)))}"
        return f", a redirect{to}. Redirects are not followed. Set the function to the final URL."

    def _hide_secrets(self, text: str) -> str:
        """Escape a text from outside, and hide the secrets of the URL, which a server can repeat in its answer."""
        for secret in self._secrets:
            for form in {secret, quote(secret, safe=""), quote(secret)} - {""}:
                text = text.replace(form, "***")
        return visible(text)


@dataclass(frozen=True)
class OpenRlhfReward(HttpReward):
    """A reward function that queries a remote reward server of OpenRLHF, with one request per group of responses.

    The request is `{"query": [prompt + response, ...], "prompts": [prompt, ...], "labels": [label, ...]}`. The expected
    answer is `{"rewards": [number, ...]}`, one per query, with null for no reward. Further fields of the answer
    (`scores`, `extra_logs`) are ignored. Connections follow the rules of `HttpReward`.
    """

    label_column: str | None = None
    """Column of the row with the label; None sends null."""

    def __call__(self, prompt: str, responses: list[str], row: dict[str, Any]) -> Any:  # type: ignore[override]
        """Return the rewards from the server unchecked; the reward workers check that they are numbers.

        Raises:
            Unreachable: the server did not answer.
            DataError: the row has no column `label_column`.
            RuntimeError: the server rejected the request, or its answer has another format.
        """
        n, label = len(responses), None if self.label_column is None else read_column(row, self.label_column)
        asked = {"query": [prompt + text for text in responses], "prompts": [prompt] * n, "labels": [label] * n}
        return self._field("rewards", asked, '{"rewards": [number, ...]}')


@functools.cache
def _opener() -> OpenerDirector:
    """Return an opener for http and https that follows no redirect: an answer of another URL is no reward."""
    opener = OpenerDirector()
    for handler in (
        *(ProxyHandler(), HTTPHandler(), HTTPSHandler(), UnknownHandler()),
        *(HTTPDefaultErrorHandler(), HTTPErrorProcessor()),
    ):
        opener.add_handler(handler)
    return opener


async def limit_answer(answer: Any) -> None:
    """Limit the size of an answer, which a client reads as a whole: a hook of httpx, for requests with `AS_IT_IS`.

    Raises:
        ConnectionError: the answer is compressed, although this was not asked for, so its size is not known.
    """
    from httpx2 import AsyncByteStream

    class Limited(AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for part in self._stream:
                size += len(part)
                if size > LARGEST_ANSWER:
                    raise ConnectionError(f"the answer has more than {LARGEST_ANSWER:,} bytes")
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ConnectionError("the answer is compressed, which was not asked for")
    answer.stream = Limited(answer.stream)
