"""Format prompts, responses, conversations and preferences as text that is tokenized in parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from realign.data.messages import Conversation, Message, check_text, read_conversation, read_tools, short, texts_of
from realign.data.rendering import AssistantMasks, ChatRenderer, Segment
from realign.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Template(StrEnum):
    """Prompt format: plain text, or a conversation formatted with the tokenizer's chat template."""

    auto = "auto"
    """Chat messages use the chat template, and strings are plain text."""
    plain = "plain"
    """Every prompt is plain text, and chat messages are an error."""
    chat = "chat"
    """Every prompt uses the chat template. A string becomes a user message."""


class Turns(StrEnum):
    """Assistant turns of a conversation in the loss."""

    all = "all"
    """All of them, in one sequence."""
    last = "last"
    """Only the last one."""
    each = "each"
    """Each of them, in a separate sequence, as generation sees it."""


class Written(NamedTuple):
    """The text of one sequence."""

    segments: list[Segment]
    """Parts that are tokenized separately, so no token spans two of them."""
    chat: bool
    """Whether a chat template wrote the text. Only plain text gets the start tokens of the tokenizer."""

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(segment.text for segment in self.segments)


@dataclass(frozen=True, eq=False)
class Writer:
    """Formats prompts, and prompts with responses, as text.

    Plain text is `prefix` + prompt + `suffix`. The start tokens of the tokenizer (often one BOS) precede the text,
    unless it already begins with them.

    Chat messages are formatted by `tokenizer.apply_chat_template`; only the template decides about BOS. With
    template=chat, a string becomes one user message (between `prefix` and `suffix`). The text `system`, if set, becomes
    a system message before the others. With `images`, chat messages may have image parts.
    """

    tokenizer: PreTrainedTokenizerBase
    template: Template = Template.auto
    prefix: str = ""
    suffix: str = ""
    system: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    masks: AssistantMasks = AssistantMasks.auto
    images: bool = False

    def __post_init__(self) -> None:
        if self.template is Template.chat and not self.tokenizer.chat_template:
            raise ConfigError("template=chat: the tokenizer has no chat template. Set template=plain.")

    @cached_property
    def renderer(self) -> ChatRenderer:
        """Renderer of chat messages.

        Raises:
            DataError: the tokenizer has no chat template.
        """
        if not self.tokenizer.chat_template:
            raise DataError("the row has chat messages, but the tokenizer has no chat template. Use a chat model.")
        return ChatRenderer(self.tokenizer, self.options, self.masks)

    def prompt(self, value: Any, tools: Any = None) -> Written:
        """Return the text of a prompt, up to the position where the response begins.

        Raises:
            DataError: the value is neither a string nor a list of messages, a setting does not apply to it, or the chat
                template does not render it faithfully.
        """
        if self._is_chat(value):
            return Written([Segment(self.renderer.prompt(self._prompt(value, tools)))], chat=True)
        return Written([Segment(self._plain_prompt(value, tools))], chat=False)

    def response(self, prompt: Any, response: Any, tools: Any = None, turns: Turns = Turns.all) -> list[Written]:
        """Return the text of a prompt with its response; only the response is trained.

        Args:
            prompt: A string or a list of messages.
            response: A string or a list of messages, the first one by the assistant.
            tools: Tools of the conversation.
            turns: Assistant turns of the response to train on.

        Raises:
            DataError: see `prompt`; or the template formats the prompt differently when a response follows. A model
                would then train on other prompts than it samples.
        """
        if not self._is_chat(prompt, response):
            start = Segment(self._plain_prompt(prompt, tools))
            _check_string(response, "response")
            return [Written([start, Segment(response, trained=True)], chat=False)]
        start_messages = self._prompt(prompt, tools)
        if isinstance(response, str):
            _check_string(response, "response")
            response = [{"role": "assistant", "content": response}]
        elif not isinstance(response, list):
            raise DataError(f"the response is {short(response)}; expected a string or a list of chat messages.")
        answer = read_conversation(response, images=self.images)
        if answer.messages[0]["role"] != "assistant":
            raise DataError(
                f"the response begins with a message by {answer.messages[0]['role']!r}; expected 'assistant'. For "
                "whole conversations, use messages_column."
            )
        return self._sequences(start_messages, answer, turns)

    def conversation(self, value: Any, tools: Any = None, turns: Turns = Turns.all) -> list[Written]:
        """Return the text of a whole conversation, of which the assistant turns are trained.

        Raises:
            DataError: see `response`; or no assistant turn is trained.
        """
        if self.template is Template.plain:
            raise DataError("template=plain: chat messages need a chat template. Set template=auto.")
        if isinstance(value, str):
            _check_string(value, "conversation")
        return self._sequences(Conversation(()), self._messages(value, tools), turns)

    def comparison(self, prompt: Any, chosen: Any, rejected: Any, tools: Any = None) -> tuple[Written, Written]:
        """Return the texts of two responses to the same prompt.

        Args:
            prompt: A string or a list of messages. None: the common start of both responses, which are then whole
                conversations, or dialogues with `Human:` and `Assistant:`.
            chosen: A string or a list of messages. The messages may begin with those of the prompt.
            rejected: Like `chosen`.
            tools: Tools of the conversation.

        Raises:
            DataError: see `response`; or the responses are of different types, or have no common prompt.
        """
        lists = isinstance(chosen, list)
        if lists != isinstance(rejected, list):
            raise DataError(
                f"chosen is {short(chosen)} and rejected is {short(rejected)}; expected two strings or two lists."
            )
        if not lists and prompt is None:
            _check_string(chosen, "chosen response")
            _check_string(rejected, "rejected response")
            if self.template is not Template.chat:
                return self._dialogues(chosen, rejected, tools)
            chosen, rejected, lists = _dialogue_messages(chosen), _dialogue_messages(rejected), True
        if not lists or self.template is Template.plain:
            return self.response(prompt, chosen, tools)[0], self.response(prompt, rejected, tools)[0]
        start, *ends = self._parted(prompt, read_conversation(chosen, tools), read_conversation(rejected, tools))
        first, second = (self._sequences(start, end, Turns.all)[0] for end in ends)
        return first, second

    def _sequences(self, prompt: Conversation, rest: Conversation, turns: Turns) -> list[Written]:
        """Return the text of a prompt followed by messages, of which assistant turns are trained."""
        conversation = prompt.followed_by(rest)
        answers = [turn for turn in conversation.assistant_turns() if turn >= len(prompt)]
        if turns is Turns.last:
            answers = answers[-1:]
        trained = [turn for turn in answers if turn not in conversation.untrained]
        if not trained:
            raise DataError("the conversation has no assistant message to train on.")
        if turns is Turns.each:
            return [
                Written(self.renderer.segments(conversation.up_to(turn + 1), [turn]), chat=True) for turn in trained
            ]
        return [Written(self.renderer.segments(conversation, trained), chat=True)]

    def _parted(self, prompt: Any, chosen: Conversation, rejected: Conversation) -> tuple[Conversation, ...]:
        """Return the prompt of two conversations, and the messages of each after it."""
        both = (chosen, rejected)
        if prompt is not None and all(c.messages[0]["role"] == "assistant" for c in both):
            return self._prompt(prompt, list(chosen.tools)), chosen, rejected
        if isinstance(prompt, list):
            n = len(prompt)
            given = read_conversation(prompt).messages
            if any(c.messages[:n] != given for c in both):
                raise DataError("chosen and rejected must begin with the messages of the prompt, or with an answer.")
        else:
            # Without the last messages: even equal conversations need one message each that is the answer.
            pairs = zip(chosen.messages[:-1], rejected.messages[:-1], strict=False)
            n = next((i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, both)) - 1)
        if not n or any(len(c) == n or c.messages[n]["role"] != "assistant" for c in both):
            raise DataError(
                f"chosen and rejected have {n} messages in common, after which both must continue with an assistant "
                "message. Preferences compare responses to the same prompt."
            )
        start = chosen.up_to(n)
        asked = ["".join(texts_of(m)).strip() for m in start.messages if m["role"] == "user"]
        if isinstance(prompt, str) and prompt.strip() not in asked:
            raise DataError(
                f"the prompt {short(prompt)} is not a user message that chosen and rejected have in common. Set "
                "prompt_column='' to ignore this column."
            )
        return self._with_system(start), chosen.after(n), rejected.after(n)

    def _dialogues(self, chosen: str, rejected: str, tools: Any) -> tuple[Written, Written]:
        if self.prefix or self.suffix:
            raise DataError("prefix and suffix need a prompt column. Remove them, or set prompt_column.")
        prompt = self._plain_prompt(_common_prompt(chosen, rejected), tools)
        return (
            Written(_dialogue_segments(prompt, chosen), chat=False),
            Written(_dialogue_segments(prompt, rejected), chat=False),
        )

    def _is_chat(self, *values: Any) -> bool:
        """Return whether the chat template formats these values."""
        return self.template is Template.chat or (
            self.template is Template.auto and any(isinstance(value, list) for value in values)
        )

    def _plain_prompt(self, value: Any, tools: Any) -> str:
        _check_string(value, "prompt")
        unused = {"system": self.system, "template_options": self.options, "tools_column": read_tools(tools)}
        for name, given in unused.items():
            if given:
                advice = ", or tools_column='' to ignore the tools" if name == "tools_column" else f", or remove {name}"
                raise DataError(
                    f"{name} applies only to chat messages, and the prompt is plain text. Set template=chat{advice}."
                )
        return f"{self.prefix}{value}{self.suffix}"

    def _prompt(self, value: Any, tools: Any) -> Conversation:
        """Return the messages of a prompt."""
        if isinstance(value, str):
            _check_string(value, "prompt")
            message = {"role": "user", "content": self.prefix + value + self.suffix}
            return self._with_system(Conversation((message,), read_tools(tools)))
        if not isinstance(value, list) or not value:
            raise DataError(f"the prompt is {short(value)}; expected a string or a list of chat messages.")
        conversation = self._messages(value, tools)
        if conversation.messages[-1]["role"] == "assistant":
            raise DataError(
                "the prompt ends with an assistant message; expected a user or tool message. For whole conversations, "
                "set messages_column instead of prompt_column."
            )
        return conversation

    def _messages(self, value: Any, tools: Any) -> Conversation:
        if self.prefix or self.suffix:
            raise DataError("prefix and suffix need a prompt that is a string, but it is a list of chat messages.")
        return self._with_system(read_conversation(value, tools, images=self.images))

    def _with_system(self, conversation: Conversation) -> Conversation:
        if not self.system:
            return conversation
        if conversation.messages[0]["role"] == "system":
            raise DataError("the row already has a system message. Remove it, or set system=''.")
        return Conversation(({"role": "system", "content": self.system},), conversation.tools).followed_by(conversation)


def _check_string(value: Any, what: str) -> None:
    """Check that a value is a string, and not the printed form of chat messages.

    Raises:
        DataError: it is not.
    """
    if not isinstance(value, str):
        hint = " Set template=auto for a list of messages." if isinstance(value, list) else ""
        raise DataError(f"the {what} is {short(value)}; expected a string.{hint}")
    check_text(value, f"the {what}")


_ASSISTANT = "\n\nAssistant:"
_TURN = re.compile(r"\n\n(Human|Assistant):")


def _common_prompt(chosen: str, rejected: str) -> str:
    """Return the common start of two dialogues, up to and including their last common `Assistant:`.

    Raises:
        DataError: they have no common turn of the assistant.
    """
    same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    common = chosen[: sum(1 for _ in same)]
    end = common.rfind(_ASSISTANT)
    if end < 0:
        raise DataError(
            f"there is no prompt column, and chosen and rejected have no common {_ASSISTANT!r}, at which a prompt "
            "would end. Set prompt_column."
        )
    return common[: end + len(_ASSISTANT)]


def _dialogue_segments(prompt: str, text: str) -> list[Segment]:
    """Return a dialogue, split into the prompt that it begins with, the assistant turns after it, and the rest."""
    segments = [Segment(prompt)]
    begin, trained = len(prompt), True
    for turn in _TURN.finditer(text, len(prompt)):
        if turn[1] == "Human" and trained:
            segments.append(Segment(text[begin : turn.start()], trained=True))
            begin, trained = turn.start(), False
        elif turn[1] == "Assistant" and not trained:
            segments.append(Segment(text[begin : turn.end()]))
            begin, trained = turn.end(), True
    segments.append(Segment(text[begin:], trained))
    return segments


def _dialogue_messages(text: str) -> list[Message]:
    """Return a dialogue as chat messages, without the whitespace around their contents.

    Raises:
        DataError: the text does not begin with a turn.
    """
    start, *turns = _TURN.split(text if text.startswith("\n\n") else f"\n\n{text}")
    if start.strip() or not turns:
        raise DataError("the text is not a dialogue: it must begin with 'Human:' or 'Assistant:'.")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[name], "content": content.strip()} for name, content in zip(turns[::2], turns[1::2], strict=True)
    ]
