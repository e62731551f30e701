"""Check and read the tokenizer of a role, which may be that of another role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from realign.api.model import TokenizerSource
from realign.engines.files.inspection import check_hub
from realign.engines.files.tokenizers import check_tokenizer, check_vocabulary, has_tokenizer, read_tokenizer
from realign.errors import DataError


def check_source(source: TokenizerSource, model_path: str) -> None:
    """Check a tokenizer before anything is loaded; `model_path` is the path of the role's model, checked before."""
    path = check_tokenizer(source.key, source.path, _cure(source))
    if not Path(path).is_dir() and source.path != model_path:
        check_hub(source.key, path, "tokenizer_config.json")


def read_source(name: str, source: TokenizerSource, words: int) -> Any:
    """Read a tokenizer, and check that it fits a model of `words` tokens.

    Args:
        name: the role of the model, for messages.
        source: where the tokenizer is.
        words: number of rows of the model's embedding.

    Raises:
        DataError: the tokenizer cannot be read, or has more tokens than the model.
    """
    tokenizer = read_tokenizer(source.key, source.path, trust_remote_code=source.trust_remote_code, cure=_cure(source))
    if len(tokenizer) > words:
        raise DataError(
            f"models.{name}: the tokenizer of {source.key}={source.path!r} has {len(tokenizer)} tokens, but the "
            f"model only {words}. Set models.{name}.tokenizer to the tokenizer of the model."
        )
    return tokenizer


def check_inherited(name: str, source: TokenizerSource, tokenizer: Any, own: str, *, trust_remote_code: bool) -> None:
    """Check that the tokenizer of another role agrees with the one in the folder of the model, if that has one.

    Args:
        name: the role of the model, for messages.
        source: where the tokenizer of the other role is.
        tokenizer: that tokenizer.
        own: folder or hub name with the tokenizer of the model.
        trust_remote_code: whether to run code in `own`.
    """
    if source.path != own and has_tokenizer(own):
        expected = read_tokenizer(f"models.{name}.path", own, trust_remote_code=trust_remote_code)
        check_vocabulary(name, expected, source.role, tokenizer)


def _cure(source: TokenizerSource) -> str:
    """Return the end of the message about a folder without a tokenizer."""
    return "" if source.key.endswith(".tokenizer") else f" Set models.{source.role}.tokenizer to a tokenizer."
