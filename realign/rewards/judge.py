"""Rewards from an LLM judge over the OpenAI protocol (needs the extra `judge`).

Every server with the chat completions endpoint works, such as the API of OpenAI or a local `vllm serve`. The official
client sends the requests, and retries them with growing pauses.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from realign.cache_folder import Cache
from realign.cells import answers_of, read_column
from realign.errors import ConfigError, DataError, SettingsError
from realign.rewards.pool.functions import Prepared
from realign.rewards.pool.http import AS_IT_IS, Unreachable, limit_answer, reach
from realign.rewards.terms import RewardTerm
from realign.secrets import ALLOWED_VARIABLES, allowed_variables, check_url, redact
from realign.settings import Count, Finite, NonNegativeInt, Positive, Settings
from realign.text import shorten, visible

_OPENAI_URL = "https://api.openai.com/v1"
_OPENAI_KEY = "OPENAI_API_KEY"
_LONGEST_PAUSE_S = 10.0  # upper bound of the client's pause before a retry, with some slack
_PLACE = re.compile(r"\{([A-Za-z_]\w*(?:\.[\w*]+)*)\}")
_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"


@dataclass
class ScoreReader(Settings, ABC):
    """How to read the score from the judge's answer. The reward is the score, scaled from [low, high] to [0, 1]."""

    low: Finite = 0.0
    """Lowest valid score, which is reward 0."""
    high: Finite = 10.0
    """Highest valid score, which is reward 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low >= self.high:
            raise SettingsError(f"low={self.low:g}: must be below high={self.high:g}")

    @property
    def request(self) -> dict[str, Any]:
        """Further arguments of the request."""
        return {}

    @abstractmethod
    def score_in(self, answer: str) -> str | float | None:
        """Return the score in the answer; None if there is none."""

    def reward(self, answer: str) -> float:
        """Return the reward of the judge's answer.

        Raises:
            ValueError: the answer contains no score, or one out of range.
        """
        shown = shorten(answer, 300)
        try:
            score = float(self.score_in(answer))  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ValueError(f"the judge's answer contains no score: {shown!r}") from error
        if not self.low <= score <= self.high:
            raise ValueError(f"the judge's score {score:g} is not in [{self.low:g}, {self.high:g}]: {shown!r}")
        return (score - self.low) / (self.high - self.low)


@dataclass
class Number(ScoreReader):
    """The last number in the answer."""

    @override
    def score_in(self, answer: str) -> str | None:
        numbers = re.findall(_NUMBER, answer)
        return numbers[-1] if numbers else None


@dataclass
class Pattern(ScoreReader):
    """The text of a group of a regular expression."""

    pattern: str = r"[Ss]core:\s*([-+]?\d+(?:\.\d+)?)"
    """Regular expression whose first group matches the score. The last match in the answer counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise SettingsError(f"pattern={self.pattern!r}: invalid regular expression ({error})") from error
        if groups != 1:
            raise SettingsError(f"pattern={self.pattern!r}: has {groups} groups; it must have one group, the score")

    @override
    def score_in(self, answer: str) -> str | None:
        matches = re.findall(self.pattern, answer)
        return matches[-1] if matches else None


@dataclass
class Structured(ScoreReader):
    """Structured output: the server makes the answer match a JSON schema with a reason and a score."""

    @property
    @override
    def request(self) -> dict[str, Any]:
        fields = {"reason": {"type": "string"}, "score": {"type": "number"}}
        schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
        return {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "verdict", "strict": True, "schema": schema},
            }
        }

    @override
    def score_in(self, answer: str) -> float | None:
        score = json.loads(answer).get("score") if answer.strip().startswith("{") else None
        # `true` would become a score of 1.
        return None if isinstance(score, bool) else score


@dataclass
class Judge(RewardTerm):
    """A reward term: an LLM scores each response. Its calls run concurrently."""

    model: str
    """Name of the model on the server."""
    base_url: str = _OPENAI_URL
    """Address of the API, such as `http://localhost:8000/v1`. Redirects are not followed."""
    api_key_variable: str | None = None
    """Name of the environment variable with the API key. null: OPENAI_API_KEY for the API of OpenAI, and no key for
    other addresses. Variables for other addresses must be listed in REALIGN_URL_VARIABLES."""
    prompt: str = (
        "Score the answer to a task from 0 (useless) to 10 (perfect).\n\nTask:\n{prompt}\n\nAnswer:\n{response}\n\n"
        "Reply with the score only, as a number from 0 to 10."
    )
    """Message to the judge. `{prompt}`, `{response}` and `{COLUMN}` are replaced by the texts and by columns of the
    row. A response whose row has null there gets no reward."""
    system: str = ""
    """System message; empty sends none."""
    score: ScoreReader = field(default_factory=Number)
    """How to read the score from the answer: number, pattern or structured."""
    options: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    """Further arguments of the request, such as `{temperature: 0, max_tokens: 64}`."""
    timeout_s: Positive = 60.0
    """Time limit of one request in seconds."""
    retries: NonNegativeInt = 3
    """Retries of a request that fails with a timeout, a lost connection or status 408, 409, 429 or 5xx."""
    cache_dir: str | None = None
    """Folder in which answers are kept between runs; null keeps them in the memory of each worker. An answer is used
    again only for exactly the same request."""
    cache_entries: Count = 10_000
    """Answers that each worker keeps in memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url(self.base_url)
        if reserved := sorted({"model", "messages", "n", "stream", *self.score.request} & self.options.keys()):
            raise SettingsError(f"options.{reserved[0]}: the judge sets this argument. Remove it")

    @override
    def load(self) -> Callable[..., Any]:
        if importlib.util.find_spec("openai") is None:
            raise ConfigError("realign.rewards.judge needs the package openai: pip install 'realign-rl[judge]'")
        name = self._key_variable
        if name is not None:
            if not self._official and name not in allowed_variables(os.environ):
                raise ConfigError(
                    f"api_key_variable={name}: base_url={redact(self.base_url)} is not the API of OpenAI, and a config "
                    f"cannot send a secret to another server. Set {ALLOWED_VARIABLES}={name} in the environment."
                )
            if not os.environ.get(name):
                raise ConfigError(
                    f"api_key_variable: the environment variable {name} is not set. Set it to the API key."
                )
        return JudgeFunction(self)

    @override
    def deadline_s(self, default: float) -> float:
        # one call makes all retries of its request
        return (self.retries + 1) * self.timeout_s + self.retries * _LONGEST_PAUSE_S

    @property
    @override
    def variables(self) -> tuple[str, ...]:
        return () if self._key_variable is None else (self._key_variable,)

    @property
    def _official(self) -> bool:
        return self.base_url.rstrip("/") == _OPENAI_URL

    @property
    def _key_variable(self) -> str | None:
        return self.api_key_variable or (_OPENAI_KEY if self._official else None)

    def request(self, prompt: str, response: str, row: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of the request for one response; None if the row lacks a value of the template.

        Raises:
            DataError: the template names a column that the row does not have.
        """
        own = {"prompt": prompt, "response": response}
        values = {name: _format_cell(read_column({**row, **own}, name)) for name in _PLACE.findall(self.prompt)}
        if None in values.values():
            return None
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": _PLACE.sub(lambda match: str(values[match[1]]), self.prompt)})
        return {"model": self.model, "messages": messages, **self.score.request, **self.options}

    @property
    def api_key(self) -> str:
        """The API key of the environment; a placeholder if the server needs none, since the client requires one."""
        return "none" if self._key_variable is None else os.environ[self._key_variable]


def _format_cell(cell: Any) -> str | None:
    """Return a cell as the judge reads it: an object or a list as code, a number without the zero of pandas."""
    if isinstance(cell, str):
        return cell
    with suppress(DataError):
        answers = answers_of(cell)
        if not answers:
            return None
        if not isinstance(cell, list | tuple):
            return answers[0]
    return str(cell)


class JudgeFunction(Prepared):
    """The reward function of a `Judge`. Each worker process has one client and one cache."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.__qualname__ = f"judge {judge.model} at {redact(judge.base_url)}"  # its name in messages
        self._client: Any = None
        self._answers: OrderedDict[str, asyncio.Future[str]] = OrderedDict()
        folder = judge.cache_dir
        self._kept = None if folder is None else Cache(root=Path(folder).expanduser(), limit=sys.maxsize)

    @property
    @override
    def note(self) -> str:
        return ""

    def prepare(self) -> JudgeFunction:
        """Connect once to the server, so that a run with a wrong address fails at startup.

        Raises:
            TransientError: no server accepts connections at the address.
        """
        reach(self.judge.base_url, self.__qualname__)
        return self

    def __reduce__(self) -> tuple[type[JudgeFunction], tuple[Judge]]:
        return JudgeFunction, (self.judge,)

    async def __call__(self, prompt: str, response: str, row: dict[str, Any]) -> float | None:
        """Return the reward of a response; None if the row lacks a value of the template.

        Raises:
            Unreachable: the server did not answer, also after all retries.
            RuntimeError: the server rejected the request.
            ValueError: the answer contains no valid score.
        """
        request = self.judge.request(prompt, response, row)
        return None if request is None else self.judge.score.reward(await self._answer(request))

    async def _answer(self, request: dict[str, Any]) -> str:
        """Return the answer to a request. Equal requests, also concurrent ones, are sent once."""
        # Text from JSON can contain half a surrogate pair, which UTF-8 alone does not encode.
        sent = json.dumps([self.judge.base_url, request], sort_keys=True, ensure_ascii=False, default=str)
        key = hashlib.sha256(sent.encode("utf-8", "surrogatepass")).hexdigest()
        if key in self._answers:
            self._answers.move_to_end(key)
            # A caller that is canceled must not cancel the request for the others.
            return await asyncio.shield(self._answers[key])
        if (known := self._read(key)) is not None:
            return known
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[key] = answer
        try:
            answer.set_result(await self._ask(request))
        except BaseException as error:
            self._answers.pop(key, None)
            answer.set_exception(error if isinstance(error, Exception) else Unreachable("the request was canceled"))
            answer.exception()  # other callers may not exist, and asyncio logs a failure that is never read
            raise
        self._write(key, sent, answer.result())
        while len(self._answers) > self.judge.cache_entries:
            self._answers.popitem(last=False)
        return answer.result()

    async def _ask(self, request: dict[str, Any]) -> str:
        import openai

        if self._client is None:
            self._client = openai.AsyncOpenAI(
                api_key=self.judge.api_key,
                base_url=self.judge.base_url,
                timeout=self.judge.timeout_s,
                max_retries=self.judge.retries,
                default_headers=AS_IT_IS,
                http_client=openai.DefaultAsyncHttpxClient(
                    follow_redirects=False, event_hooks={"response": [limit_answer]}
                ),
            )
        where = self.__qualname__
        try:
            reply = await self._client.chat.completions.with_raw_response.create(**request)
        except openai.APIStatusError as error:
            problem = f"{where}: status {error.status_code}: {self._hide_key(str(error.message))}"
            if error.status_code in (408, 409, 429) or error.status_code >= 500:
                raise Unreachable(problem) from None
            raise RuntimeError(problem) from None
        except openai.APIConnectionError as error:  # includes timeouts
            cause = f" ({self._hide_key(repr(error.__cause__))})" if error.__cause__ is not None else ""
            raise Unreachable(f"{where}: {self._hide_key(str(error))}{cause}") from None
        except (openai.OpenAIError, ConnectionError) as error:
            raise RuntimeError(f"{where}: {self._hide_key(str(error))}") from None
        try:
            # not parsed by the client, which takes any JSON for a completion
            content = json.loads(reply.content)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            content = None
        if not isinstance(content, str):
            raise RuntimeError(f"{where} answered {self._hide_key(reply.text)!r}; expected a chat completion with text")
        return content

    def _hide_key(self, text: str) -> str:
        """Escape a text from outside, and hide the API key in it."""
        key = os.environ.get(self.judge.variables[0], "") if self.judge.variables else ""
        return visible(shorten(text.replace(key, "***") if key else text, 500))

    def _read(self, key: str) -> str | None:
        """Return an answer from the folder of answers; None if it contains none, or a damaged one."""
        try:
            answer = json.loads(self._kept.read(f"{key[:2]}/{key}.json") or b"null")["answer"] if self._kept else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return answer if isinstance(answer, str) else None

    def _write(self, key: str, sent: str, answer: str) -> None:
        """Keep an answer in the folder of answers. Other processes see a whole file or none."""
        if self._kept is not None:
            content = json.dumps({"request": json.loads(sent), "answer": answer})
            self._kept.write(f"{key[:2]}/{key}.json", content.encode())
