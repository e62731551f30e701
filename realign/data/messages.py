"""Chat messages of a row: validate them, and convert the formats in use to that of chat templates."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from realign.errors import DataError

Message: TypeAlias = dict[str, Any]

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant message with its reasoning."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles that are valid with every chat template that renders them."""
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
"""Roles of ShareGPT messages (`from` and `value`), and the roles of chat templates."""

_LONGEST_PRINTED = 10**6
"""Characters above which a text is not parsed as Python code, which would need some hundred bytes for each."""
_IMAGE = {"type": "image"}
"""An image part, whose image is in another column of the row."""


@dataclass(frozen=True)
class Conversation:
    """Chat messages, and the tools that are available in them.

    Attributes:
        messages: Messages with `role` and `content`, as chat templates expect them.
        tools: JSON schemas of the tools; empty without tools.
        untrained: Indices of the assistant messages with `weight: 0`.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    untrained: frozenset[int] = field(default_factory=frozenset)

    def __len__(self) -> int:
        return len(self.messages)

    def assistant_turns(self) -> list[int]:
        """Return the indices of the assistant messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def up_to(self, end: int) -> Conversation:
        """Return the first `end` messages."""
        return replace(self, messages=self.messages[:end])

    def followed_by(self, other: Conversation) -> Conversation:
        """Return the messages of both conversations, with the tools of the one that has any."""
        shifted = {i + len(self) for i in other.untrained}
        return Conversation(self.messages + other.messages, self.tools or other.tools, self.untrained | shifted)

    def after(self, start: int) -> Conversation:
        """Return the messages after the first `start` ones."""
        return Conversation(
            self.messages[start:], self.tools, frozenset(i - start for i in self.untrained if i >= start)
        )


def read_conversation(value: Any, tools: Any = None, *, images: bool = False) -> Conversation:
    """Return a list of messages as a conversation.

    Args:
        value: Messages with `role` and `content`, or in the ShareGPT format with `from` and `value`.
        tools: JSON schemas of the tools: a list of objects, its JSON text, or None.
        images: Whether messages may have image parts.

    Raises:
        DataError: a message or a tool is malformed; the message says what is wrong.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"found {short(value)}; expected a list of chat messages with 'role' and 'content'.")
    messages, untrained = [], set()
    for index, raw in enumerate(value):
        message = _message(raw, images)
        weight = message.pop("weight", 1)
        if weight not in (0, 1):
            raise DataError(f"message {index}: weight={weight!r} must be 0 (not in the loss) or 1.")
        if not weight:
            untrained.add(index)
        messages.append(message)
    return Conversation(tuple(messages), read_tools(tools), frozenset(untrained))


def _message(raw: Any, images: bool) -> Message:
    """Return one message with `role` and `content`, without keys whose value is null."""
    if not isinstance(raw, Mapping):
        raise DataError(f"the chat message {short(raw)} lacks 'role' or 'content'.")
    # Parquet and Arrow files add nulls for the keys of other rows, and a template may only ask whether a key exists.
    message = {key: value for key, value in raw.items() if value is not None}
    if "role" not in message and "from" in message:
        message = _from_sharegpt(message)
    if not isinstance(message.get("role"), str):
        raise DataError(f"the chat message {short(raw)} lacks 'role' or 'content'.")
    if "function_call" in message:
        raise DataError("a message has the outdated key 'function_call'. Use 'tool_calls'.")
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"])
        message.setdefault("content", "")
    if "content" not in message:
        raise DataError(f"the chat message {short(raw)} lacks 'role' or 'content'.")
    message["content"] = _content(message["content"], images)
    return message


def _from_sharegpt(message: Message) -> Message:
    role, value = message["from"], message.get("value")
    if role not in _SHAREGPT:
        raise DataError(f"unknown role 'from': {role!r} (valid: {', '.join(_SHAREGPT)}).")
    others = {key: item for key, item in message.items() if key not in ("from", "value")}
    if role == "function_call":
        return {"role": "assistant", "tool_calls": value if isinstance(value, list) else [_json(value)], **others}
    return {"role": _SHAREGPT[role], **({} if value is None else {"content": value}), **others}


def _content(content: Any, images: bool) -> Any:
    """Return the content of a message: a string, or a list of text parts and, with `images`, image parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"the content of a message is {short(content)}; expected a string.")
    return [_part(part, images) for part in content]


def _part(part: Any, images: bool) -> dict[str, Any]:
    given = _without_nulls(part) if isinstance(part, Mapping) else {}
    if given.get("type") == "text" and isinstance(given.get("text"), str):
        return given
    if images and given == _IMAGE:
        return given
    text = "{'type': 'text', 'text': ...}"
    if images:
        raise DataError(f"a message contains {short(part)}. Only text and images are supported: {text}, {_IMAGE}.")
    hint = " For images, set images_column." if given.get("type") == "image" else ""
    raise DataError(f"a message contains {short(part)}. Only text is supported: {text}.{hint}")


def texts_of(message: Message) -> list[str]:
    """Return the texts of the content of a message: one, or one for each text part."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Return tool calls in the format of chat templates: `{type: function, function: {name, arguments}}`."""
    if not isinstance(calls, list):
        raise DataError(f"tool_calls is {short(calls)}; expected a list.")
    return [_tool_call(call) for call in calls]


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"the tool call {short(call)} lacks 'name'.")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str) and _has_null(arguments):
        raise DataError(
            f"the arguments of the tool call {function['name']!r} contain null. Parquet and Arrow files add nulls for "
            "keys of other rows. Store the arguments as JSON text, in which null is unambiguous."
        )
    arguments = _json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"the arguments of the tool call {function['name']!r} are {short(arguments)}; expected an object."
        )
    others = {key: value for key, value in call.items() if key not in ("function", "name", "arguments", "type")}
    return {"type": "function", **others, "function": {"name": function["name"], "arguments": dict(arguments)}}


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of tool calls as JSON text, which some chat templates expect."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def read_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Return the tools of a row, without keys whose value is null, which parquet and Arrow files add.

    Raises:
        DataError: the tools are not a list of objects with a name.
    """
    schemas = _json(tools) if isinstance(tools, str) and tools.strip() else tools
    if not schemas:
        return ()
    if not isinstance(schemas, list) or not all(isinstance(tool, Mapping) and tool_name(tool) for tool in schemas):
        raise DataError(f"the tools are {short(tools)}; expected a list of JSON schemas, each with a name.")
    return tuple(_without_nulls(tool) for tool in schemas)


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of the function of a tool; empty if it has none."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _has_null(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return value is None or any(map(_has_null, items))


def _json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{short(text)} is not valid JSON: {error}.") from error


def check_text(text: str, what: str) -> None:
    """Check that a text is not the printed form of a list of messages.

    Raises:
        DataError: it is.
    """
    if len(text) > _LONGEST_PRINTED or not text.lstrip().startswith(("[{", "{")):
        return
    if not ("role" in text or "from" in text):
        return
    for parse in (json.loads, ast.literal_eval):
        try:
            parsed = parse(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        first = parsed[0] if isinstance(parsed, list) and parsed else parsed
        if isinstance(first, Mapping) and ({"role", "content"} <= first.keys() or {"from", "value"} <= first.keys()):
            raise DataError(
                f"{what} is the text of chat messages: {short(text)}. Store the messages as a list of objects."
            )


def short(value: Any) -> str:
    """Return the start of the `repr` of a value, for messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}... ({type(value).__name__})"
