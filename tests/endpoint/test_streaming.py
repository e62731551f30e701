from __future__ import annotations

from realign.endpoint.streaming import TextStream


def parts(texts: list[str], whole: str, stops: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(stops)
    return [*(stream.part(text) for text in texts), stream.rest(whole)]


def test_parts_make_up_the_text():
    assert parts(["a", "ab", "ab", "abcd"], "abcde") == ["a", "b", "", "cd", "e"]


def test_an_incomplete_character_waits():
    assert parts(["a\ufffd", "a\u00e9"], "a\u00e9") == ["a", "\u00e9", ""]


def test_the_beginning_of_a_stop_string_waits_and_the_stop_string_is_never_sent():
    assert parts(["a", "aE", "aEN", "aENx"], "aENx", ("END",)) == ["a", "", "", "ENx", ""]
    assert parts(["aEN", "aEND", "aENDx"], "a", ("END",)) == ["a", "", "", ""]


def test_a_text_that_changes_before_its_end_sends_nothing_further():
    assert parts(["ab", "ac"], "ac") == ["ab", "", ""]
