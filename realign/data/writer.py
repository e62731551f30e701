"""Format prompts, responses, conversations and preferences as text in parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from realign.data.columns import Context
from realign.data.messages import Conversation, Message, check_text, read_conversation, read_tools, short, texts_of
from realign.data.rendering import AssistantMasks, ChatRenderer, Segment
from realign.errors import ConfigError, DataError
from realign.text import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Template(StrEnum):
    """Prompt format: plain text, or a conversation formatted with the tokenizer's chat template."""

    auto = "auto"
    """Chat messages use the chat template. Strings are plain text, and refused if the tokenizer has a chat template."""
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


class Repeated(StrEnum):
    """What to do with responses that are strings and begin with the prompt."""

    error = "error"
    """Refuse the row."""
    remove = "remove"
    """Remove the prompt from the response."""
    keep = "keep"
    """Learn to write the prompt again."""


class Written(NamedTuple):
    """The text of one sequence."""

    segments: list[Segment]
    """Its parts, each trained or not."""
    chat: bool
    """Whether a chat template wrote the text. Only plain text gets the start tokens of the tokenizer."""

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(segment.text for segment in self.segments)


NOTHING = Context()


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
    repeated: Repeated = Repeated.error

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

    def prompt(self, value: Any, context: Context = NOTHING) -> Written:
        """Return the text of a prompt, up to the position where the response begins.

        Raises:
            DataError: the value is neither a string nor a list of messages, a setting does not apply to it, or the chat
                template does not render it faithfully.
        """
        if self._is_chat(context, value):
            conversation = self._prompt(value, context)
            self.renderer.check_roles(conversation)
            return Written([Segment(self.renderer.prompt(conversation))], chat=True)
        return Written([Segment(self._plain_prompt(value, context))], chat=False)

    def response(
        self, prompt: Any, response: Any, context: Context = NOTHING, turns: Turns | None = None
    ) -> list[Written]:
        """Return the text of a prompt with its response; only the response is trained.

        Args:
            prompt: A string or a list of messages.
            response: A string or a list of messages. The messages may begin with those of the prompt.
            context: What else belongs to the prompt.
            turns: Assistant turns of the response and the history to train on; None: all of the response only.

        Raises:
            DataError: see `prompt`; or the template formats the prompt differently when a response follows. A model
                would then train on other prompts than it samples.
        """
        if isinstance(response, str):
            _check_string(response, "response")
            response = self._answer(prompt, response)
        if not self._is_chat(context, prompt, response):
            plain = Segment(self._plain_prompt(prompt, context))
            _check_string(response, "response")
            return [Written([plain, Segment(response, trained=True)], chat=False)]
        if isinstance(response, str):
            response = [{"role": "assistant", "content": response}]
        elif not isinstance(response, list):
            raise DataError(f"the response is {short(response)}; expected a string or a list of chat messages.")
        start, answer = self._split_prompt(prompt, context, self._read(response, context))
        if turns is not None and context.history and isinstance(prompt, str):
            start, answer = Conversation(()), start.concat(answer)
        return self._sequences(start, answer, turns or Turns.all)

    def conversation(self, value: Any, context: Context = NOTHING, turns: Turns = Turns.all) -> list[Written]:
        """Return the text of a whole conversation, of which the assistant turns are trained.

        Raises:
            DataError: see `response`; or no assistant turn is trained.
        """
        if self.template is Template.plain:
            raise DataError("template=plain: chat messages need a chat template. Set template=auto.")
        if isinstance(value, str):
            _check_string(value, "conversation")
        return self._sequences(Conversation(()), self._messages(value, context), turns)

    def comparison(
        self, prompt: Any, chosen: Any, rejected: Any, context: Context = NOTHING
    ) -> tuple[Written, Written]:
        """Return the texts of two responses to the same prompt.

        Args:
            prompt: A string or a list of messages. None: the common start of both responses, which are then whole
                conversations, or dialogues with `Human:` and `Assistant:`.
            chosen: A string or a list of messages. The messages may begin with those of the prompt.
            rejected: Like `chosen`.
            context: What else belongs to the prompt.

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
                common = _common_prompt(chosen, rejected)
                if self._is_undecided:
                    raise self._ambiguity_error(common, _dialogue_messages(common)[:-1], context)
                return self._dialogues(common, chosen, rejected, context)
            chosen, rejected, lists = _dialogue_messages(chosen), _dialogue_messages(rejected), True
        if not lists or self.template is Template.plain:
            return self.response(prompt, chosen, context)[0], self.response(prompt, rejected, context)[0]
        start, *ends = self._split_prompt(prompt, context, self._read(chosen, context), self._read(rejected, context))
        first, second = (self._sequences(start, end, Turns.all)[0] for end in ends)
        return first, second

    def _sequences(self, prompt: Conversation, rest: Conversation, turns: Turns) -> list[Written]:
        """Return the text of a prompt followed by messages, of which assistant turns are trained.

        Raises:
            DataError: no turn is trained, or the start of an answer in the prompt has no continuation.
        """
        started = prompt.messages[-1] if len(prompt) and prompt.messages[-1]["role"] == "assistant" else None
        if started is not None:  # the first answer continues it
            first = rest.messages[0]
            if not isinstance(first["content"], str):
                raise DataError(f"the prompt ends with the start of an answer, but it goes on with {short(first)}.")
            joined = {**started, **first, "content": started["content"] + first["content"]}
            prompt, rest = prompt.up_to(len(prompt) - 1), replace(rest, messages=(joined, *rest.messages[1:]))
        conversation = prompt.concat(rest)
        self.renderer.check_roles(conversation)
        answers = [turn for turn in conversation.assistant_turns() if turn >= len(prompt)]
        if turns is Turns.last:
            answers = answers[-1:]
        trained = [turn for turn in answers if turn not in conversation.untrained]
        if not trained:
            roles = ", ".join(dict.fromkeys(message["role"] for message in conversation.messages))
            raise DataError(f"the conversation has no assistant message to train on. Its roles are: {roles}.")
        groups = [[turn] for turn in trained] if turns is Turns.each else [trained]
        return [
            Written(
                self.renderer.segments(
                    conversation.up_to(group[-1] + 1) if turns is Turns.each else conversation,
                    group,
                    started if group[0] == len(prompt) else None,
                ),
                chat=True,
            )
            for group in groups
        ]

    def _split_prompt(self, prompt: Any, context: Context, *answers: Conversation) -> tuple[Conversation, ...]:
        """Return the prompt of one or two responses, and the messages of each after it."""
        if prompt is not None and all(c.messages[0]["role"] == "assistant" for c in answers):
            return self._prompt(prompt, context), *answers
        asked = prompt.strip() if isinstance(prompt, str) else None
        if isinstance(prompt, list):
            given = self._read(prompt, context).messages
            n = len(given)
            if any(c.messages[:n] != given for c in answers):
                raise DataError("the responses must begin with the messages of the prompt, or with an answer.")
        elif len(answers) == 1:
            messages = answers[0].messages
            n = next((i for i in range(len(messages), 0, -1) if _question(messages[i - 1]) == asked), 0)
        else:
            # Without the last messages: even equal conversations need one message each that is the answer.
            pairs = zip(*(c.messages[:-1] for c in answers), strict=False)
            n = next((i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, answers)) - 1)
        if not n or any(len(c) == n or c.messages[n]["role"] != "assistant" for c in answers):
            if len(answers) == 1:
                raise DataError(
                    f"the response begins with a message by {answers[0].messages[0]['role']!r}; expected 'assistant', "
                    "or the messages of the prompt and then 'assistant'. For whole conversations, use messages_column."
                )
            raise DataError(
                f"chosen and rejected have {n} messages in common, after which both must continue with an assistant "
                "message. Preferences compare responses to the same prompt."
            )
        start = answers[0].up_to(n)
        if asked is not None and asked not in map(_question, start.messages):
            raise DataError(
                f"the prompt {short(prompt)} is not a user message that chosen and rejected have in common. Set "
                "prompt_column='' to ignore this column."
            )
        return self._with_system(start, context), *(c.after(n) for c in answers)

    def _answer(self, prompt: Any, response: str) -> str:
        """Return a response that is a string, without the prompt if it repeats it and `repeated` is remove.

        Raises:
            DataError: it repeats the prompt, and `repeated` is error.
        """
        last = prompt[-1] if isinstance(prompt, list) and prompt else {"content": prompt}
        asked = last.get("content", last.get("value")) if isinstance(last, Mapping) else None
        if not isinstance(asked, str) or _WORD.fullmatch(asked) or self.repeated is Repeated.keep:
            return response
        before, found, rest = response.partition(asked.strip())
        if not found or not rest.strip() or not _MARKERS.fullmatch(before):
            return response
        if self.repeated is Repeated.error or before.strip():
            raise DataError(
                f"the response repeats the prompt: {short(response)}. Set repeated_prompt=remove to remove the prompt "
                "from the start of responses, or keep if the model shall write it again."
            )
        return response.removeprefix(asked) if response.startswith(asked) else rest

    def _dialogues(self, common: str, chosen: str, rejected: str, context: Context) -> tuple[Written, Written]:
        if self.prefix or self.suffix:
            raise DataError("prefix and suffix need a prompt column. Remove them, or set prompt_column.")
        prompt = self._plain_prompt(common, context)
        return (
            Written(_dialogue_segments(prompt, chosen), chat=False),
            Written(_dialogue_segments(prompt, rejected), chat=False),
        )

    def _is_chat(self, context: Context, prompt: Any, *responses: Any) -> bool:
        """Return whether the chat template formats a prompt.

        Raises:
            DataError: the prompt is a string, and settings don't say which of both ways the model shall see it.
        """
        if self.template is not Template.auto:
            return self.template is Template.chat
        messages = any(isinstance(value, list) for value in (prompt, *responses))
        if not messages and isinstance(prompt, str) and self._is_undecided:
            raise self._ambiguity_error(prompt, prompt, context)
        return messages

    @property
    def _is_undecided(self) -> bool:
        """Whether a prompt that is a string could be plain text as well as a user message."""
        return self.template is Template.auto and bool(self.tokenizer.chat_template)

    def _ambiguity_error(self, plain: str, chat: str | list[Message], context: Context) -> DataError:
        """Return the error that shows a prompt both ways."""
        ways = []
        for template, value in ((Template.chat, chat), (Template.plain, plain)):
            try:
                text = repr(shorten(replace(self, template=template).prompt(value, context).text, 200))
            except DataError as error:
                text = f"an error ({error})"
            ways.append(f"data.template={template.value} for {text}")
        return DataError(
            "the prompt is a string, and the tokenizer has a chat template, so realign would have to guess what the "
            f"model shall see. Set {' or '.join(ways)}."
        )

    def _plain_prompt(self, value: Any, context: Context) -> str:
        _check_string(value, "prompt")
        unused = {"system": self.system, "template_options": self.options, "tools_column": read_tools(context.tools)}
        for name, given in unused.items():
            if given:
                advice = ", or tools_column='' to ignore the tools" if name == "tools_column" else f", or remove {name}"
                raise DataError(
                    f"{name} applies only to chat messages, and the prompt is plain text. Set template=chat{advice}."
                )
        return f"{self.prefix}{value}{self.suffix}"

    def _prompt(self, value: Any, context: Context) -> Conversation:
        """Return the messages of a prompt."""
        if isinstance(value, str):
            _check_string(value, "prompt")
            earlier = [message for turn in context.history for message in _earlier(turn)]
            message = {"role": "user", "content": self.prefix + value + self.suffix}
            return self._with_system(self._read([*earlier, message], context), context)
        if not isinstance(value, list) or not value:
            raise DataError(f"the prompt is {short(value)}; expected a string or a list of chat messages.")
        conversation = self._messages(value, context)
        last = conversation.messages[-1]
        if last["role"] == "assistant" and ("tool_calls" in last or not isinstance(last["content"], str)):
            raise DataError(
                f"the prompt ends with {short(last)}; expected a user or tool message, or the start of the answer as "
                "a string. For whole conversations, set messages_column instead of prompt_column."
            )
        return conversation

    def _messages(self, value: Any, context: Context) -> Conversation:
        if self.prefix or self.suffix:
            raise DataError("prefix and suffix need a prompt that is a string, but it is a list of chat messages.")
        return self._with_system(self._read(value, context), context)

    def _read(self, value: Any, context: Context) -> Conversation:
        return read_conversation(value, context, images=self.images)

    def _with_system(self, conversation: Conversation, context: Context) -> Conversation:
        """Return a conversation that begins with the system message of the settings or the row, if it has none."""
        begins = conversation.messages[0]["role"] == "system"
        if self.system and (begins or context.system):
            raise DataError("the row already has a system message. Remove it, or set system=''.")
        system = self.system or context.system
        if begins or not system:
            return conversation  # `check_context` refuses a column that differs from the message
        return self._read([{"role": "system", "content": system}], context).concat(conversation)


def _question(message: Message) -> str | None:
    """Return the text of a message by the user; None for others."""
    return "".join(texts_of(message)).strip() if message["role"] == "user" else None


def _earlier(turn: Any) -> list[Message]:
    """Return the messages of an item of a history."""
    if isinstance(turn, Mapping):
        return [dict(turn)]
    if not isinstance(turn, list | tuple) or len(turn) != 2:
        raise DataError(f"the history contains {short(turn)}; expected pairs of a message by the user and its answer.")
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn, strict=True)]


def _check_string(value: Any, what: str) -> None:
    """Check that a value is a string, and not the printed form of chat messages.

    Raises:
        DataError: it is not.
    """
    if not isinstance(value, str):
        hint = " Set template=auto for a list of messages." if isinstance(value, list) else ""
        raise DataError(f"the {what} is {short(value)}; expected a string.{hint}")
    check_text(value, f"the {what}")


_MARKERS = re.compile(
    r"(\s|<[^<>\s]{1,24}>|\[INST\]|###|(human|user|question|q|instruction|prompt|system)\b:?)*", re.IGNORECASE
)
"""What may stand before a prompt that a response repeats, such as `<|im_start|>user` or `Human:`."""
_WORD = re.compile(r"\s*\w*[.!?]*\s*")
"""A prompt with which an answer may begin by chance, such as `Hi!`."""
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
