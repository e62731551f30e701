from __future__ import annotations

import logging
import sys
import traceback
import unicodedata

import pytest

from realign.text import headline, log_file, shortened, visible


def raised(error: BaseException) -> str:
    try:
        raise error
    except BaseException as caught:
        return "".join(traceback.format_exception(caught)).rstrip()


def test_control_characters_are_escaped_except_tabs_and_newlines():
    assert visible("a\x1b[31m\tb\nc\x00") == "a\\x1b[31m\tb\nc\\x00"


INVISIBLE = [
    c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")
]


def test_every_control_format_and_separator_character_is_escaped():
    assert len(INVISIBLE) > 2000
    for c in set(INVISIBLE) - {"\n", "\t"}:
        shown = visible(f"a{c}b")
        assert shown.isprintable(), repr(c)
        assert shown.isascii(), repr(c)
        assert visible(shown) == shown
    assert visible("two\nlines\tand é 漢 🙂") == "two\nlines\tand é 漢 🙂"


def test_a_shortened_text_keeps_its_start_and_end():
    assert shortened("abc", 3) == "abc"
    assert shortened("a" * 50 + "b" * 50, 10) == "aaaaa ... (90 characters omitted) ... bbbbb"


def test_the_headline_of_a_traceback_is_its_last_exception_without_notes():
    error = ValueError("two\nlines")
    error.__cause__ = KeyError("first")
    error.add_note("a note")
    assert headline(raised(error)) == "ValueError: two"


@pytest.mark.parametrize("message", ["no answer within timeout_s=3", "returned 'x' (str)\nmore", ""])
def test_the_headline_of_another_message_is_its_first_line(message):
    assert headline(message) == message.partition("\n")[0]


def test_the_log_file_is_that_of_the_nearest_logger_that_writes_one(tmp_path):
    outer, inner = (logging.getLogger(name) for name in ("tests_log_file", "tests_log_file.inner"))
    handler = logging.FileHandler(tmp_path / "realign.log", delay=True)
    assert log_file(inner) == "the log"
    outer.addHandler(handler)
    try:
        assert log_file(inner) == str(tmp_path / "realign.log")
        inner.propagate = False
        assert log_file(inner) == "the log"
    finally:
        outer.removeHandler(handler)
        inner.propagate = True
