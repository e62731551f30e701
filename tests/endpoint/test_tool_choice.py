"""Forced tool calls: the response begins with the tokens that all calls share."""

from __future__ import annotations

import json
from contextlib import closing, contextmanager

import openai
import pytest
import torch
from openai import OpenAI

from realign.api import GenerationConfig
from realign.endpoint import Endpoint, EndpointLimits, Renderer, ServedPolicy, Sessions
from realign.endpoint.sessions import Session
from tests.endpoint.scripted import END, HELLO, KEY, ScriptedSampler
from tests.table_sampler import TableSampler
from tests.tiny import TEXT, VOCAB, tiny_tokenizer

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}:{% endfor %}"
    "{% for m in messages %}"
    "{% if m.tool_calls %}!{% set f = m.tool_calls[0].function %}call {{ f.name }} {{ f.arguments.x }}=<pad>"
    "{% elif m.role == 'assistant' %}!{{ m.content }}<pad>"
    "{% else %}{{ m.content }}?{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}!{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "!",
    "fields": {
        "tool_calls": {
            "open_pattern": r"call (?P<name>\w+) ",
            "close": "=",
            "content": "text",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": {"x": "{content}"}}},
        },
        "content": {"close": "<pad>", "content": "text"},
    },
}


def tool(name: str) -> dict:
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("add"), tool("ask")]
ADD = {"type": "function", "function": {"name": "add"}}


def tokenizer(response_template: object = RESPONSE_TEMPLATE):
    made = tiny_tokenizer()
    made.chat_template, made.response_template = TEMPLATE, response_template
    return made


def text_table() -> torch.Tensor:
    """Return logits of a table that writes '5=' after a space, and ends after '='."""
    logits = torch.full((VOCAB, VOCAB), -30.0)
    after = {" ": "5", "5": "="}
    for first, then in after.items():
        logits[3 + TEXT.index(first), 3 + TEXT.index(then)] = 0.0
    logits[:, 3 + TEXT.index("d")] += 1.0  # any other text continues with d
    logits[3 + TEXT.index("d"), 3 + TEXT.index(" ")] = 30.0
    logits[3 + TEXT.index("="), END] = 30.0
    return logits


@contextmanager
def client(response_template: object = RESPONSE_TEMPLATE):
    with closing(TableSampler(text_table())) as sampler:
        backend = ServedPolicy(
            sampler, Renderer(tokenizer(response_template)), GenerationConfig(max_new_tokens=12), 100
        )
        with closing(Endpoint(Sessions(backend, KEY), EndpointLimits(), model="tiny")) as endpoint:
            endpoint.start()
            with OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0) as openai_client:
                yield endpoint, openai_client


def test_a_named_function_is_called_and_its_call_is_parsed():
    ask = {"model": "m", "messages": HELLO, "tools": TOOLS, "extra_body": {"return_token_ids": True}}
    with client() as (_, openai_client):
        out = openai_client.chat.completions.create(**ask, tool_choice=ADD).choices[0]
        (call,) = out.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"x": "5"})
        assert out.finish_reason == "tool_calls"
        assert tiny_tokenizer().decode(out.prompt_token_ids) == "add:ask:hello?!call add "
        free = openai_client.chat.completions.create(**ask, tool_choice="auto").choices[0]
        assert tiny_tokenizer().decode(free.prompt_token_ids) == "add:ask:hello?!"


def test_the_beginning_is_no_trained_token_and_the_next_turn_continues_the_sequence():
    with client() as (endpoint, _):
        session = Session(endpoint.sessions.main, "p/0")
        endpoint.sessions.open(session)
        with OpenAI(base_url=endpoint.base_url(session), api_key=session.key, max_retries=0) as openai_client:
            first = openai_client.chat.completions.create(
                model="m", messages=HELLO, tools=TOOLS, tool_choice=ADD
            ).choices[0]
            turns = [*HELLO, first.message.model_dump(exclude_none=True), {"role": "tool", "content": "9"}]
            openai_client.chat.completions.create(model="m", messages=turns, tools=TOOLS)
        endpoint.sessions.close(session)
    first_call, second = session.capture.calls()
    assert tiny_tokenizer().decode(first_call.ids[first_call.prompt_tokens :]) == "5=<pad>"
    assert second.parent is first_call
    (sequence,) = session.capture.sequences()
    assert tiny_tokenizer().decode(sequence.ids[sequence.sampled]).startswith("5=<pad>")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"tool_choice": "required"}, "invalid_value"),  # without tools
        ({"tool_choice": "always", "tools": TOOLS}, "invalid_value"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "invalid_value"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": TOOLS}, "invalid_value"),
    ],
)
def test_an_invalid_choice_is_an_error_that_names_the_parameter(options, code):
    with client() as (_, openai_client), pytest.raises(openai.BadRequestError) as raised:
        openai_client.chat.completions.create(model="m", messages=HELLO, **options)
    assert (raised.value.param, raised.value.code) == ("tool_choice", code)


def test_a_tokenizer_without_a_response_template_cannot_force_a_call():
    with (
        client(None) as (_, openai_client),
        pytest.raises(openai.BadRequestError, match="no response template") as raised,
    ):
        openai_client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS, tool_choice="required")
    assert (raised.value.param, raised.value.code) == ("tool_choice", "unsupported_value")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("parallel", "names"), [(None, ["add", "ask"]), (True, ["add", "ask"]), (False, ["add"])])
def test_without_parallel_tool_calls_a_response_has_its_first_call_only(stream, parallel, names):
    renderer = Renderer(tokenizer())
    sampler = ScriptedSampler(renderer, ["call add 5=call ask 7="], step=3 if stream else 0)
    backend = ServedPolicy(sampler, renderer, GenerationConfig(max_new_tokens=40), 100)
    with closing(Endpoint(Sessions(backend, KEY), EndpointLimits(), model="tiny")) as endpoint:
        endpoint.start()
        with OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0) as openai_client:
            given = {} if parallel is None else {"parallel_tool_calls": parallel}
            out = openai_client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS, stream=stream, **given)
            if stream:
                deltas = [chunk.choices[0].delta for chunk in out if chunk.choices]
                calls = [call for delta in deltas for call in delta.tool_calls or ()]
            else:
                calls = out.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == names
