"""Parameters of requests: validate them, and convert them to the sampling parameters of a sampler.

A parameter that is neither supported nor without effect raises an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from realign.api.generation import GenerationConfig
from realign.endpoint.errors import ApiError, invalid

MOST_CHOICES = 128
"""Maximum of `n`, as in the OpenAI API."""
MOST_STOPS = 16
"""Maximum number of stop strings."""
MOST_TOP = 20
"""Maximum number of most likely tokens per position, as in the OpenAI API."""
GREEDY_BELOW = 0.01
"""Temperatures below this value select the most likely token."""

_SHARED = ("model", "n", "stop", "max_tokens", "temperature", "top_p", "seed", "stream", "stream_options", "logprobs")
_EXTRA = ("return_token_ids",)
_TOOLS = ("tools", "tool_choice")
CHAT = frozenset(
    (*_SHARED, *_EXTRA, *_TOOLS, "messages", "max_completion_tokens", "chat_template_kwargs", "top_logprobs")
)
"""Supported parameters of chat completions."""
COMPLETIONS = frozenset((*_SHARED, *_EXTRA, "prompt", "echo"))
"""Supported parameters of completions."""

_ANY = object()
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "user": (_ANY,),
        "metadata": (_ANY,),
        "safety_identifier": (_ANY,),
        "prompt_cache_key": (_ANY,),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "parallel_tool_calls": (True,),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "top_logprobs": (0,),
        "modalities": (["text"],),
        "response_format": ({"type": "text"},),
        "functions": ([],),
        "echo": (False,),
        "best_of": (1,),
        "suffix": ("",),
    }
)
"""Parameters that are not supported, with the values that have no effect and are therefore accepted."""


@dataclass(frozen=True)
class Parameters:
    """Validated parameters that chat completions and completions share."""

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
    echo: bool = False
    """Whether the response contains the prompt, and its log-probs with `logprobs`."""
    return_token_ids: bool = False

    @property
    def scores(self) -> bool:
        """Whether the log-probs need a `Scorer`, since the sampler reports only those of sampled tokens."""
        return self.logprobs and (self.echo or self.top_logprobs > 0)

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
            min_new_tokens=min(defaults.min_new_tokens, most, room),
            stop_strings=[*defaults.stop_strings, *self.stop],
        )
        if fixed:
            return config
        if self.top_p is not None:
            config = replace(config, top_p=self.top_p)
        if self.temperature is None:
            return config
        if self.temperature < GREEDY_BELOW:
            return replace(config, greedy=True)
        return replace(config, greedy=False, temperature=self.temperature)

    def scoring_temperature(self, defaults: GenerationConfig) -> float:
        """Return the temperature of log-probs from a `Scorer`; greedy sampling uses that of `defaults`."""
        greedy = self.temperature is None or self.temperature < GREEDY_BELOW
        return defaults.temperature if greedy else self.temperature  # type: ignore[return-value]

    def ignored(self, defaults: GenerationConfig) -> list[str]:
        """Return the parameters that have no effect where the sampling distribution is fixed."""
        found = [
            f"{name}={value:g}"
            for name, value, used in (
                ("temperature", self.temperature, defaults.temperature),
                ("top_p", self.top_p, defaults.top_p),
            )
            if value is not None and value != used
        ]
        return found if self.seed is None else [*found, f"seed={self.seed}"]


def read_parameters(body: Mapping[str, Any], supported: frozenset[str]) -> Parameters:
    """Validate the parameters of a request.

    Args:
        body: the request; parameters with the value null count as missing.
        supported: `CHAT` or `COMPLETIONS`.

    Raises:
        ApiError: a parameter is not supported, or its value is invalid.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in supported:
            _check_neutral(name, value)
    chat = supported is CHAT
    longest = given.get("max_completion_tokens", given.get("max_tokens")) if chat else given.get("max_tokens")
    options = _checked(given, "stream_options", {}, _is(dict), "expected an object")
    if unknown := sorted(set(options) - {"include_usage", "include_obfuscation"}):
        raise _unsupported(f"stream_options.{unknown[0]}")
    named = "max_completion_tokens" if chat and "max_completion_tokens" in given else "max_tokens"
    echo = not chat and _checked(given, "echo", False, _is(bool), "expected true or false")
    least = 0 if echo else 1  # without new tokens, a response is its prompt
    return Parameters(
        n=_checked(given, "n", 1, _integer(1, MOST_CHOICES), f"expected an integer from 1 to {MOST_CHOICES}"),
        stop=_stops(given.get("stop")),
        max_tokens=_checked(
            {named: longest}, named, None, _integer(least, 2**31), f"expected an integer of at least {least}"
        ),
        temperature=_checked(given, "temperature", None, _number(0, 2), "expected a number from 0 to 2"),
        top_p=_checked(given, "top_p", None, _number(1e-9, 1), "expected a number above 0 and at most 1"),
        seed=_checked(given, "seed", None, _integer(-(2**63), 2**63), "expected an integer of 64 bits"),
        stream=_checked(given, "stream", False, _is(bool), "expected true or false"),
        include_usage=bool(options.get("include_usage")),
        logprobs=_has_logprobs(given, chat),
        top_logprobs=_top_logprobs(given, chat),
        echo=echo,
        return_token_ids=_checked(given, "return_token_ids", False, _is(bool), "expected true or false"),
    )


def _check_neutral(name: str, value: Any) -> None:
    allowed = WITHOUT_EFFECT.get(name, ())
    if not any(
        neutral is _ANY or (neutral == value and type(neutral) is not bool) or neutral is value for neutral in allowed
    ):
        raise _unsupported(name)


def _unsupported(name: str) -> ApiError:
    return ApiError(
        400,
        f"Unsupported parameter: '{name}' is not supported by this endpoint.",
        param=name,
        code="unsupported_parameter",
    )


def _checked(given: Mapping[str, Any], name: str, default: Any, check: Callable[[Any], bool], expected: str) -> Any:
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
    found = [given] if isinstance(given, str) else given or []
    right = isinstance(found, list) and len(found) <= MOST_STOPS and all(isinstance(s, str) and s for s in found)
    if not right:
        raise invalid("stop", f"expected a text, or a list of at most {MOST_STOPS} texts that are not empty")
    return tuple(found)


def _has_logprobs(given: Mapping[str, Any], chat: bool) -> bool:
    """Return whether the response contains log-probs: `logprobs` of chat is a bool, that of completions a number."""
    value = given.get("logprobs", False)
    if chat or isinstance(value, bool):
        return bool(_checked(given, "logprobs", False, _is(bool), "expected true or false"))
    return True


def _top_logprobs(given: Mapping[str, Any], chat: bool) -> int:
    """Return the number of most likely tokens per position."""
    name = "top_logprobs" if chat else "logprobs"
    if isinstance(given.get(name), bool):
        if chat:
            raise invalid(name, f"expected an integer from 0 to {MOST_TOP}")
        return 0
    found: int = _checked(given, name, 0, _integer(0, MOST_TOP), f"expected an integer from 0 to {MOST_TOP}")
    if chat and found and not given.get("logprobs"):
        raise invalid(name, "requires logprobs=true")
    return found
