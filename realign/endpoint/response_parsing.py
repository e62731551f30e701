"""`parse_response`: content, reasoning and tool calls of a sampled response."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realign.api.environment import ToolCall

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning in response templates, as in transformers."""


@dataclass(frozen=True)
class ParsedResponse:
    """The parts of a response."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


def can_parse(tokenizer: Any) -> bool:
    """Return whether `parse_response` can find tool calls and reasoning."""
    return getattr(tokenizer, "response_template", None) is not None


def parse_response(
    tokenizer: Any,
    ids: Sequence[int],
    *,
    before: Sequence[int] = (),
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> ParsedResponse:
    """Parse a response with the tokenizer's response template, see `tokenizer.parse_response` of transformers.

    Without a response template, or if the response does not match it, the content is the whole text.

    Args:
        tokenizer: tokenizer of transformers.
        ids: token ids of the response.
        before: token ids of the prompt.
        tools: tools of the request, which determine the types of arguments.
    """
    text = str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
    if not can_parse(tokenizer):
        return ParsedResponse(text)
    try:
        message = tokenizer.parse_response(list(ids), prefix=list(before), tools=list(tools) if tools else None)
        content = message.get("content") or ""
        calls = tuple(map(_tool_call, message.get("tool_calls") or ()))
        reasoning = next((found for name in _REASONING if (found := message.get(name))), None)
    except Exception:  # a policy can write anything, and the parsers raise many types of errors
        return ParsedResponse(text)
    if not (content or calls or reasoning):  # the response matches no field of the template
        return ParsedResponse(text)
    return ParsedResponse(str(content), calls, None if reasoning is None else str(reasoning))


def _tool_call(found: Mapping[str, Any]) -> ToolCall:
    function = found.get("function", found)
    arguments = function.get("arguments") or {}
    return ToolCall(str(function["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments))
