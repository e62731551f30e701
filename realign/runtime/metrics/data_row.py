"""Show a row of the data as the model gets it, with the trained tokens highlighted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from realign.data.encoding import DecodedSequence
from realign.text import shortened, visible

LONGEST = 1000
"""Maximum number of characters of a run of tokens; its middle is omitted."""
SEQUENCES = 4
"""Maximum number of sequences of a row."""
STYLE = "bold green"


def row_text(sequences: Sequence[DecodedSequence], *, color: bool) -> Text:
    """Return a row as text, with the trained tokens in color, or otherwise in brackets.

    Control characters in the text are escaped.
    """
    trains = any(segment.trained for sequence in sequences for segment in sequence.segments)
    marked = (f"trained tokens in {STYLE.split()[-1]}" if color else "trained tokens in [[brackets]]") if trains else ""
    text = Text(f"First row of the data{': ' if marked else ''}")
    text.append(marked, style=STYLE if color and marked else "")
    for sequence in sequences[:SEQUENCES]:
        text.append("\n" if sequence.label is None else f"\n  label {sequence.label:g}\n")
        body = Text()
        for segment in sequence.segments:
            shown = visible(shortened(segment.text, LONGEST))
            if segment.trained:
                body.append(shown if color else f"[[{shown}]]", style=STYLE if color else "")
            else:
                body.append(shown)
        lines = body.split("\n", allow_blank=True)
        text.append_text(Text("\n").join([Text("  | ") + line if line else Text("  |") for line in lines]))
    if len(sequences) > SEQUENCES:
        text.append(f"\n  and {len(sequences) - SEQUENCES} more sequences")
    return text


def show_row(console: Console, sequences: Sequence[DecodedSequence], described: str = "") -> None:
    """Print a description of the data, and a row of it; nothing if they are empty. Warn if printing fails."""
    color = console.color_system is not None and not console.no_color
    try:
        if described:
            console.print(f"Data: {described}", markup=False, highlight=False, soft_wrap=True)
        if sequences:
            console.print(row_text(sequences, color=color), soft_wrap=True)
    except OSError as error:  # standard output may be a file on a full disk
        warnings.warn(f"The first row of the data could not be printed ({error}). The run continues.", stacklevel=2)


def show_lines(console: Console, lines: Sequence[str]) -> None:
    """Print lines about the data. Warn if printing fails."""
    try:
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    except OSError as error:  # standard output may be a file on a full disk
        warnings.warn(f"Lines about the data could not be printed ({error}). The run continues.", stacklevel=2)


__all__ = ["row_text", "show_lines", "show_row"]
