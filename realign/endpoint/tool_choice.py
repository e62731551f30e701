"""Force a tool call: the response begins with the tokens that the chat template writes before the arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from realign.endpoint.capture import Prompt
from realign.endpoint.errors import ApiError
from realign.endpoint.renderer import Renderer
from realign.endpoint.response_parsing import can_parse


def call_beginning(
    renderer: Renderer,
    messages: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids that every call of one of these tools begins with.

    Args:
        renderer: renders the chat template.
        messages: the conversation before the response.
        names: names of the tools, at least one.
        tools: all tools of the request.
        options: further variables of the chat template.

    Raises:
        ApiError: the tokenizer cannot parse tool calls, or its chat template renders no such tokens.
    """
    if not can_parse(renderer.tokenizer):
        raise _unsupported("the tokenizer has no response template, which finds tool calls")
    before = renderer.render(messages, tools, options)
    texts = [
        text
        for tool in tools or ()
        if tool["function"]["name"] in names
        for text in _calls(renderer, messages, tool["function"], tools, options)
    ]
    if not texts or not all(text.startswith(before) for text in texts):
        raise _unsupported("the chat template renders no call after the prompt")
    common = _common([renderer.encode(text.removeprefix(before)) for text in texts])
    if not common:
        raise _unsupported("calls in the format of the chat template have no common beginning")
    return common


def _calls(
    renderer: Renderer,
    messages: Sequence[Mapping[str, Any]],
    function: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
) -> Iterator[str]:
    """Yield the conversation with calls of a function, whose arguments differ."""
    parameters = list((function.get("parameters") or {}).get("properties") or {})
    variants: tuple[dict[str, Any], ...] = ({}, {"a": "b"}, {"zy": 1})
    if parameters:  # some templates need the arguments of the tool
        variants = (*variants, dict.fromkeys(parameters, "b"), dict.fromkeys(parameters, "zy"))
    for arguments in variants:
        call = {
            "id": "call00000",
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            yield renderer.render([*messages, answer], tools, options, answered=True)
        except ValueError:  # the template cannot render these arguments
            continue


def _common(lists: Sequence[Sequence[int]]) -> list[int]:
    """Return the longest common beginning of several lists."""
    places = zip(*lists, strict=False)
    equal = [len(set(found)) == 1 for found in places]
    return list(lists[0][: equal.index(False) if False in equal else len(equal)])


def with_beginning(renderer: Renderer, prompt: Prompt, ids: Sequence[int]) -> Prompt:
    """Return a prompt that ends with the beginning of the response."""
    assert prompt.text is not None
    text = prompt.text + renderer.decode(ids, before=prompt.ids)
    return replace(prompt, ids=(*prompt.ids, *ids), text=text, begun=len(ids))


def _unsupported(why: str) -> ApiError:
    return ApiError(
        400,
        f"Unsupported value: 'tool_choice' cannot force a call, since {why}.",
        param="tool_choice",
        code="unsupported_value",
    )


__all__ = ["call_beginning", "with_beginning"]
