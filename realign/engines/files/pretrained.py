"""Reading with transformers: tokenizers, and errors and warnings of its loaders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from realign.engines.files.folders import check_path, warn_if_misread
from realign.errors import DataError, RealignError

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""Tokenizer files. Without any of them, AutoTokenizer silently builds an empty tokenizer of the model's family."""


def read_tokenizer(role: str, source: str, *, trust_remote_code: bool) -> Any:
    """Read a tokenizer, and warn if transformers changes how it tokenizes.

    Args:
        role: role of the model, for messages.
        source: folder or hub name.
        trust_remote_code: whether to run code in the folder or hub repository.

    Raises:
        ConfigError: `source` is neither a folder nor a hub name.
        DataError: the tokenizer cannot be read.
    """
    from transformers import AutoTokenizer

    path = check_path(f"models.{role}.tokenizer", source, TOKENIZER_FILES)
    with readable(f"models.{role}: cannot load a tokenizer from {path!r}"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        warn_if_misread(f"models.{role}", tokenizer, path)
    return tokenizer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the warnings of transformers about missing weights; the caller reports them."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


@contextmanager
def readable(what: str, kind: type[RealignError] = DataError) -> Iterator[None]:
    """Convert exceptions of transformers to an error of class `kind` in one line, with the original as the cause."""
    try:
        yield
    except RealignError as error:
        raise type(error)(f"{what}: {error}") from error
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        cure = " Set trust_remote_code=true of this role to run it." if "trust_remote_code" in str(error) else ""
        raise kind(f"{what}: {name}{first}{cure}") from error
