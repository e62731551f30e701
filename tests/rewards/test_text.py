from __future__ import annotations

import traceback

import pytest

from realign.rewards.text import headline, visible


def raised(error: BaseException) -> str:
    try:
        raise error
    except BaseException as caught:
        return "".join(traceback.format_exception(caught)).rstrip()


def test_control_characters_are_escaped_except_tabs_and_newlines():
    assert visible("a\x1b[31m\tb\nc\x00") == "a\\x1b[31m\tb\nc\\x00"


def test_the_headline_of_a_traceback_is_its_last_exception_without_notes():
    error = ValueError("two\nlines")
    error.__cause__ = KeyError("first")
    error.add_note("a note")
    assert headline(raised(error)) == "ValueError: two"


@pytest.mark.parametrize("message", ["no answer within timeout_s=3", "returned 'x' (str)\nmore", ""])
def test_the_headline_of_another_message_is_its_first_line(message):
    assert headline(message) == message.partition("\n")[0]
