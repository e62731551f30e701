from __future__ import annotations

import json

from realign.endpoint.response_parsing import ParsedResponse, ToolCall, can_parse, parse_response
from tests.tiny import tiny_tokenizer

TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "?",
    "fields": {
        "reasoning_content": {"open": "<bos>", "close": "!", "content": "text"},
        "tool_calls": {
            "open": "call ",
            "close": "=",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "add", "arguments": {"x": "{content}"}}},
        },
        "content": {"close": "<eos>", "content": "text"},
    },
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
]


def tokenizer(template: object = None):
    found = tiny_tokenizer()
    found.response_template = template
    return found


def ids(text: str) -> list[int]:
    return tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]


def test_without_a_response_template_the_content_is_the_whole_text():
    assert not can_parse(tokenizer())
    assert parse_response(tokenizer(), ids("call 5=<eos>")) == ParsedResponse("call 5=")


def test_reasoning_content_and_tool_calls_are_found():
    found = parse_response(tokenizer(TEMPLATE), ids("<bos>hm!yes<eos>"), before=ids("what?"))
    assert found == ParsedResponse("yes", reasoning="hm")
    found = parse_response(tokenizer(TEMPLATE), ids("call 5=call 6=<eos>"), before=ids("what?"), tools=TOOLS)
    assert found.tool_calls == tuple(ToolCall("add", json.dumps({"x": x})) for x in (5, 6))


def test_a_response_that_the_parser_rejects_is_content():
    wrong = {**TEMPLATE, "fields": {"tool_calls": {"open": "call ", "close": "=", "content": "json"}}}
    found = parse_response(tokenizer(wrong), ids("call (="), before=ids("what?"))
    assert found == ParsedResponse("call (=")
