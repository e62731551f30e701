"""Requests of the OpenAI API: validate messages, tools and parameters, and convert them for the template and sampler.

Whatever is wrong with a request is an `ApiError`, which is also the body of the answer. A parameter that is neither
supported nor without effect raises an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from realign.api.generation import GenerationConfig


class ApiError(Exception):
    """A request that the endpoint does not serve.

    Attributes:
        status: HTTP status.
        message: explanation for the client.
        param: parameter of the request that caused the error; None if no single one did.
        code: machine-readable cause.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str, message: str) -> ApiError:
    """Return the error of a parameter with an invalid value."""
    return ApiError(400, f"Invalid value for '{param}': {message}.", param=param, code="invalid_value")


def unsupported(param: str, why: str = "") -> ApiError:
    """Return the error of a parameter that the endpoint does not serve: `why`, or not at all."""
    why = why or f"'{param}' is not supported by this endpoint"
    return ApiError(400, f"Unsupported parameter: {why}.", param=param, code="unsupported_parameter")


_MOST_CHOICES = 128
"""Maximum of `n`, as in the OpenAI API."""
_MOST_STOPS = 16
"""Maximum number of stop strings."""
_MOST_TOP = 20
"""Maximum number of most likely tokens per position, as in the OpenAI API."""
_GREEDY_BELOW = 0.01
"""Temperatures below this value select the most likely token."""

_SUPPORTED = frozenset(
    (
        *("model", "messages", "n", "stop", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed"),
        *("stream", "stream_options", "logprobs", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"),
        *("chat_template_kwargs", "return_token_ids"),
    )
)
"""Supported parameters."""

_ANY = object()
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "user": (_ANY,),
        "metadata": (_ANY,),
        "safety_identifier": (_ANY,),
        "prompt_cache_key": (_ANY,),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "modalities": (["text"],),
        "response_format": ({"type": "text"},),
        "functions": ([],),
    }
)
"""Parameters that are not supported, with the values that have no effect and are therefore accepted."""


@dataclass(frozen=True)
class Parameters:
    """Validated parameters of sampling and of the response."""

    n: int = 1
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    """Number of most likely tokens per position in the log-probs."""
    return_token_ids: bool = False
    parallel_tool_calls: bool = True
    """Whether a response may have several tool calls; otherwise only its first one is returned."""

    def config(self, defaults: GenerationConfig, room: int, *, fixed: bool) -> GenerationConfig:
        """Return the sampling parameters of one response.

        Args:
            defaults: values of missing parameters, and the maximum of `max_new_tokens`.
            room: tokens that fit after the prompt, at least one.
            fixed: whether `temperature` and `top_p` of the request are ignored.
        """
        most = min(self.max_tokens or defaults.max_new_tokens, defaults.max_new_tokens)
        config = replace(
            defaults,
            n=1,
            max_new_tokens=min(most, room),
            # `GenerationConfig` rejects a minimum above the maximum, which this request may have lowered.
            min_new_tokens=min(defaults.min_new_tokens, most, room),
            stop_strings=[*defaults.stop_strings, *self.stop],
        )
        if fixed:
            return config
        if self.top_p is not None:
            config = replace(config, top_p=self.top_p)
        if self.temperature is None:
            return config
        if self.temperature < _GREEDY_BELOW:
            return replace(config, greedy=True)
        return replace(config, greedy=False, temperature=self.temperature)

    def scoring_temperature(self, defaults: GenerationConfig) -> float:
        """Return the temperature of log-probs from a `Scorer`; greedy sampling uses that of `defaults`."""
        greedy = self.temperature is None or self.temperature < _GREEDY_BELOW
        return defaults.temperature if greedy else self.temperature  # type: ignore[return-value]

    def list_ignored(self, defaults: GenerationConfig) -> list[str]:
        """Return the parameters that have no effect where the sampling distribution is fixed."""
        names = [
            f"{name}={value:g}"
            for name, value, used in (
                ("temperature", self.temperature, defaults.temperature),
                ("top_p", self.top_p, defaults.top_p),
            )
            if value is not None and value != used
        ]
        return names if self.seed is None else [*names, f"seed={self.seed}"]


def read_parameters(body: Mapping[str, Any]) -> Parameters:
    """Validate the parameters of a request.

    Args:
        body: the request; parameters with the value null count as missing.

    Raises:
        ApiError: a parameter is not supported, or its value is invalid.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in _SUPPORTED:
            _check_neutral(name, value)
    options = _read_parameter(given, "stream_options", {}, _is(dict), "expected an object")
    if unknown := sorted(set(options) - {"include_usage", "include_obfuscation"}):
        raise unsupported(f"stream_options.{unknown[0]}")
    longest = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    logprobs = _read_parameter(given, "logprobs", False, _is(bool), "expected true or false")
    top = _read_parameter(
        given, "top_logprobs", 0, _integer(0, _MOST_TOP), f"expected an integer from 0 to {_MOST_TOP}"
    )
    if top and not logprobs:
        raise invalid("top_logprobs", "requires logprobs=true")
    return Parameters(
        n=_read_parameter(given, "n", 1, _integer(1, _MOST_CHOICES), f"expected an integer from 1 to {_MOST_CHOICES}"),
        stop=_stops(given.get("stop")),
        max_tokens=_read_parameter(given, longest, None, _integer(1, 2**31), "expected an integer of at least 1"),
        temperature=_read_parameter(given, "temperature", None, _number(0, 2), "expected a number from 0 to 2"),
        top_p=_read_parameter(given, "top_p", None, _number(1e-9, 1), "expected a number above 0 and at most 1"),
        seed=_read_parameter(given, "seed", None, _integer(-(2**63), 2**63), "expected an integer of 64 bits"),
        stream=_read_parameter(given, "stream", False, _is(bool), "expected true or false"),
        include_usage=bool(options.get("include_usage")),
        logprobs=logprobs,
        top_logprobs=top,
        return_token_ids=_read_parameter(given, "return_token_ids", False, _is(bool), "expected true or false"),
        parallel_tool_calls=_read_parameter(given, "parallel_tool_calls", True, _is(bool), "expected true or false"),
    )


def _check_neutral(name: str, value: Any) -> None:
    allowed = _WITHOUT_EFFECT.get(name, ())
    # In Python, 0 == False: a neutral False accepts False only.
    if not any(
        neutral is _ANY or (neutral == value and type(neutral) is not bool) or neutral is value for neutral in allowed
    ):
        raise unsupported(name)


def _read_parameter(
    given: Mapping[str, Any], name: str, default: Any, check: Callable[[Any], bool], expected: str
) -> Any:
    value = given.get(name)
    if value is None:
        return default
    if not check(value):
        raise invalid(name, expected)
    return value


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _integer(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    right = isinstance(stops, list) and len(stops) <= _MOST_STOPS and all(isinstance(s, str) and s for s in stops)
    if not right:
        raise invalid("stop", f"expected a text, or a list of at most {_MOST_STOPS} texts that are not empty")
    return tuple(stops)


_MOST_VALUES, _MOST_CONTAINERS = 1_000_000, 200_000
"""Maximum number of commas of a body, and of brackets and colons, also in texts. While Python parses JSON, no other
thread runs. With these limits that takes about 0.1 s."""


def read_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object in the body of a request.

    Raises:
        ApiError: it is no JSON object, or has too many values.
    """
    for characters, most in (((",",), _MOST_VALUES), (("[", "{", ":"), _MOST_CONTAINERS)):
        if sum(body.count(character.encode()) for character in characters) > most:
            message = f"The request body has more than {most:,} characters {' '.join(characters)}."
            raise ApiError(413, message, code="body_too_large")
    try:
        request = json.loads(body)
    # RecursionError: deeply nested JSON.
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(request, dict):
        raise ApiError(400, "The request body must be a JSON object.", code="invalid_json")
    return request


ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages. A `developer` message becomes a system message, which chat templates know."""

_MOST_TOOLS = 128
"""Maximum number of tools of a request, as in the OpenAI API."""


def read_messages(given: Any) -> list[dict[str, Any]]:
    """Return the messages of a request for a chat template.

    Content parts of text are joined. Arguments of tool calls become mappings, since templates write them as JSON.

    Raises:
        ApiError: a message is invalid, or has content other than text.
    """
    if not isinstance(given, list) or not given:
        raise invalid("messages", "expected a list of at least one message")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(given)]


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a request for a chat template; None without tools, or with `tool_choice` none.

    Raises:
        ApiError: the tools are invalid.
    """
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is None:
        return None
    if not isinstance(tools, list) or len(tools) > _MOST_TOOLS:
        raise invalid("tools", f"expected a list of at most {_MOST_TOOLS} tools")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise invalid(f"tools[{number}]", "expected {'type': 'function', 'function': {'name': ...}}")
    return None if choice == "none" or not tools else tools


def forced_tools(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """Return the names of the tools of which the response must call one; none if the policy decides.

    Args:
        body: the request.
        tools: its tools, see `read_tools`.

    Raises:
        ApiError: `tool_choice` is invalid, or names a tool that the request does not have.
    """
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return []
    names = [str(tool["function"]["name"]) for tool in tools or ()]
    if choice == "required":
        if not names:
            raise invalid("tool_choice", "'required' needs tools")
        return names
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise invalid("tool_choice", "expected 'auto', 'none', 'required', or {'type': 'function', 'function': ...}")
    if function.get("name") not in names:
        raise invalid("tool_choice", f"the request has no tool {function.get('name')!r}")
    return [str(function["name"])]


def _message(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping) or given.get("role") not in ROLES:
        raise invalid(where, f"expected a message with one of the roles {', '.join(ROLES)}")
    out = {name: value for name, value in given.items() if value is not None}
    out["role"] = "system" if given["role"] == "developer" else given["role"]
    out["content"] = _text(out.get("content", ""), f"{where}.content")
    if "tool_calls" in out:
        out["tool_calls"] = _tool_calls(out["tool_calls"], f"{where}.tool_calls")
    return out


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content if _is_text(part)] if isinstance(content, list) else []
    if not isinstance(content, list) or len(texts) < len(content):
        raise invalid(where, "expected text, or a list of text parts")
    return "".join(map(str, texts))


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _tool_calls(given: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(given, Sequence) or not all(
        isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in given
    ):
        raise invalid(where, "expected a list of calls of functions")
    return [{**call, "function": {**call["function"], "arguments": _arguments(call["function"])}} for call in given]


def _arguments(function: Mapping[str, Any]) -> Any:
    """Return the arguments as a mapping; unchanged if they are no JSON object."""
    arguments = function.get("arguments", "")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, Mapping) else arguments
