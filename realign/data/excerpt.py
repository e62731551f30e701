"""Excerpts: cut a text to a range of whole tokens between two markers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from realign.cells import read_column
from realign.data.columns import Row
from realign.data.encoding import DroppedRow
from realign.errors import DataError, SettingsError
from realign.settings import Count, Settings
from realign.text import part_over

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Excerpt(Settings):
    """Excerpt of a longer text, as openai/lm-human-preferences extracts its queries.

    The excerpt begins after the first token that decodes to `start`. If that token is the last one, the excerpt begins
    at the start of the text. The excerpt has at most `max_tokens` tokens, and ends with the last of them that decodes
    to `end`. Rows whose text lacks a configured marker are dropped. A marker must be a whole token: GPT-2's tokenizer
    encodes "..." as one token, so the marker "." does not match it.
    """

    start: str | None = None
    """Begin after the first token with exactly this text; null begins at the start."""
    max_tokens: Count | None = None
    """Maximum length in tokens, without start tokens, prefix and suffix; null sets no limit."""
    end: str | None = None
    """End with the last token with exactly this text; null only cuts at `max_tokens`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start is None and self.max_tokens is None and self.end is None:
            raise SettingsError("the excerpt has no effect. Set start, max_tokens or end, or set excerpt=null.")
        for name in ("start", "end"):
            if getattr(self, name) == "":
                raise SettingsError(f"{name}='': must be the text of a token, or null")

    def cut(self, text: str, tokenizer: PreTrainedTokenizerBase) -> str | DroppedRow:
        """Return the excerpt of a text, or why its row is dropped."""
        if self.start is None and self.max_tokens is not None:  # nothing behind these tokens matters
            text = part_over(tokenizer, text, self.max_tokens) or text
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        # Cleaning up would turn the token " ." into ".", which then equals the marker ".".
        tokens = [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in encoded["input_ids"]]
        stretch = self._stretch(tokens)
        return DroppedRow(stretch) if isinstance(stretch, str) else _slice(text, encoded["offset_mapping"], stretch)

    def replace(self, row: Row, column: str, tokenizer: PreTrainedTokenizerBase) -> Row | DroppedRow:
        """Return a row with the text in `column` replaced by the excerpt, or why the row is dropped.

        Raises:
            DataError: the text is not a string, or the tokenizer does not return character offsets.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"excerpt needs a tokenizer that returns character offsets; {type(tokenizer).__name__} does not. Use a "
                "fast tokenizer, or set excerpt=null."
            )
        text = read_column(row, column)
        if not isinstance(text, str):
            raise DataError(f"excerpt needs a string in column {column!r}, found a {type(text).__name__}.")
        excerpt = self.cut(text, tokenizer)
        return excerpt if isinstance(excerpt, DroppedRow) else {**row, column: excerpt}

    def _stretch(self, tokens: list[str]) -> range | str:
        """Return the indices of the tokens in the excerpt, or the reason why the row is dropped."""
        first, last = 0, len(tokens)
        if self.start is not None:
            if self.start not in tokens:
                return f"without excerpt.start={self.start!r}"
            after = tokens.index(self.start) + 1
            first = after if after < len(tokens) else 0
        if self.max_tokens is not None:
            last = min(last, first + self.max_tokens)
        if self.end is not None:
            if self.end not in tokens[first:last]:
                return f"without excerpt.end={self.end!r}"
            last = max(i for i in range(first, last) if tokens[i] == self.end) + 1
        return range(first, last)


def _slice(text: str, offsets: list[tuple[int, int]], stretch: range) -> str:
    """Return the text of a range of tokens, including the space before the first one.

    The offset of a token may exclude its leading space. Therefore the text begins where the previous token ends.
    """
    begin = offsets[stretch.start - 1][1] if stretch.start else 0
    return text[begin : offsets[stretch.stop - 1][1]] if len(stretch) else ""
