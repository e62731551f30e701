import errno
import io

import pytest
from rich.console import Console

from realign.data.encoding import DecodedSequence
from realign.data.rendering import Segment
from realign.runtime.metrics.data_row import LONGEST, SEQUENCES, row_text, show_row

ROW = [DecodedSequence([Segment("<user>a\n"), Segment("b</s>", trained=True), Segment("\nc")])]


def shown(sequences, **console):
    out = io.StringIO()
    show_row(Console(file=out, width=40, **console), sequences)
    return out.getvalue()


def test_trained_tokens_are_in_brackets_without_color():
    assert shown(ROW) == ("First row of the data: trained tokens in [[brackets]]\n  | <user>a\n  | [[b</s>]]\n  | c\n")
    assert shown(ROW, force_terminal=True, no_color=True, color_system="standard") == shown(ROW)


def test_trained_tokens_are_green_on_a_terminal():
    text = row_text(ROW, color=True)
    green = [text.plain[span.start : span.end] for span in text.spans if span.style == "bold green"]
    assert green == ["trained tokens in green", "b</s>"]
    assert "[[" not in text.plain
    assert "\x1b[1;32mb</s>\x1b[0m" in shown(ROW, force_terminal=True, color_system="standard")


def test_control_characters_of_a_row_are_escaped_and_markup_is_text():
    hostile = [DecodedSequence([Segment("\x1b[2J[red]x[/red]\u202e"), Segment("\x07", trained=True)])]
    assert shown(hostile).splitlines()[1] == "  | \\x1b[2J[red]x[/red]\\u202e[[\\x07]]"


def test_labels_long_texts_and_many_sequences():
    many = [DecodedSequence([Segment("a" * (LONGEST + 5))], float(i)) for i in range(SEQUENCES + 2)]
    text = row_text(many, color=False).plain
    assert text.startswith("First row of the data\n  label 0\n  | aaa")
    assert text.endswith("\n  and 2 more sequences")
    assert text.count("(5 characters omitted)") == SEQUENCES


def test_a_row_that_cannot_be_printed_is_a_warning():
    class FullLog(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.warns(UserWarning, match="The first row of the data could not be printed .*The run continues"):
        show_row(Console(file=FullLog()), ROW)


def test_nothing_is_printed_without_sequences():
    assert shown([]) == ""
