"""`Renderer`: chat messages to text, text to token ids, and token ids to text, by a model's own tokenizer."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from realign.chat_template import Bounds, ChatTemplate
from realign.endpoint.response_parsing import ParsedResponse, parse_response
from realign.errors import DataError

_CONTEXT = 8
"""Number of preceding tokens that are decoded with a response, since the first token of a text may differ."""
_BOUNDS = Bounds(mean_s=20.0)  # an endpoint serves any number of calls, so only the limit of each one applies


class Renderer:
    """Uses a copy of a tokenizer. All methods are thread-safe.

    Args:
        tokenizer: tokenizer of transformers.
        options: variables of the chat template.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        self.options = dict(options or {})
        self._template = ChatTemplate(self.tokenizer, _BOUNDS)
        self._lock = threading.Lock()  # tokenizers are not documented to be thread-safe

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
            ValueError: the chat template failed, or exceeded a limit.
        """
        given = {**self.options, **(options or {}), **({"tools": list(tools)} if tools else {})}
        template = self._template
        try:
            return template.render(messages, given, add_generation_prompt=not answered)
        except DataError as error:
            if template.ended:  # the next call gets another process
                self._template = ChatTemplate(self.tokenizer, _BOUNDS)
            raise ValueError(str(error)) from error

    def encode(self, text: str) -> list[int]:
        """Return token ids without adding special tokens.

        Raises:
            ValueError: the tokenizer cannot encode the text.
        """
        if not text:
            return []
        try:
            with self._lock:
                return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        except TypeError as error:  # a lone surrogate, which JSON may contain
            raise ValueError(f"the tokenizer cannot encode the text: {error}") from error

    def start_tokens(self) -> list[int]:
        """Return the special tokens that the tokenizer adds before a plain text; none if it cannot be determined."""
        with self._lock:
            bare = list(self.tokenizer("x", add_special_tokens=False)["input_ids"])
            full = list(self.tokenizer("x")["input_ids"])
        places = [at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare]
        return full[: places[0]] if places else []

    def decode(self, ids: Sequence[int], *, before: Sequence[int] = (), special: bool = True) -> str:
        """Return the text of token ids.

        Args:
            ids: the token ids.
            before: token ids that precede them.
            special: whether to include special tokens.
        """
        context = list(before[-_CONTEXT:])
        with self._lock:
            whole, head = self._decoded([*context, *ids], special), self._decoded(context, special)
            return whole[len(head) :] if whole.startswith(head) else self._decoded(list(ids), special)

    def parse(
        self, ids: Sequence[int], *, before: Sequence[int], tools: Sequence[Mapping[str, Any]] | None
    ) -> ParsedResponse:
        """See `parse_response`."""
        with self._lock:
            return parse_response(self.tokenizer, ids, before=before, tools=tools)

    def _decoded(self, ids: list[int], special: bool) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))
