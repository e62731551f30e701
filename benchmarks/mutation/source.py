"""Source text of a module with positions: offsets of AST nodes, tokens between them, and replacements of text."""

from __future__ import annotations

import ast
import bisect
import io
import tokenize
from functools import cached_property
from typing import NamedTuple

IGNORED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


class Token(NamedTuple):
    """A token of the source that is neither a comment nor white space."""

    start: int
    end: int
    text: str


class Source:
    """The text of a module, its syntax tree, and character offsets of both."""

    def __init__(self, text: str) -> None:
        self.text, self.tree = text, ast.parse(text)
        self.lines = text.split("\n")  # as Python does, unlike `splitlines`
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)

    @cached_property
    def tokens(self) -> list[Token]:
        """All tokens in order."""
        found = []
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in IGNORED:
                start, end = (self.starts[row - 1] + column for row, column in (token.start, token.end))
                found.append(Token(start, end, token.string))
        return found

    def offset(self, line: int, column: int) -> int:
        """Return the character offset of a position of the AST, whose columns count UTF-8 bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the offsets of the start and the end of a node."""
        found = vars(node)
        return self.offset(found["lineno"], found["col_offset"]), self.offset(
            found["end_lineno"], found["end_col_offset"]
        )

    def segment(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def position(self, offset: int) -> tuple[int, int]:
        """Return the line and the column, both from 1, of an offset."""
        line = bisect.bisect_right(self.starts, offset)
        return line, offset - self.starts[line - 1] + 1

    def find(self, text: str, start: int, end: int) -> Token:
        """Return the first token with this text between two offsets."""
        first = bisect.bisect_left(self.tokens, start, key=lambda token: token.start)
        for token in self.tokens[first:]:
            if token.start >= end:
                break
            if token.text == text:
                return token
        raise LookupError(f"token={text!r}: not between offsets {start} and {end}.")

    def around(self, start: int, end: int) -> tuple[Token, Token]:
        """Return the token before an offset and the token from another offset on."""
        before = bisect.bisect_left(self.tokens, start, key=lambda token: token.start) - 1
        after = bisect.bisect_left(self.tokens, end, key=lambda token: token.start)
        return self.tokens[before], self.tokens[after]

    def replaced(self, start: int, end: int, text: str) -> str:
        """Return the source with other text between two offsets."""
        return self.text[:start] + text + self.text[end:]

    def change(self, start: int, end: int, text: str) -> str:
        """Return the lines around a replacement before and after it, on one line."""
        first = self.text.rfind("\n", 0, start) + 1
        last = self.text.find("\n", end)
        last = len(self.text) if last < 0 else last
        before, after = self.text[first:last], self.text[first:start] + text + self.text[end:last]
        return f"{' '.join(before.split())}  =>  {' '.join(after.split())}"
