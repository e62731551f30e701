"""Reasoning over HTTP, with the chat template of Qwen3, which drops it after the next question."""

from __future__ import annotations

import torch
from openai import OpenAI

from tests.endpoint.chat_families import (
    FAMILIES,
    NEXT,
    QUESTION,
    SAID,
    SYSTEM,
    THEN,
    TOOLS,
    WHY,
    family_renderer,
    sampled,
)
from tests.endpoint.scripted import scripted

QWEN3 = next(family for family in FAMILIES if family.name == "qwen3")
ANSWER = "<think>\nA product.\n</think>\n\nIt is 30.<|im_end|>"


def said(message) -> dict:
    return message.model_dump(exclude_none=True)


def test_reasoning_is_returned_separately_and_a_history_without_it_becomes_a_further_sequence():
    renderer = family_renderer(QWEN3)
    with (
        scripted(renderer, [*sampled(QWEN3), ANSWER]) as (endpoint, session, sampler),
        OpenAI(base_url=endpoint.base_url(session), api_key=session.key, max_retries=0) as client,
    ):

        def ask(messages):
            return client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0]

        messages = [SYSTEM, QUESTION]
        called = ask(messages)
        assert called.finish_reason == "tool_calls"
        assert called.message.content is None
        assert called.message.reasoning_content == WHY
        (call,) = called.message.tool_calls
        messages += [said(called.message), {"role": "tool", "tool_call_id": call.id, "content": "12"}]
        answered = ask(messages)
        assert (answered.message.content, answered.message.reasoning_content) == (SAID, THEN)
        messages += [said(answered.message), NEXT]
        last = ask(messages)
        assert (last.message.content, last.message.reasoning_content) == ("It is 30.", "A product.")
    kept, dropped = session.capture.sequences()
    assert (kept.calls, dropped.calls) == (2, 1)
    assert WHY in sampler.prompts[1]  # within the answer to one question, the template keeps it
    assert WHY not in sampler.prompts[2]
    assert renderer.decode(kept.ids.tolist()) == sampler.prompts[1] + sampled(QWEN3)[1]
    assert renderer.decode(dropped.ids.tolist()) == sampler.prompts[2] + ANSWER
    assert renderer.decode(kept.ids[kept.sampled].tolist()) == "".join(sampled(QWEN3))
    assert renderer.decode(dropped.ids[dropped.sampled].tolist()) == ANSWER
    assert kept.logprobs[kept.sampled].unique().tolist() == [-2.0, -1.0]
    assert torch.equal(dropped.logprobs, -3 * dropped.sampled.float())
