from __future__ import annotations

import json

import pytest

from realign.endpoint.renderer import Renderer
from realign.endpoint.response_parsing import ParsedResponse, ToolCall, can_parse, parse_response
from realign.errors import ConfigError
from tests.endpoint.chat_families import FAMILIES, family_renderer, histories, rendered, sampled
from tests.endpoint.chat_families import TOOLS as MULTIPLY
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


def test_the_text_from_an_invalid_tool_call_on_is_content():
    found = parse_response(tokenizer(TEMPLATE), ids("<bos>hm!yes call 5=<eos>"), before=ids("what?"))
    assert found == ParsedResponse("yes", (ToolCall("add", '{"x": "5"}'),), "hm")
    wrong = {
        **TEMPLATE,
        "fields": {**TEMPLATE["fields"], "tool_calls": {"open": "call ", "close": "=", "content": "json"}},
    }
    found = parse_response(tokenizer(wrong), ids("<bos>hm!yes call (=<eos>"), before=ids("what?"))
    assert found == ParsedResponse("yes call (=", (), "hm")


def test_an_invalid_tool_call_in_the_prompt_does_not_matter():
    fields = {**TEMPLATE["fields"], "tool_calls": {"open": "call ", "close": "=", "content": "json"}}
    found = parse_response(tokenizer({**TEMPLATE, "fields": fields}), ids("<bos>hm!yes<eos>"), before=ids("call (= no"))
    assert found == ParsedResponse("yes", (), "hm")


def test_content_before_and_after_a_tool_call_is_joined():
    found = parse_response(tokenizer(TEMPLATE), ids("one call 5=two<eos>"), before=ids("what?"))
    assert found.content == "one\ntwo"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.parts], ids=lambda family: family.name)
def test_a_response_that_is_read_in_pieces_has_the_parts_of_the_whole_and_no_part_is_taken_back(family):
    renderer = family_renderer(family)
    for number, text in enumerate([*sampled(family), f"{sampled(family)[0][:-20]}(", "no marks {"]):
        prompt = rendered(family, histories(family)[min(number, 1)])
        plain = renderer.decode(renderer.encode(text), special=False)
        whole = renderer.reader(prompt, MULTIPLY).whole(text, plain)
        for step in (1, 7):
            reader = renderer.reader(prompt, MULTIPLY)
            parts = [reader.part(text[:end]) for end in range(0, len(text), step)]
            assert reader.whole(text, plain) == whole
            for part in parts:
                assert whole.content.startswith(part.content)
                assert (whole.reasoning or "").startswith(part.reasoning or "")
                assert whole.tool_calls[: len(part.tool_calls)] == part.tool_calls


def test_an_invalid_response_template_of_a_tokenizer_is_a_configuration_error():
    with pytest.raises(ConfigError, match="the response template of the tokenizer is invalid"):
        Renderer(tokenizer({"fields": {}}))
