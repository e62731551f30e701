"""Messages and tools of chat requests: validate them, and convert them to the format of chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from realign.endpoint.errors import invalid

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages. A `developer` message becomes a system message, which chat templates know."""

MOST_TOOLS = 128
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
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise invalid("tools", f"expected a list of at most {MOST_TOOLS} tools")
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
