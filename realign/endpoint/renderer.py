"""`Renderer`: chat messages to text, text to token ids, and token ids to text, by a model's own tokenizer."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from realign.chat_template import render
from realign.endpoint.response_parsing import (
    ParsedResponse,
    ResponseReader,
    can_parse,
    fits,
    load_template,
)
from realign.endpoint.response_parsing import response_template as found_response_template
from realign.errors import ConfigError, DataError
from realign.text import part_over
from realign.tokenization import Tokens

logger = logging.getLogger(__name__)

_TOOL = {
    "type": "function",
    "function": {"name": "x", "description": "x", "parameters": {"type": "object", "properties": {}}},
}


class Renderer:
    """Uses a copy of a tokenizer. All methods are thread-safe.

    Args:
        tokenizer: tokenizer of transformers.
        options: variables of the chat template.
        response_template: see `response_parsing.response_template`.

    Raises:
        ConfigError: the response template cannot be found or is invalid, or does not fit the chat template.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None, response_template: str = "") -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        self.options = dict(options or {})
        self.tokenizer.response_template = found_response_template(self.tokenizer, response_template)
        self._response_template = load_template(self.tokenizer)
        # the texts of the tokens that are not part of content
        self._special = [str(t.content) for t in self.tokenizer.added_tokens_decoder.values() if t.special]
        self._tokens = Tokens(self.tokenizer)
        self._lock = threading.Lock()  # tokenizers are not documented to be thread-safe
        self._warned = False
        self._reads_tools: bool | None = None  # not known yet
        if response_template:
            self._check_anchor(response_template)

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        answered: bool = False,
    ) -> str:
        """Return the text of a conversation, up to the beginning of the next answer.

        Args:
            messages: messages with role and content.
            tools: tools in the format of OpenAI, for the chat template.
            options: further variables of the chat template.
            answered: whether the conversation ends with an answer, so that no further one begins.

        Raises:
            ValueError: the chat template failed.
        """
        if tools and not self._warned and not can_parse(self.tokenizer):
            self._warned = True
            logger.warning(
                "The tokenizer has no response template, so tool calls are not parsed: they remain text. "
                "Set response_template=auto, which needs pip install 'realign-rl[tools]'. Logged once."
            )
        given = {**self.options, **(options or {}), **({"tools": list(tools)} if tools else {})}
        try:
            return render(self.tokenizer, messages, given, add_generation_prompt=not answered)
        except DataError as error:
            raise ValueError(str(error)) from error

    def find_hidden_tool(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Return the name of a tool that a rendered conversation lacks; None if it has all.

        Args:
            text: what `render` returned for the other arguments.
            messages: the conversation.
            tools: its tools.
            options: further variables of the chat template.
        """
        names = [str(tool["function"]["name"]) for tool in tools or ()]
        if names and self._reads_tools is None:  # compared once, since a message can contain the name of a tool
            try:
                self._reads_tools = self.render(messages, None, options) != text
            except ValueError:  # the template requires tools
                self._reads_tools = True
        return next((name for name in names if not self._reads_tools or name not in text), None)

    def encode(self, text: str, *, before: Sequence[int] = ()) -> list[int]:
        """Return token ids without adding special tokens.

        Args:
            text: the text.
            before: token ids that precede it.

        Raises:
            ValueError: the tokenizer cannot encode the text.
        """
        if not text:
            return []
        with self._encoding():
            return self._tokens.encode_following(text, before[-1]) if before else next(self._tokens.encode([text]))

    def exceeds(self, text: str, tokens: int) -> bool:
        """Return whether a text certainly has more than `tokens` tokens, without tokenizing a long one whole.

        Raises:
            ValueError: the tokenizer cannot encode the text.
        """
        with self._encoding():
            return part_over(self.tokenizer, text, tokens) is not None

    @contextmanager
    def _encoding(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except TypeError as error:  # a lone surrogate, which JSON may contain
            raise ValueError(f"the tokenizer cannot encode the text: {error}") from error

    def decode(self, ids: Sequence[int], *, before: Sequence[int] = (), special: bool = True) -> str:
        """Return the text of token ids.

        Args:
            ids: the token ids.
            before: token ids that precede them.
            special: whether to include special tokens.
        """
        with self._lock:
            return self._tokens.decode(ids, before, special=special)

    def text_of(self, id: int) -> str:
        """Return the text of a token, as it is within a text."""
        with self._lock:
            return self._tokens.texts([id])[0]

    def reader(self, prompt: str | Sequence[int], tools: Sequence[Mapping[str, Any]] | None) -> ResponseReader | None:
        """Return a parser of a response; None if the tokenizer has no response template.

        Args:
            prompt: text or token ids of the prompt.
            tools: tools of the request, which determine the types of arguments.
        """
        if self._response_template is None:
            return None
        text = prompt if isinstance(prompt, str) else self.decode(prompt)
        return ResponseReader(self._response_template, text, tools, self._special)

    def parse(
        self, ids: Sequence[int], *, before: str | Sequence[int], tools: Sequence[Mapping[str, Any]] | None
    ) -> ParsedResponse:
        """Parse a response with the tokenizer's response template.

        Without a response template, or if the response matches no part of it, the content is the whole text. The text
        of an invalid tool call, and all text after it, is content.

        Args:
            ids: token ids of the response.
            before: text or token ids of the prompt.
            tools: tools of the request, which determine the types of arguments.
        """
        given = () if isinstance(before, str) else before
        plain, reader = self.decode(ids, before=given, special=False), self.reader(before, tools)
        return ParsedResponse(plain) if reader is None else reader.whole(self.decode(ids, before=given), plain)

    def _check_anchor(self, given: str) -> None:
        """Check that the response template belongs to the chat template."""
        prompts = []
        for tools in (None, [_TOOL]):  # some templates require tools
            with suppress(ValueError):
                prompts.append(self.render([{"role": "user", "content": "x"}], tools) if self.has_template else "")
        if prompts and not any(fits(self.tokenizer.response_template, prompt) for prompt in prompts):
            raise ConfigError(
                f"response_template={given}: its start anchor does not occur in a prompt of the chat template. Set the "
                "response template of the model's family."
            )
