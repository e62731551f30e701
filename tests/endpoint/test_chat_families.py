"""Golden tests over the chat templates of model families: rendering, parsing, and sequences for training."""

from __future__ import annotations

import json

import pytest
import torch

from realign.api import Completion
from realign.endpoint.capture import Capture
from realign.endpoint.response_parsing import ParsedResponse, ToolCall
from tests.endpoint.chat_families import (
    FAMILIES,
    FOLDER,
    SAID,
    THEN,
    TOOLS,
    WHY,
    Family,
    family_renderer,
    histories,
    rendered,
    sampled,
    written,
)

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def completion(ids: list[int]) -> Completion:
    n = len(ids)
    return Completion(torch.tensor(ids), -torch.ones(n), torch.zeros(n, dtype=torch.int32), False)


def played(family: Family) -> Capture:
    """Play the conversation: each request, and what the policy samples; the last request is only tokenized."""
    capture, renderer = Capture(), family_renderer(family)
    for messages, text in zip(histories(family), [*sampled(family), "?"], strict=True):
        prompt = capture.prompt(renderer, rendered(family, messages))
        assert renderer.decode(prompt.ids) == prompt.text
        capture.add(renderer, prompt, completion(renderer.encode(text)))
    return capture


@each_family
def test_conversations_render_as_recorded(family):
    assert written(family) == (FOLDER / f"{family.name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.parts], ids=lambda family: family.name)
def test_tool_calls_reasoning_and_content_of_sampled_responses_are_found(family):
    renderer = family_renderer(family)
    called, answered = (
        renderer.parse(renderer.encode(text), before=renderer.encode(rendered(family, messages)), tools=TOOLS)
        for text, messages in zip(sampled(family), histories(family), strict=False)
    )
    why, then = (WHY, THEN) if family.reasoning else (None, None)
    assert called == ParsedResponse("", (ToolCall("multiply", json.dumps({"a": 3, "b": 4})),), why)
    assert answered == ParsedResponse(SAID, (), then)


@each_family
def test_calls_continue_each_other_where_the_template_keeps_what_the_policy_sampled(family):
    calls = played(family).calls()
    *loop, asked_again = calls
    if family.call:
        assert (loop[1].parent is loop[0]) is family.keeps_calls
    assert (asked_again.parent is loop[-1]) is family.keeps_answers


@each_family
def test_every_sampled_token_trains_exactly_once_and_in_the_context_of_its_request(family):
    renderer = family_renderer(family)
    capture = played(family)
    sequences = capture.sequences()
    broken = (bool(family.call) and not family.keeps_calls) + (not family.keeps_answers)
    assert len(sequences) == 1 + broken
    assert sum(sequence.calls for sequence in sequences) == len(sampled(family)) + 1
    trained = [renderer.decode(s.ids[s.sampled].tolist()) for s in sequences]
    assert "".join(trained) == "".join([*sampled(family), "?"])
    for sequence in sequences:
        assert torch.equal(sequence.logprobs, -sequence.sampled.float())


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.reasoning], ids=lambda family: family.name)
def test_reasoning_that_the_template_drops_is_trained_but_not_part_of_the_later_sequence(family):
    renderer = family_renderer(family)
    earlier, later = (renderer.decode(s.ids.tolist()) for s in played(family).sequences())
    assert WHY in earlier
    assert THEN in earlier
    assert WHY not in later
    assert THEN not in later
    assert SAID in later
