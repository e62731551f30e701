"""Prompt formats, ends of responses, and the encoding of texts as token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from realign.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Number of texts per tokenizer call: enough to use its threads, few enough to store as lists of Python ints.
_BATCH = 2048


class Template(StrEnum):
    """Prompt format: plain text, or a conversation formatted with the tokenizer's chat template."""

    auto = "auto"
    """Chat messages use the chat template, and strings are plain text."""
    plain = "plain"
    """Every prompt is plain text, and chat messages are an error."""
    chat = "chat"
    """Every prompt uses the chat template. A string becomes a user message."""


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


def started(ids: list[int], start: Sequence[int]) -> list[int]:
    """Return token ids with the `start` tokens before them, unless they begin with these."""
    first = list(start)
    return ids if ids[: len(first)] == first else first + ids


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], start: Sequence[int] = ()) -> Iterator[list[int]]:
    """Yield the token ids of each text, after the `start` tokens unless it begins with them. Adds no other token."""
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
            yield started(ids, start)
