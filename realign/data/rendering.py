"""Render conversations with a chat template, find the text of each assistant turn, and verify the rendering.

A chat template is a program that can drop or rewrite parts of a conversation. Training on such a rendering would
silently train on other data, so every difference that matters is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from realign.chat_template import fixed_arguments, render, template_errors
from realign.data.messages import (
    REASONING,
    ROLE_OF,
    ROLES,
    Conversation,
    Message,
    short,
    texts_of,
    tool_name,
    with_text_arguments,
)
from realign.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class AssistantMasks(StrEnum):
    """How the tokens of assistant turns are found in a rendered conversation."""

    auto = "auto"
    """From prefixes. If the chat template has `{% generation %}` blocks, they must mark the same text."""
    prefixes = "prefixes"
    """From the renderings up to each turn, which must be prefixes of the whole. Blocks are ignored."""
    generation_blocks = "generation_blocks"
    """From the `{% generation %}` blocks of the chat template. Prefixes are not compared."""


class Segment(NamedTuple):
    """Part of a text."""

    text: str
    trained: bool = False
    """Whether the model writes this text, so that the loss includes it."""


@dataclass(frozen=True, eq=False)
class ChatRenderer:
    """Renders conversations with the chat template of a tokenizer, and verifies the result.

    Attributes:
        tokenizer: Tokenizer with a chat template.
        options: Additional arguments of the chat template.
        masks: How the tokens of assistant turns are found.
    """

    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any] = field(default_factory=dict)
    masks: AssistantMasks = AssistantMasks.auto
    _verified: set[Any] = field(default_factory=set, init=False, repr=False)
    # a list, since the class is frozen: what the first tool call shows is valid for all rows
    _text_arguments: list[bool] = field(default_factory=list, init=False, repr=False)
    """Whether arguments of tool calls are passed as JSON text; empty until the first tool call."""

    def check_roles(self, conversation: Conversation) -> None:
        """Check that every role is a common one, or one that the source of the chat template names.

        Raises:
            DataError: a role is unknown.
        """
        source = self._source(conversation)
        for role in (message["role"] for message in conversation.messages):
            if role not in ROLES and f"'{role}'" not in source and f'"{role}"' not in source:
                near = f"; did you mean {ROLE_OF[role.lower()]!r}?" if role.lower() in ROLE_OF else ""
                raise DataError(
                    f"unknown role {role!r}{near} (valid: {', '.join(ROLES)}, or a role of the chat template)."
                )

    def prompt(self, conversation: Conversation) -> str:
        """Return the text of a prompt, up to the position where the response begins.

        If the last message is by the assistant, the response continues it.

        Raises:
            DataError: the template fails, or drops or changes a part of the conversation.
        """
        text = self._open(conversation)
        self._verify(conversation, text, {})
        return text

    def segments(
        self, conversation: Conversation, trained: Sequence[int], started: Message | None = None
    ) -> list[Segment]:
        """Return the text of a conversation, split into assistant turns to train on and the text between them.

        The concatenated segments are the rendered conversation. A turn ends with its end-of-turn token. Whitespace
        after it is not trained, except after the last message.

        Args:
            conversation: The messages.
            trained: Indices of the assistant messages to train on, in increasing order.
            started: The first of these as the prompt has it: its start, which is not trained.

        Raises:
            DataError: the template fails, drops or changes a part of the conversation, or renders a turn differently
                than in generation.
        """
        blocks = self._blocks(conversation)
        if self.masks is AssistantMasks.generation_blocks:
            text, spans = self._render_marked(conversation, trained, blocks)
        else:
            text = self._render(conversation, add_generation_prompt=False)
            spans = {turn: self._turn(conversation, turn, text) for turn in trained}
            if blocks is not None:
                self._compare(conversation, text, spans, blocks[1])
        self._verify(conversation, text, spans)
        if started is not None:
            start = self._open(conversation.up_to(trained[0]).concat(Conversation((started,))))
            if not text.startswith(start):
                at, alone, followed = _difference(start, text)
                raise DataError(
                    "the chat template formats the start of an answer differently when it goes on. At character "
                    f"{at}, it has {alone!r} alone, and {followed!r} with the rest. Use another chat template."
                )
            spans[trained[0]] = (len(start), spans[trained[0]][1])
        return list(_split(text, [spans[turn] for turn in trained]))

    def _turn(self, conversation: Conversation, turn: int, rendered: str) -> Span:
        """Return the span of an assistant turn in the rendered conversation, from prefixes."""
        if not turn:
            raise DataError(
                "the conversation begins with an assistant message, which follows no prompt. Put a system or user "
                "message before it, or exclude it from the loss with weight: 0."
            )
        prompt = self._render(conversation.up_to(turn), add_generation_prompt=True)
        last = turn == len(conversation) - 1
        # Two comparisons: the prompt must be what generation sees, and later messages must not change this turn.
        through = rendered if last else self._render(conversation.up_to(turn + 1), add_generation_prompt=False)
        if not through.startswith(prompt):
            at, alone, followed = _difference(prompt, through)
            raise DataError(
                "the chat template formats the prompt differently when a response follows. At character "
                f"{at}, the prompt alone has {alone!r}, and the prompt with a response has {followed!r}. Set "
                "template_options so that both are equal, use another chat template, or set template=plain."
            )
        if not rendered.startswith(through):
            at, alone, followed = _difference(through, rendered)
            raise DataError(
                f"the chat template rewrites message {turn} (assistant) when other messages follow it. At character "
                f"{at}, it has {alone!r} without them, and {followed!r} with them. Set train_on_turns=each to train on "
                "every turn as generation sees it, train_on_turns=last, or use another chat template."
            )
        rest = through[len(prompt) :]
        end = _turn_end(conversation.messages[turn], rest)
        eos = self.tokenizer.eos_token
        if last and eos and (more := rest[_content_end(conversation.messages[turn], rest) :].partition(eos)[2]).strip():
            raise DataError(
                f"the chat template writes {more!r} after the EOS token of the last message. Set template_options so "
                "that it does not, or use another chat template."
            )
        # The last turn goes to the very end: `Ending` removes what the template writes after EOS.
        return len(prompt), len(rendered) if last else len(prompt) + end

    def _render_marked(
        self, conversation: Conversation, trained: Sequence[int], blocks: tuple[str, list[Span]] | None
    ) -> tuple[str, dict[int, Span]]:
        """Return the rendered conversation, and the span of each trained turn from `{% generation %}` blocks."""
        if blocks is None:
            raise ConfigError(
                "assistant_masks=generation_blocks: the chat template has no {% generation %} block. Set "
                "assistant_masks=auto."
            )
        text, spans = blocks
        turns = conversation.assistant_turns()
        if len(spans) != len(turns):
            raise DataError(
                f"the chat template marks {len(spans)} {{% generation %}} blocks in a conversation with {len(turns)} "
                "assistant messages. Set assistant_masks=prefixes."
            )
        by_turn = dict(zip(turns, spans, strict=True))
        if turns and turns[-1] == len(conversation) - 1 and not text[spans[-1][1] :].strip():
            by_turn[turns[-1]] = (spans[-1][0], len(text))  # includes whitespace after the last turn, like prefixes
        return text, {turn: by_turn[turn] for turn in trained}

    def _compare(self, conversation: Conversation, text: str, spans: Mapping[int, Span], blocks: list[Span]) -> None:
        """Check that the `{% generation %}` blocks mark the same text as the prefixes, except whitespace around it."""
        marked = {_strip(text, span) for span in blocks}
        for turn, span in spans.items():
            if _strip(text, span) not in marked:
                near = min(blocks, key=lambda block: abs(block[0] - span[0]), default=(0, 0))
                raise DataError(
                    f"message {turn} (assistant) is {_ends(text[slice(*span)])}, but the {{% generation %}} block of "
                    f"the chat template marks {_ends(text[slice(*near)])}. Set assistant_masks=prefixes or "
                    "generation_blocks to choose one."
                )
        if spans.keys() == set(conversation.assistant_turns()) and len(blocks) != len(spans):
            raise DataError(
                f"the chat template marks {len(blocks)} {{% generation %}} blocks in a conversation with {len(spans)} "
                "assistant messages. Set assistant_masks=prefixes."
            )

    def _blocks(self, conversation: Conversation) -> tuple[str, list[Span]] | None:
        """Return the rendered conversation with the spans of its `{% generation %}` blocks; None without blocks."""
        source = self._source(conversation)
        if self.masks is AssistantMasks.prefixes or not _BLOCK.search(source):
            return None
        # `apply_chat_template` would return the blocks in tokens instead of characters.
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {**self._options(conversation), "chat_template": source}
        with template_errors():
            texts, blocks = render_jinja_template(
                conversations=[self._messages(conversation)],
                return_assistant_tokens_mask=True,
                add_generation_prompt=False,
                **self.tokenizer.special_tokens_map,
                **options,
            )
        return texts[0], [(begin, end) for begin, end in blocks[0]]

    def _verify(self, conversation: Conversation, text: str, spans: Mapping[int, Span]) -> None:
        """Check that a rendered text contains everything of a conversation. Only trained assistant turns are compared.

        Templates shorten earlier assistant turns in prompts on purpose, such as their reasoning.
        """
        shape = _shape_of(conversation, spans)
        # A probe renders the conversation again. Rows of a file have few shapes, so it costs a few renderings per file.
        if shape not in self._verified:
            self._verify_shape(conversation, spans)
            self._verified.add(shape)
        _check_parts(conversation, text, spans)

    def _verify_shape(self, conversation: Conversation, spans: Mapping[int, Span]) -> None:
        """Check that the template renders every part of conversations of this shape, by texts that occur only once."""
        write = partial(self._render, add_generation_prompt=False) if spans else self._open
        if conversation.tools:
            without = replace(conversation, tools=())
            both = (write(c) for c in (conversation, without))
            if len(set(both)) == 1:
                raise DataError(f"the chat template ignores the tools. {_TOOLS_CURE}")
        probe, parts = _with_marks(conversation)
        try:
            text = write(probe)
        except DataError:  # the template depends on the content, which `_check_parts` compares
            return
        _check_marks(conversation, parts, text, spans)

    def _source(self, conversation: Conversation) -> str:
        """Return the source of the template that renders a conversation."""
        return str(self.tokenizer.get_chat_template(self.options.get("chat_template"), _tools(conversation)))

    def _open(self, conversation: Conversation) -> str:
        """Return the text up to where the model writes: a new message, or more of the last one if that is its own."""
        started = conversation.messages[-1]["role"] == "assistant"
        options = self._options(conversation) | ({"continue_final_message": True} if started else {})
        return render(self.tokenizer, self._messages(conversation), options, add_generation_prompt=not started)

    def _render(self, conversation: Conversation, *, add_generation_prompt: bool) -> str:
        return self._apply(self._messages(conversation), conversation, add_generation_prompt)

    def _apply(self, messages: list[Message], conversation: Conversation, add_generation_prompt: bool) -> str:
        options = self._options(conversation)
        return render(self.tokenizer, messages, options, add_generation_prompt=add_generation_prompt)

    def _options(self, conversation: Conversation) -> dict[str, Any]:
        """Return the variables of the template: those of the row, of the settings, and the tools.

        Raises:
            DataError: an option of the row is none of them, such as another chat template.
        """
        if fixed := fixed_arguments(self.tokenizer, conversation.options):
            raise DataError(
                f"the options of the chat template name {fixed[0]!r}; expected variables of the chat template only. "
                "What holds for all rows can be set in template_options."
            )
        return {**conversation.options, **self.options, "tools": _tools(conversation)}

    def _messages(self, conversation: Conversation) -> list[Message]:
        """Return the messages as the template expects them: arguments of tool calls as objects, or as JSON text."""
        messages = list(conversation.messages)
        arguments = [c["function"]["arguments"] for m in messages for c in m.get("tool_calls", ())]
        if not any(arguments):
            return messages
        if not self._text_arguments:
            self._text_arguments.append(self._needs_text(conversation, messages, arguments))
        return with_text_arguments(messages) if self._text_arguments[0] else messages

    def _needs_text(self, conversation: Conversation, messages: list[Message], arguments: list[Any]) -> bool:
        """Return whether the template fails on objects as arguments, or prints them as Python code."""
        try:
            text = self._apply(messages, conversation, add_generation_prompt=False)
        except DataError:
            wrong = True
        else:
            wrong = any(str(value) in text and json.dumps(value) != str(value) for value in arguments)
        try:
            return wrong and bool(self._apply(with_text_arguments(messages), conversation, add_generation_prompt=False))
        except DataError:  # fails either way; the caller reports the reason
            return False


def _tools(conversation: Conversation) -> list[dict[str, Any]] | None:
    return list(conversation.tools) or None


def _split(text: str, spans: Sequence[Span]) -> Iterator[Segment]:
    done = 0
    for begin, end in spans:
        yield Segment(text[done:begin])
        yield Segment(text[begin:end], trained=True)
        done = end
    if done < len(text):
        yield Segment(text[done:])


def _turn_end(message: Message, text: str) -> int:
    """Return the end of a turn in its text: without the whitespace that the template adds, but with the content's."""
    return max(len(text.rstrip()), _content_end(message, text))


def _content_end(message: Message, text: str) -> int:
    """Return the end of the content of a message in the text of its turn; 0 if it does not contain the content."""
    content = "".join(texts_of(message))
    # The last occurrence, since the reasoning before an answer may contain the same text.
    at = text.rfind(content) if content.strip() else -1
    return at + len(content) if at >= 0 else 0


def _strip(text: str, span: Span) -> Span:
    """Return a span without whitespace at its ends."""
    part = text[slice(*span)]
    begin = span[0] + len(part) - len(part.lstrip())
    return begin, max(begin, span[0] + len(part.rstrip()))


def _difference(first: str, second: str) -> tuple[int, str, str]:
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    return at, first[at : at + 40], second[at : at + 40]


def _ends(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:30]!r} ... {text[-30:]!r}"


Span: TypeAlias = tuple[int, int]
"""Start and end of a part of a text, in characters."""
_TOOLS_CURE = "Use a tokenizer whose chat template renders tools, or set tools_column='' to ignore them."
_CURE = "Use a tokenizer whose chat template renders it, or remove it from the data."
_THINK = re.compile(r"</?think>")
_PRINTED_PART = re.compile(r"\{['\"]type['\"]: ?['\"]text['\"]")


def _check_parts(conversation: Conversation, text: str, spans: Mapping[int, Span]) -> None:
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
                f"the chat template prints the list of content parts of {_label(message, index)} as code. Store the "
                "content as one string."
            )
        for what, part in _parts(message):
            if not _contains(within, part):
                raise DataError(
                    f"the chat template changes or drops the {what} of {_label(message, index)}: {short(part)}. {_CURE}"
                )
    for tool in conversation.tools:
        if tool_name(tool) not in text:
            raise DataError(f"the chat template drops the tool {tool_name(tool)!r}. {_TOOLS_CURE}")


def _shape_of(conversation: Conversation, spans: Mapping[int, Span]) -> Hashable:
    """Return what a template can decide about without the texts: roles, kinds of parts, and trained messages."""
    kinds = tuple(
        (
            message["role"],
            any(map(str.strip, texts_of(message))),
            *(key for key in ("tool_calls", *REASONING) if key in message),
        )
        for message in conversation.messages
    )
    return kinds, tuple(spans), bool(conversation.tools), repr(conversation.options)


def _with_marks(conversation: Conversation) -> tuple[Conversation, list[dict[str, str]]]:
    """Return a conversation with each part replaced by a text that occurs only once, and these texts by message."""
    pairs = [_marker(message, index) for index, message in enumerate(conversation.messages)]
    return replace(conversation, messages=tuple(message for message, _ in pairs)), [parts for _, parts in pairs]


def _check_marks(conversation: Conversation, parts: list[dict[str, str]], text: str, spans: Mapping[int, Span]) -> None:
    """Check that the rendering of a marked conversation contains all marks, except reasoning of untrained messages.

    Raises:
        DataError: a mark is missing.
    """
    for index, (message, marks) in enumerate(zip(conversation.messages, parts, strict=True)):
        for what, mark in marks.items():
            earlier = message["role"] == "assistant" and index not in spans
            if mark not in text and not (earlier and what == "reasoning"):
                raise DataError(f"the chat template drops the {what} of {_label(message, index)}. {_CURE}")


def _label(message: Message, index: int) -> str:
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

    def is_rendered(plain: str) -> bool:
        return plain in text or any(json.dumps(plain, ensure_ascii=ascii_)[1:-1] in text for ascii_ in (False, True))

    return all(is_rendered(piece.strip()) for piece in _THINK.split(part))


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
