"""`TextStream` and `ResponseStream`: the parts of an unfinished response that can be sent already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from realign.api.environment import ToolCall
from realign.endpoint.response_parsing import ParsedResponse


class TextStream:
    """Yields the parts of a growing text. Keeps back what further tokens may change or remove.

    Args:
        stops: stop strings, which must not be sent.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._sent = ""

    def part(self, text: str) -> str:
        """Return the further part of the text so far; empty if nothing can be sent yet."""
        stable = text.rstrip("\ufffd")  # an incomplete character
        stable = stable[: len(stable) - max((_overlap(stable, stop) for stop in self._stops), default=0)]
        if any(stop in stable for stop in self._stops) or not stable.startswith(self._sent):
            return ""
        return self._next(stable)

    def rest(self, text: str) -> str:
        """Return the last part, given the whole text."""
        return self._next(text) if text.startswith(self._sent) else ""

    def _next(self, text: str) -> str:
        part, self._sent = text[len(self._sent) :], text
        return part


@dataclass(frozen=True)
class Delta:
    """A further part of a response, of one kind."""

    content: str = ""
    reasoning: str = ""
    call: tuple[int, ToolCall] | None = None
    """Index of a tool call in the response, and the call."""


class ResponseStream:
    """Yields the parts of a growing response. A tool call is one part, which is sent when the call is complete.

    Args:
        stops: stop strings, which must not be sent.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._content, self._reasoning = TextStream(stops), TextStream()
        self._calls = 0

    def part(self, parsed: ParsedResponse) -> list[Delta]:
        """Return the further parts of an unfinished response."""
        return list(
            self._deltas(self._reasoning.part(parsed.reasoning or ""), self._content.part(parsed.content), parsed)
        )

    def rest(self, parsed: ParsedResponse) -> list[Delta]:
        """Return the last parts, given the whole response."""
        return list(
            self._deltas(self._reasoning.rest(parsed.reasoning or ""), self._content.rest(parsed.content), parsed)
        )

    def _deltas(self, reasoning: str, content: str, parsed: ParsedResponse) -> Iterator[Delta]:
        if reasoning:
            yield Delta(reasoning=reasoning)
        if content:
            yield Delta(content)
        known, self._calls = self._calls, max(self._calls, len(parsed.tool_calls))
        for number in range(known, len(parsed.tool_calls)):
            yield Delta(call=(number, parsed.tool_calls[number]))


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text with which the stop string begins."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
