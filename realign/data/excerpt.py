"""Which part of a text is asked about: a stretch of whole tokens, from one marker to another."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from realign.data.files import Row, Table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Excerpt:
    """The query that openai/lm-human-preferences takes out of a longer text (config node).

    The text goes on after the first token that reads `start` (from its beginning, if nothing follows that token), is
    cut to `max_tokens` tokens, and ends with the last token among them that reads `end`. A text without a marker that
    is asked for is left out. A marker must be a token of its own: with GPT-2's tokenizer "." is not found in "...".
    """

    start: str | None = None
    """Begin after this; null begins at the start of the text."""
    max_tokens: int | None = None
    """At most so many tokens, without start tokens, prefix and suffix; null for no limit."""
    end: str | None = None
    """End with the last of these; null takes what `max_tokens` leaves."""

    def __post_init__(self) -> None:
        if self.start is None and self.max_tokens is None and self.end is None:
            raise ValueError("excerpt has no effect: set start, max_tokens or end, or leave it null")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"excerpt.max_tokens must be at least 1, or null for no limit, found {self.max_tokens}")
        for name in ("start", "end"):
            if getattr(self, name) == "":
                raise ValueError(f"excerpt.{name} is empty; it must be the text of a token, or null")

    def apply(self, table: Table, column: str, tokenizer: PreTrainedTokenizerBase) -> Table:
        """The rows that have an excerpt, which takes the place of the text in `column`.

        Raises:
            ValueError: a text is not a string (names its row), no row is left, or the tokenizer does not tell where its
                tokens stand in a text.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"excerpt needs a tokenizer that tells offsets, and {type(tokenizer).__name__} does not")
        reads = lru_cache(maxsize=None)(lambda token: tokenizer.decode([token], clean_up_tokenization_spaces=False))
        kept: list[int] = []
        rows: list[Row] = []
        dropped: Counter[str] = Counter()
        for index, text in enumerate(table.column(column)):
            if not isinstance(text, str):
                raise ValueError(f"{table.where(index)}: excerpt belongs to a string, found a {type(text).__name__}")
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            found = self._stretch([reads(token) for token in encoded["input_ids"]])
            if isinstance(found, str):
                dropped[found] += 1
                continue
            kept.append(index)
            rows.append({**table.rows[index], column: _slice(text, encoded["offset_mapping"], found)})
        if not rows:
            raise ValueError(f"{table.path}: excerpt leaves no row of {len(table)} ({dict(dropped)})")
        return Table(table.path, rows, [table.places[i] for i in kept], table.unit, dict(dropped))

    def _stretch(self, tokens: list[str]) -> range | str:
        """The places of the tokens that stay, or why the row is left out."""
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


def _slice(text: str, offsets: list[tuple[int, int]], stretch: range) -> Any:
    """The text from the end of the token before to the end of the last: a token's own start may leave out its blank."""
    begin = offsets[stretch.start - 1][1] if stretch.start else 0
    return text[begin : offsets[stretch.stop - 1][1]] if len(stretch) else ""
