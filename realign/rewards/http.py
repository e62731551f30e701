"""A reward that a server computes: one POST of JSON for each response, on connections of the reward workers."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, getproxies, proxy_bypass, urlopen

_REACH_S = 10.0
_PAUSES_S = (0.5, 2.0)
_TRANSIENT = (429, 502, 503, 504)


@dataclass(frozen=True)
class HttpReward:
    """The reward function that asks `url`; what `load_function` makes of a name that is a URL.

    It posts `{"prompt": text, "response": text, "row": object}` and expects `{"reward": number}`, or null for no
    verdict. Dense rewards are asked for with another key, `"tokens": [text, ...]`, and are a list. A server that is
    busy or cannot be reached is asked again, twice; any other status is an error. How long one response may take in all
    is the deadline of the reward workers (`timeout_s`), and `workers` is the number of requests at once. Values of the
    row that JSON does not know are sent as text.
    """

    url: str
    """Where to post to: `http://host:port/path`, or https."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url!r} is not a URL such as http://host:port/path")

    def reach(self) -> None:
        """Connect once without asking anything, so that a run with a wrong address ends before it starts.

        Raises:
            ValueError: nothing listens there.
        """
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        if parts.scheme in getproxies() and not proxy_bypass(host):
            return  # whether the server is there, only the proxy knows
        try:
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
            socket.create_connection((host, port), timeout=_REACH_S).close()
        except OSError as error:
            raise ValueError(f"reward function {self.url!r}: no server there ({error})") from error

    def __call__(self, prompt: str, response: str, row: dict[str, Any], tokens: list[str] | None = None) -> Any:
        """The server's verdict, as it said it: the reward workers check numbers.

        Raises:
            RuntimeError: the server gave no answer, refused, or answered something else.
        """
        asked = {"prompt": prompt, "response": response, "row": row}
        if tokens is not None:
            asked["tokens"] = tokens
        answer = self._post(json.dumps(asked, default=str).encode())
        try:
            return json.loads(answer)["reward"]
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f'{self.url} answered {answer[:200]!r}, expected {{"reward": number}}') from error

    def _post(self, body: bytes) -> bytes:
        request = Request(self.url, body, {"Content-Type": "application/json"}, method="POST")
        for pause_s in (*_PAUSES_S, None):
            try:
                with urlopen(request) as reply:
                    return reply.read()
            except HTTPError as error:
                problem = f"status {error.code} {error.reason}"
                transient = error.code in _TRANSIENT
                error.close()
            except (URLError, OSError) as error:
                problem, transient = f"{type(error).__name__}: {error}", True
            if pause_s is None or not transient:
                raise RuntimeError(f"{self.url}: {problem}")
            time.sleep(pause_s)
        raise AssertionError("the last pause is None")
