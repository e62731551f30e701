"""Chat messages of a row: validate them, and convert the formats in use to that of chat templates."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from realign.data.columns import IN_LOSS, MEDIA, OUTSIDE_LOSS, PARTLY_IN_LOSS, Context, is_given
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

ROLE_OF = {
    **_SHAREGPT,
    **{role: role for role in ROLES},
    **dict.fromkeys(("model", "bot", "ai", "chatgpt", "bing"), "assistant"),
}
"""Roles that are meant by roles in lower case, for messages."""
_LONGEST_PRINTED = 10**6
"""Characters above which a text is not parsed as Python code, which would need some hundred bytes for each."""
_IMAGE = {"type": "image"}
"""An image part, whose image is in another column of the row."""
_PLACEHOLDER = "<image>"
"""Text that stands for an image part."""


@dataclass(frozen=True)
class Conversation:
    """Chat messages, and the tools that are available in them.

    Attributes:
        messages: Messages with `role` and `content`, as chat templates expect them.
        tools: JSON schemas of the tools; empty without tools.
        untrained: Indices of the messages that a key such as `weight: 0` excludes from the loss.
        options: Variables for the chat template that the row sets.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    untrained: frozenset[int] = field(default_factory=frozenset)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.messages)

    def assistant_turns(self) -> list[int]:
        """Return the indices of the assistant messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def up_to(self, end: int) -> Conversation:
        """Return the first `end` messages."""
        return replace(self, messages=self.messages[:end])

    def concat(self, other: Conversation) -> Conversation:
        """Return the messages of both conversations, with the tools and options of the one that has any."""
        shifted = {i + len(self) for i in other.untrained}
        return Conversation(
            self.messages + other.messages,
            self.tools or other.tools,
            self.untrained | shifted,
            self.options or other.options,
        )

    def after(self, start: int) -> Conversation:
        """Return the messages after the first `start` ones."""
        untrained = frozenset(i - start for i in self.untrained if i >= start)
        return replace(self, messages=self.messages[start:], untrained=untrained)


def read_conversation(value: Any, context: Context | None = None, *, images: bool = False) -> Conversation:
    """Return a list of messages as a conversation.

    Args:
        value: Messages with `role` and `content`, or in the ShareGPT format with `from` and `value`.
        context: Tools and template options of the conversation.
        images: Whether messages may have image parts.

    Raises:
        DataError: a message or a tool is malformed; the message says what is wrong.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"found {short(value)}; expected a list of chat messages with 'role' and 'content'.")
    messages, untrained = [], set()
    for index, raw in enumerate(turn for item in value for turn in _turns(item)):
        message = _message(raw, images)
        if (trained := _is_trained(message, index)) is False:
            untrained.add(index)
        elif trained and message["role"] != "assistant":
            raise DataError(
                f"message {index} ({message['role']}) has a key that includes it in the loss, which only messages by "
                "the assistant are. Remove it. (train_on_prompt=true trains on all of the prompt.)"
            )
        messages.append(message)
    context = context or Context()
    return Conversation(tuple(messages), read_tools(context.tools), frozenset(untrained), context.options)


def split_last(value: Any) -> tuple[list[Any], list[Any]]:
    """Return the messages of a conversation before the last one, and the last one.

    Raises:
        DataError: the value is no list of at least two messages.
    """
    messages = [turn for item in value for turn in _turns(item)] if isinstance(value, list) else []
    if len(messages) < 2:
        raise DataError(f"found {short(value)}; expected a prompt and an answer as chat messages.")
    return messages[:-1], messages[-1:]


def _turns(item: Any) -> tuple[Any, ...]:
    """Return the messages of an item of a list: itself, or both of a pair in ms-swift's format."""
    if not isinstance(item, Mapping) or item.keys() != {"human", "assistant"}:
        return (item,)
    return tuple({"from": role, "value": text} for role, text in item.items())


def _is_trained(message: Message, index: int) -> bool | None:
    """Return what the keys of a message say about whether it is in the loss, and remove them; None without such keys.

    Raises:
        DataError: a key excludes a part of the message, or weighs it, or two keys contradict each other.
    """
    trains = {}
    for key in (*IN_LOSS, *OUTSIDE_LOSS, *PARTLY_IN_LOSS):
        if not is_given(value := message.pop(key, None)):
            continue
        if key in PARTLY_IN_LOSS or value not in (0, 1):
            raise DataError(
                f"message {index}: {key}={short(value)} puts a part of the message in the loss, or weighs it, but a "
                "message is in the loss or not. Set weight to 1 or 0 (not in the loss) instead."
            )
        trains[key] = bool(value) != (key in OUTSIDE_LOSS)
    if len(set(trains.values())) > 1:
        raise DataError(f"message {index}: the keys {list(trains)} contradict each other on whether it is in the loss.")
    return next(iter(trains.values()), None)


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
    if media := [key for key in MEDIA if is_given(message.get(key))]:
        raise DataError(
            f"a message has the key {media[0]!r}. Put images into a column of the row, and set images_column; realign "
            "reads no videos and no audio."
        )
    return message


def _from_sharegpt(message: Message) -> Message:
    role, value = message["from"], message.get("value")
    if role not in _SHAREGPT:
        near = ROLE_OF.get(str(role).lower())
        hint = f"; did you mean {near!r}?" if near else ""
        raise DataError(f"unknown role 'from': {role!r}{hint} (valid: {', '.join(_SHAREGPT)}).")
    others = {key: item for key, item in message.items() if key not in ("from", "value")}
    if role == "function_call":
        return {"role": "assistant", "tool_calls": value if isinstance(value, list) else [_json(value)], **others}
    return {"role": _SHAREGPT[role], **({} if value is None else {"content": value}), **others}


def _content(content: Any, images: bool) -> Any:
    """Return the content of a message: a string, or a list of text parts and, with `images`, image parts."""
    if isinstance(content, str):
        return _with_image_parts(content) if images and _PLACEHOLDER in content else content
    if not isinstance(content, list):
        raise DataError(f"the content of a message is {short(content)}; expected a string.")
    return [_part(part, images) for part in content]


def _with_image_parts(text: str) -> list[dict[str, Any]]:
    """Return a text with `<image>` in it, as in LLaMA-Factory, ms-swift and verl, as text and image parts."""
    parts: list[dict[str, Any]] = []
    for number, between in enumerate(text.split(_PLACEHOLDER)):
        parts += [_IMAGE] if number else []
        parts += [{"type": "text", "text": between}] if between else []
    return parts


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
