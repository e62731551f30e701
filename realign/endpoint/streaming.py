"""`TextStream`: the text of an unfinished response that can be sent already."""

from __future__ import annotations

from collections.abc import Sequence


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


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text with which the stop string begins."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
