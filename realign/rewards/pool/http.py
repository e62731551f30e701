"""Reward computed by an HTTP server: the reward workers send one JSON POST request per response."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, getproxies, proxy_bypass, urlopen

from realign.errors import ConfigError, TransientError

_REACH_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
_TRANSIENT = (429, 502, 503, 504)


class Unreachable(RuntimeError):
    """Raised when the server did not answer in time: it is busy, restarting or down. A later retry may succeed."""


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
    """Address of the server: `http://host:port/path`, or https."""
    within_s: float = 30.0
    """Time limit for one response in seconds, all retries included."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"reward function {self.url!r}: invalid URL. Use the form http://host:port/path.")

    def reach(self) -> None:
        """Connect once without sending a request, so that a run with a wrong address fails at startup.

        Raises:
            TransientError: no server accepts connections at the address.
        """
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        if parts.scheme in getproxies() and not proxy_bypass(host):
            return  # behind a proxy, only the proxy can check the server
        try:
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
            socket.create_connection((host, port), timeout=_REACH_S).close()
        except OSError as error:
            raise TransientError(
                f"reward function {self.url!r}: no server accepts connections ({error}). Start it, or correct the URL."
            ) from error

    def __call__(self, prompt: str, response: str, row: dict[str, Any], tokens: list[str] | None = None) -> Any:
        """Return the reward from the server unchecked; the reward workers check that it is a number.

        Raises:
            Unreachable: the server did not answer.
            RuntimeError: the server rejected the request, or its answer has another format.
        """
        asked = {"prompt": prompt, "response": response, "row": row}
        if tokens is not None:
            asked["tokens"] = tokens
        answer = self._post(json.dumps(asked, default=str).encode())
        try:
            return json.loads(answer)["reward"]
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f'{self.url} answered {answer[:200]!r}; expected {{"reward": number}}') from error

    def _post(self, body: bytes) -> bytes:
        request = Request(self.url, body, {"Content-Type": "application/json"}, method="POST")
        deadline, pause_s = time.monotonic() + self.within_s, _FIRST_PAUSE_S
        while True:
            try:
                with urlopen(request, timeout=max(0.01, deadline - time.monotonic())) as reply:
                    return reply.read()
            except HTTPError as error:
                problem = f"status {error.code} {error.reason}"
                error.close()
                if error.code not in _TRANSIENT:
                    raise RuntimeError(f"{self.url}: {problem}") from None
            except (OSError, HTTPException) as error:  # HTTPException: the server died during its answer
                problem = f"{type(error).__name__}: {error}"
            if time.monotonic() + pause_s >= deadline:
                raise Unreachable(f"{self.url} gave no answer within {self.within_s:g} s: {problem}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
