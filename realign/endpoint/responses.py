"""Responses of the OpenAI API: whole ones, and the parts of unfinished ones that can be sent already."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from realign.api.environment import ToolCall
from realign.api.sampler import Completion
from realign.endpoint.capture import Prompt
from realign.endpoint.renderer import Renderer
from realign.endpoint.requests import Parameters
from realign.endpoint.response_parsing import ParsedResponse
from realign.endpoint.scoring import TokenScores


class TextStream:
    """Yields the parts of a growing text. Keeps back what further tokens may change or remove.

    Args:
        stops: stop strings, which must not be sent.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._sent = ""

    def part(self, text: str) -> str:
        """Return the further part of the text so far; empty if nothing can be sent yet."""
        stable = text.rstrip("\ufffd")  # an incomplete character
        stable = stable[: len(stable) - max((_overlap(stable, stop) for stop in self._stops), default=0)]
        if any(stop in stable for stop in self._stops) or not stable.startswith(self._sent):
            return ""
        return self._next(stable)

    def rest(self, text: str) -> str:
        """Return the last part, given the whole text."""
        return self._next(text) if text.startswith(self._sent) else ""

    def _next(self, text: str) -> str:
        part, self._sent = text[len(self._sent) :], text
        return part


@dataclass(frozen=True)
class Delta:
    """A further part of a response, of one kind."""

    content: str = ""
    reasoning: str = ""
    call: tuple[int, ToolCall] | None = None
    """Index of a tool call in the response, and the call."""


class ResponseStream:
    """Yields the parts of a growing response. A tool call is one part, which is sent when the call is complete.

    Args:
        stops: stop strings, which must not be sent.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._content, self._reasoning = TextStream(stops), TextStream()
        self._calls = 0

    def part(self, parsed: ParsedResponse) -> list[Delta]:
        """Return the further parts of an unfinished response."""
        return list(
            self._deltas(self._reasoning.part(parsed.reasoning or ""), self._content.part(parsed.content), parsed)
        )

    def rest(self, parsed: ParsedResponse) -> list[Delta]:
        """Return the last parts, given the whole response."""
        return list(
            self._deltas(self._reasoning.rest(parsed.reasoning or ""), self._content.rest(parsed.content), parsed)
        )

    def _deltas(self, reasoning: str, content: str, parsed: ParsedResponse) -> Iterator[Delta]:
        if reasoning:
            yield Delta(reasoning=reasoning)
        if content:
            yield Delta(content)
        known, self._calls = self._calls, max(self._calls, len(parsed.tool_calls))
        for number in range(known, len(parsed.tool_calls)):
            yield Delta(call=(number, parsed.tool_calls[number]))


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text with which the stop string begins."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class ResponseChoice:
    """One response, parsed."""

    index: int
    prompt: Prompt
    completion: Completion
    parsed: ParsedResponse
    stopped: bool = False
    """Whether a stop string ended the response; the content ends before it."""
    scores: TokenScores | None = None
    """Scores of the tokens of the response; None without `top_logprobs`."""

    @property
    def finish_reason(self) -> str:
        """Reason why the response ended."""
        if self.parsed.tool_calls:
            return "tool_calls"
        return "length" if self.completion.truncated and not self.stopped else "stop"


@dataclass(frozen=True)
class ResponseWriter:
    """Builds the objects of one request."""

    model: str
    parameters: Parameters
    renderer: Renderer
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[ResponseChoice]) -> dict[str, Any]:
        """Return the response to a request without streaming."""
        entries = [self._choice(choice) for choice in choices]
        return self._object("chat.completion", entries) | {"usage": usage(choices)}

    def opening(self, index: int) -> dict[str, Any]:
        """Return the first chunk of a streamed choice."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, prompt: Prompt, part: Delta) -> dict[str, Any]:
        """Return a chunk with a further part of a response."""
        if part.reasoning:
            return self._chunk(index, {"reasoning_content": part.reasoning})
        if part.call is not None:
            number, call = part.call
            return self._chunk(index, {"tool_calls": [{"index": number, **tool_call(prompt, index, number, call)}]})
        return self._chunk(index, {"content": part.content})

    def closing(self, choice: ResponseChoice) -> dict[str, Any]:
        """Return the last chunk of a streamed choice, with everything except the message."""
        chunk = self._chunk(choice.index, {})
        chunk["choices"][0] |= {k: v for k, v in self._choice(choice).items() if k != "message"}
        return chunk

    def usage_chunk(self, choices: Sequence[ResponseChoice]) -> dict[str, Any]:
        """Return the chunk with the usage, which follows all choices."""
        return self._object("chat.completion.chunk", []) | {"usage": usage(choices)}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
        return self._object("chat.completion.chunk", [choice])

    def _choice(self, choice: ResponseChoice) -> dict[str, Any]:
        out: dict[str, Any] = {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs(choice) if self.parameters.logprobs else None,
            "message": message(choice),
        }
        if self.parameters.return_token_ids:
            out |= {"prompt_token_ids": list(choice.prompt.ids), "token_ids": choice.completion.ids.tolist()}
        return out

    def _logprobs(self, choice: ResponseChoice) -> dict[str, Any]:
        ids = choice.completion.ids.tolist()
        scores = choice.scores or TokenScores(choice.completion.logprobs.tolist(), [()] * len(ids))
        tokens = [
            self._token(*token) | {"top_logprobs": [self._token(*likely) for likely in most_likely]}
            for *token, most_likely in zip(ids, scores.logprobs, scores.top, strict=True)
        ]
        return {"content": tokens, "refusal": None}

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        text = self.renderer.text_of(id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}


def message(choice: ResponseChoice) -> dict[str, Any]:
    """Return the message of a response."""
    parsed = choice.parsed
    out: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.reasoning is not None:
        out["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        out["content"] = parsed.content or None
        calls = enumerate(parsed.tool_calls)
        out["tool_calls"] = [tool_call(choice.prompt, choice.index, number, call) for number, call in calls]
    return out


def tool_call(prompt: Prompt, index: int, number: int, call: ToolCall) -> dict[str, Any]:
    """Return a tool call of a message.

    Its id has 9 characters, as some templates require. It is equal in a repeated run and in a stream, and no other
    call of the conversation has it, since their prompts differ.

    Args:
        prompt: prompt of the response.
        index: index of the choice.
        number: index of the call in the response.
        call: the call.
    """
    id = hashlib.sha256(repr((prompt.ids, index, number, call.name, call.arguments)).encode()).hexdigest()[:9]
    return {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage(choices: Sequence[ResponseChoice]) -> dict[str, int]:
    """Return the token counts of a request. Its prompt counts once."""
    prompt = len(choices[0].prompt.ids)
    sampled = sum(len(choice.completion.ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
