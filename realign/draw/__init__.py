"""Render a `DataflowGraph` as text, Mermaid or SVG. All renderers are pure functions that return a string."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from realign.draw.svg import to_svg
from realign.draw.text import to_mermaid, to_text

if TYPE_CHECKING:
    from realign.api import DataflowGraph

FORMATS: Mapping[str, Callable[[DataflowGraph, Mapping[str, str]], str]] = MappingProxyType(
    {"text": to_text, "mermaid": to_mermaid, "svg": to_svg}
)

__all__ = ["FORMATS", "to_mermaid", "to_svg", "to_text"]
