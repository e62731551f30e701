"""A reward that a server computes: one POST of JSON for each response, on connections of the reward workers."""

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

_REACH_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
_TRANSIENT = (429, 502, 503, 504)


class Unreachable(RuntimeError):
    """The server gave no answer in time: it is busy, restarts, or is gone. Asking later may help."""


@dataclass(frozen=True)
class HttpReward:
    """The reward function that asks `url`; what `load_function` makes of a name that is a URL.

    It posts `{"prompt": text, "response": text, "row": object}` and expects `{"reward": number}`, or null for no
    verdict. Dense rewards are asked for with another key, `"tokens": [text, ...]`, and are a list. A server that is
    silent, busy or cannot be reached is asked again, with growing pauses, for `within_s`; any other status is an error.
    The pool then asks once more, see `patience_s`. Values of the row that JSON does not know are sent as text.
    """

    url: str
    """Where to post to: `http://host:port/path`, or https."""
    within_s: float = 30.0
    """Seconds that one response may take, with all repetitions."""

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
            Unreachable: the server gave no answer.
            RuntimeError: it refused, or answered something else.
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
            except (OSError, HTTPException) as error:  # URLError is one; a server that dies in its answer is the other
                problem = f"{type(error).__name__}: {error}"
            if time.monotonic() + pause_s >= deadline:
                raise Unreachable(f"{self.url} gave no answer within {self.within_s:g} s: {problem}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
