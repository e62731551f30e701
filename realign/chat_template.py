"""Render conversations with the chat template of a tokenizer.

A chat template is a program of its model, which transformers runs in Jinja's sandbox. No row of a data file and no
request of the endpoint can choose another one, so it runs in this process and without limits, like the model itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from realign.errors import DataError
from realign.text import shorten

_LONGEST_MESSAGE = 2000


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, add_generation_prompt: bool
) -> str:
    """Return the text of a conversation.

    Args:
        tokenizer: Tokenizer of transformers with a chat template.
        messages: Messages with role and content.
        options: Further arguments of `tokenizer.apply_chat_template`.
        add_generation_prompt: Whether the text ends where the next answer begins.

    Raises:
        DataError: The template failed.
    """
    given = {"add_generation_prompt": add_generation_prompt, **options}
    with template_errors():
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **given))


def fixed_arguments(tokenizer: Any, options: Mapping[str, Any]) -> list[str]:
    """Return the options that are no variables of the chat template: `chat_template` would choose another one.

    Args:
        tokenizer: Tokenizer of transformers.
        options: Options that come from a row or a request.
    """
    if not options:  # of almost all rows, for each of which this is called
        return []
    return sorted({*options} & {*inspect.signature(tokenizer.apply_chat_template).parameters} - {"documents"})


@contextmanager
def template_errors() -> Iterator[None]:
    """Raise a `DataError` for any exception of a chat template."""
    try:
        yield
    except Exception as error:  # templates are programs: they can raise any exception
        message = shorten(str(error), _LONGEST_MESSAGE)
        raise DataError(f"the chat template failed: {type(error).__name__}: {message}") from error
