from __future__ import annotations

import json

import pytest

from realign.endpoint.renderer import Renderer
from realign.endpoint.response_parsing import ParsedResponse, ToolCall, can_parse, response_template
from realign.errors import ConfigError
from tests.endpoint.chat_families import (
    FAMILIES,
    RESPONSE_TEMPLATES,
    family_renderer,
    family_tokenizer,
    histories,
    rendered,
    sampled,
)
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
    made = tiny_tokenizer()
    made.response_template = template
    return made


def ids(text: str) -> list[int]:
    return tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]


def parse_response(tokenizer, ids: list[int], *, before: list[int] = (), tools: list[dict] | None = None):
    return Renderer(tokenizer).parse(ids, before=before, tools=tools)


def test_without_a_response_template_the_content_is_the_whole_text():
    assert not can_parse(tokenizer())
    assert parse_response(tokenizer(), ids("call 5=<eos>")) == ParsedResponse("call 5=")


def test_reasoning_content_and_tool_calls_are_found():
    parsed = parse_response(tokenizer(TEMPLATE), ids("<bos>hm!yes<eos>"), before=ids("what?"))
    assert parsed == ParsedResponse("yes", reasoning="hm")
    parsed = parse_response(tokenizer(TEMPLATE), ids("call 5=call 6=<eos>"), before=ids("what?"), tools=TOOLS)
    assert parsed.tool_calls == tuple(ToolCall("add", json.dumps({"x": x})) for x in (5, 6))


def test_the_text_from_an_invalid_tool_call_on_is_content():
    parsed = parse_response(tokenizer(TEMPLATE), ids("<bos>hm!yes call 5=<eos>"), before=ids("what?"))
    assert parsed == ParsedResponse("yes", (ToolCall("add", '{"x": "5"}'),), "hm")
    wrong = {
        **TEMPLATE,
        "fields": {**TEMPLATE["fields"], "tool_calls": {"open": "call ", "close": "=", "content": "json"}},
    }
    parsed = parse_response(tokenizer(wrong), ids("<bos>hm!yes call (=<eos>"), before=ids("what?"))
    assert parsed == ParsedResponse("yes call (=", (), "hm")


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


NAMED = {family.name: family for family in FAMILIES}


def of_family(name: str, *, parses: bool = False):
    return family_tokenizer(NAMED[name], parses=parses)


def test_without_the_setting_the_tokenizer_determines_the_response_template():
    assert response_template(of_family("qwen3"), "") is None
    assert response_template(of_family("qwen3", parses=True), "") == RESPONSE_TEMPLATES["qwen3"]


def test_a_json_file_replaces_the_response_template_of_the_tokenizer(tmp_path):
    file = tmp_path / "own.json"
    file.write_text(json.dumps(RESPONSE_TEMPLATES["llama3"]))
    renderer = Renderer(of_family("llama3_2", parses=True), response_template=str(file))
    assert renderer.tokenizer.response_template == RESPONSE_TEMPLATES["llama3"]


def test_files_that_are_missing_or_invalid_are_configuration_errors(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        response_template(of_family("qwen3"), str(tmp_path / "missing.json"))
    file = tmp_path / "wrong.json"
    for text in ("[]", '{"fields": {}}', '{"fields": {"content": {"close": "x"}}}', "{"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="response_template="):
            response_template(of_family("qwen3"), str(file))
