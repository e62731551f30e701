"""Format rows as plain text or with a chat template, and encode them as token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from realign.chat_template import ChatTemplate
from realign.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = dict[str, Any]

# Number of texts per tokenizer call: enough to use its threads, few enough to store as lists of Python ints.
_BATCH = 2048


class Template(StrEnum):
    """Prompt format: plain text, or a conversation formatted with the tokenizer's chat template."""

    plain = "plain"
    chat = "chat"


@dataclass(frozen=True, eq=False)
class Writer:
    """Formats prompts, and prompts with responses, as text.

    With template=plain, the text is `prefix` + column + `suffix`. The start tokens of the tokenizer (often one BOS)
    precede the text, unless it already begins with them.

    With template=chat, the text is the output of `tokenizer.apply_chat_template`; only the template decides about BOS.
    A string becomes one user message (between `prefix` and `suffix`), after the `system` message if there is one.
    """

    tokenizer: PreTrainedTokenizerBase
    template: Template = Template.plain
    prefix: str = ""
    suffix: str = ""
    system: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    _chat_template: ChatTemplate = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_chat_template", ChatTemplate(self.tokenizer))
        if self.template is Template.chat and not self.tokenizer.chat_template:
            raise ConfigError("template=chat: the tokenizer has no chat template. Set template=plain.")

    def start(self) -> list[int]:
        """Return the tokens before every text; none with template=chat, because the template writes them."""
        return [] if self.template is Template.chat else start_tokens(self.tokenizer)

    def prompt(self, value: Any) -> str:
        """Return the text of a prompt, up to the position where the response begins.

        Raises:
            DataError: the value is not a string (or, with template=chat, a list of messages).
        """
        if self.template is Template.chat:
            return self._render(self._messages(value), add_generation_prompt=True)
        if not isinstance(value, str):
            hint = " Set template=chat for a list of messages." if isinstance(value, list) else ""
            raise DataError(f"the prompt is {_short(value)}; expected a string.{hint}")
        return self.prefix + value + self.suffix

    def pair(self, value: Any, response: Any) -> tuple[str, str]:
        """Return the text of a prompt and, separately, the text of its response with the template's ending.

        Raises:
            DataError: the prompt is invalid (see `prompt`), the response is not a string, or the template formats the
                prompt differently when a response follows. A model would then train on other prompts than it samples.
        """
        if not isinstance(response, str):
            raise DataError(f"the response is {_short(response)}; expected a string.")
        prompt = self.prompt(value)
        if self.template is Template.plain:
            return prompt, response
        messages = [*self._messages(value), {"role": "assistant", "content": response}]
        whole = self._render(messages, add_generation_prompt=False)
        if not whole.startswith(prompt):
            at = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole))
            raise DataError(
                "the chat template formats the prompt differently when a response follows. At character "
                f"{at}, the prompt alone has {prompt[at : at + 40]!r}, and the prompt with a response has "
                f"{whole[at : at + 40]!r}. Set template_options so that both are equal, or set template=plain."
            )
        return prompt, whole[len(prompt) :]

    def _messages(self, value: Any) -> list[Message]:
        before = [{"role": "system", "content": self.system}] if self.system else []
        if isinstance(value, str):
            return [*before, {"role": "user", "content": self.prefix + value + self.suffix}]
        if not isinstance(value, list) or not value:
            raise DataError(f"the prompt is {_short(value)}; expected a string or a list of chat messages.")
        if self.prefix or self.suffix:
            raise DataError("prefix and suffix need a prompt that is a string, but it is a list of chat messages.")
        for message in value:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise DataError(f"the chat message {_short(message)} lacks 'role' or 'content'.")
        return [*before, *value]

    def _render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        return self._chat_template.render(messages, self.options, add_generation_prompt=add_generation_prompt)


@dataclass(frozen=True, eq=False)
class Ending:
    """Callable that ends a response with one EOS, and removes the whitespace that a chat template writes after it.

    Raises:
        ConfigError: `append_eos` is set, and the tokenizer has no EOS token.
    """

    tokenizer: PreTrainedTokenizerBase
    append_eos: bool = True
    """Whether to end responses with EOS; false leaves them unchanged."""

    def __post_init__(self) -> None:
        if self.append_eos and self.tokenizer.eos_token_id is None:
            raise ConfigError("append_eos=true: the tokenizer has no EOS token. Set append_eos=false.")

    def __call__(self, response: list[int]) -> list[int]:
        """Return the response with its ending."""
        if not self.append_eos:
            return response
        eos = self.tokenizer.eos_token_id
        if eos in response:
            end = len(response) - response[::-1].index(eos)
            if not self.tokenizer.decode(response[end:]).strip():
                return response[:end]
        return [*response, eos]


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens that the tokenizer adds before a text (often one BOS, or none).

    Raises:
        DataError: the tokenizer encodes a text differently with and without special tokens.
    """
    bare = tokenizer("x", add_special_tokens=False)["input_ids"]
    full = tokenizer("x")["input_ids"]
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            return list(full[:at])
    raise DataError(
        f"{type(tokenizer).__name__} encodes 'x' as {bare} without special tokens, but as {full} with them. Use a "
        "tokenizer that adds special tokens only before or after a text."
    )


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], start: Sequence[int] = ()) -> Iterator[list[int]]:
    """Yield the token ids of each text, after the `start` tokens unless it begins with them. Adds no other token."""
    first = list(start)
    for begin in range(0, len(texts), _BATCH):
        batch = tokenizer(
            list(texts[begin : begin + _BATCH]),
            add_special_tokens=False,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # suppresses its warning about long texts; `LengthLimit` handles them
        )
        for ids in batch["input_ids"]:
            yield ids if ids[: len(first)] == first else first + ids


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}... ({type(value).__name__})"
