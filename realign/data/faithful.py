"""Check that a rendered conversation contains everything of the conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeAlias

from realign.data.messages import REASONING, ROLES, Conversation, Message, short, texts_of, tool_name
from realign.errors import DataError

Span: TypeAlias = tuple[int, int]
"""Start and end of a part of a text, in characters."""
TOOLS_CURE = "Use a tokenizer whose chat template renders tools, or set tools_column='' to ignore them."
_CURE = "Use a tokenizer whose chat template renders it, or remove it from the data."
_THINK = re.compile(r"</?think>")
_PRINTED_PART = re.compile(r"\{['\"]type['\"]: ?['\"]text['\"]")


def check_roles(conversation: Conversation, source: str) -> None:
    """Check that every role is a common one, or one that the source of the chat template names.

    Raises:
        DataError: a role is unknown.
    """
    for message in conversation.messages:
        role = message["role"]
        if role not in ROLES and f"'{role}'" not in source and f'"{role}"' not in source:
            raise DataError(f"unknown role {role!r} (valid: {', '.join(ROLES)}, or a role of the chat template).")


def check_parts(conversation: Conversation, text: str, spans: Mapping[int, Span]) -> None:
    """Check that a rendered text contains the parts of all messages, except untrained assistant messages.

    Args:
        conversation: The messages.
        text: The rendered text.
        spans: Part of the text of each trained assistant message.

    Raises:
        DataError: a part or a tool is missing.
    """
    for index, message in enumerate(conversation.messages):
        if message["role"] == "assistant" and index not in spans:
            continue
        within = text[slice(*spans[index])] if index in spans else text
        if isinstance(message["content"], list) and _PRINTED_PART.search(within):
            raise DataError(
                f"the chat template prints the list of content parts of {_named(message, index)} as code. Store the "
                "content as one string."
            )
        for what, part in _parts(message):
            if not _contains(within, part):
                raise DataError(
                    f"the chat template changes or drops the {what} of {_named(message, index)}: {short(part)}. {_CURE}"
                )
    for tool in conversation.tools:
        if tool_name(tool) not in text:
            raise DataError(f"the chat template drops the tool {tool_name(tool)!r}. {TOOLS_CURE}")


def shape_of(conversation: Conversation, spans: Mapping[int, Span]) -> Hashable:
    """Return what a template can decide about without the texts: roles, kinds of parts, and trained messages."""
    kinds = tuple(
        (
            message["role"],
            any(map(str.strip, texts_of(message))),
            *(key for key in ("tool_calls", *REASONING) if key in message),
        )
        for message in conversation.messages
    )
    return kinds, tuple(spans), bool(conversation.tools)


def marked(conversation: Conversation) -> tuple[Conversation, list[dict[str, str]]]:
    """Return a conversation with each part replaced by a text that occurs only once, and these texts by message."""
    found = [_marker(message, index) for index, message in enumerate(conversation.messages)]
    return Conversation(tuple(message for message, _ in found), conversation.tools), [parts for _, parts in found]


def check_marks(conversation: Conversation, parts: list[dict[str, str]], text: str, spans: Mapping[int, Span]) -> None:
    """Check that the rendering of a marked conversation contains all marks, except reasoning of untrained messages.

    Raises:
        DataError: a mark is missing.
    """
    for index, (message, marks) in enumerate(zip(conversation.messages, parts, strict=True)):
        for what, mark in marks.items():
            earlier = message["role"] == "assistant" and index not in spans
            if mark not in text and not (earlier and what == "reasoning"):
                raise DataError(f"the chat template drops the {what} of {_named(message, index)}. {_CURE}")


def _named(message: Message, index: int) -> str:
    return f"message {index} ({message['role']})"


def _parts(message: Message) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each part of a message that a rendering must contain."""
    for text in texts_of(message):
        yield "content", text
    for call in message.get("tool_calls", ()):
        yield "tool call", call["function"]["name"]
    for key in REASONING:
        if isinstance(message.get(key), str):
            yield "reasoning", message[key]


def _contains(text: str, part: str) -> bool:
    """Return whether a text contains a part, as text or inside JSON.

    Whitespace around the part may differ, and around `<think>` tags in it, which a template may move to the prompt.
    """

    def found(plain: str) -> bool:
        return plain in text or any(json.dumps(plain, ensure_ascii=ascii_)[1:-1] in text for ascii_ in (False, True))

    return all(found(piece.strip()) for piece in _THINK.split(part))


def _marker(message: Message, index: int) -> tuple[Message, dict[str, str]]:
    """Return a message with each part replaced by a text that occurs only once, and these texts by their names."""
    mark = f"mark{index}x"
    parts: dict[str, str] = {}
    replaced = dict(message)
    if any(text.strip() for text in texts_of(message)):
        parts["content"] = f"{mark}content"
        listed = isinstance(message["content"], list)
        images = [part for part in message["content"] if part["type"] == "image"] if listed else []
        replaced["content"] = [*images, {"type": "text", "text": parts["content"]}] if listed else parts["content"]
    if "tool_calls" in message:
        parts |= {"name of a tool call": f"{mark}name", "arguments of a tool call": f"{mark}value"}
        call = message["tool_calls"][0]
        replaced["tool_calls"] = [
            {**call, "function": {"name": f"{mark}name", "arguments": {f"{mark}key": f"{mark}value"}}}
        ]
    for key in REASONING:
        if isinstance(message.get(key), str) and message[key].strip():
            parts["reasoning"] = replaced[key] = f"{mark}reasoning"
    return replaced, parts
