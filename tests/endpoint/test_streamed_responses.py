"""Streamed chat responses of model families, with the official client: the deltas make up the whole answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from openai import OpenAI

from realign.endpoint import app
from tests.endpoint.chat_families import (
    FAMILIES,
    TOOLS,
    Family,
    family_renderer,
    histories,
    sampled,
)
from tests.endpoint.scripted import scripted

QWEN3 = next(family for family in FAMILIES if family.name == "qwen3")
INVALID = '<tool_call>\n{"name": "multiply", "argum</tool_call>'
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(app, "POLL_S", 0.001)


@contextmanager
def serving(family: Family, texts: list[str], step: int = 0) -> Iterator[OpenAI]:
    """Serve a policy that samples these texts."""
    with (
        scripted(family_renderer(family), texts, step) as (endpoint, session, _),
        OpenAI(base_url=endpoint.base_url(session), api_key=session.key, max_retries=0) as client,
    ):
        yield client


def ask(client: OpenAI, family: Family, **options: Any) -> Any:
    """Ask the first question of the conversation."""
    return client.chat.completions.create(model="policy", messages=histories(family)[0], tools=TOOLS, **options)


def received(family: Family, text: str, step: int = 3, **options: Any) -> tuple[dict[str, Any], list[str], Any]:
    """Return a streamed answer as a message, the kinds of its deltas in order, and the answer without streaming."""
    with serving(family, [text], step) as client:
        chunks = [chunk.choices[0] for chunk in ask(client, family, stream=True, **options)]
    with serving(family, [text]) as client:
        whole = ask(client, family, **options).choices[0]
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    kinds = []
    for chunk in chunks:
        delta = chunk.delta.model_dump(exclude_unset=True)
        kinds += [kind for kind in message if delta.get(kind)]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            assert call.pop("index") == len(message["tool_calls"])
            message["tool_calls"].append(call)
    assert chunks[0].delta.role == "assistant"
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.finish_reason
    return message, kinds, whole


def same(message: dict[str, Any], whole: Any) -> None:
    """Check that the deltas make up the answer without streaming."""
    expected = whole.message.model_dump()
    assert message["content"] == (expected["content"] or "")
    assert message["reasoning_content"] == (expected.get("reasoning_content") or "")
    assert message["tool_calls"] == (expected["tool_calls"] or [])


@pytest.mark.parametrize("step", [1, 50])
@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (f"I multiply.\n{CALL}\n{CALL}<|im_end|>", 2, "I multiply."),
        (f"First {CALL} then<|im_end|>", 1, "First\nthen"),
        (f"<think>\nhm\n</think>\n\n{INVALID}<|im_end|>", 0, INVALID),
        (f"I multiply.\n\n{INVALID}<|im_end|>", 0, f"I multiply.\n\n{INVALID}"),
        (f"{CALL}\n{INVALID} and {CALL}<|im_end|>", 1, f"{INVALID} and {CALL}"),
        (f"{CALL}\n<tool_call>[1]</tool_call><|im_end|>", 1, "<tool_call>[1]</tool_call>"),
        ('<tool_call>\n{"name": "multiply"', 0, '<tool_call>\n{"name": "multiply"'),
        ("\u00e9t\u00e9 \U0001f600<|im_end|>", 0, "\u00e9t\u00e9 \U0001f600"),
        ("<think>cut", 0, ""),
    ],
)
def test_mixed_invalid_and_cut_responses_stream_as_they_are_answered(text, calls, content, step):
    message, _, whole = received(QWEN3, text, step)
    same(message, whole)
    assert len(message["tool_calls"]) == calls
    assert message["content"] == content


def test_the_client_helper_for_streams_returns_the_whole_message():
    with (
        serving(QWEN3, [sampled(QWEN3)[0]], 3) as client,
        client.chat.completions.stream(model="policy", messages=histories(QWEN3)[0], tools=TOOLS) as stream,
    ):
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("multiply", '{"a": 3, "b": 4}')
