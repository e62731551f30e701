from __future__ import annotations

from realign.api.environment import ToolCall
from realign.endpoint.response_parsing import ParsedResponse
from realign.endpoint.responses import Delta, ResponseStream, TextStream


def parts(texts: list[str], whole: str, stops: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(stops)
    return [*(stream.part(text) for text in texts), stream.rest(whole)]


def test_parts_make_up_the_text():
    assert parts(["a", "ab", "ab", "abcd"], "abcde") == ["a", "b", "", "cd", "e"]


def test_the_beginning_of_a_stop_string_waits_and_the_stop_string_is_never_sent():
    assert parts(["a", "aE", "aEN", "aENx"], "aENx", ("END",)) == ["a", "", "", "ENx", ""]
    assert parts(["aEN", "aEND", "aENDx"], "a", ("END",)) == ["a", "", "", ""]


def test_each_part_of_a_response_is_sent_once_and_a_tool_call_as_a_whole():
    stream, call = ResponseStream(), ToolCall("add", "{}")
    assert stream.part(ParsedResponse("", (), "h")) == [Delta(reasoning="h")]
    assert stream.part(ParsedResponse("", (), "h")) == []
    assert stream.part(ParsedResponse("a", (call,), "hm")) == [
        Delta(reasoning="m"),
        Delta("a"),
        Delta(call=(0, call)),
    ]
    assert stream.part(ParsedResponse("a", (call,), "hm")) == []
    assert stream.rest(ParsedResponse("ab", (call, call), "hm")) == [Delta("b"), Delta(call=(1, call))]
