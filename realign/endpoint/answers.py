"""JSON objects of responses, in the format of the OpenAI API."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from realign.api.requests import Completion
from realign.endpoint.capture import Prompt
from realign.endpoint.parameters import Parameters
from realign.endpoint.renderer import Renderer
from realign.endpoint.response_parsing import ParsedResponse


@dataclass(frozen=True)
class Choice:
    """One response, parsed."""

    index: int
    prompt: Prompt
    completion: Completion
    parsed: ParsedResponse
    stopped: bool = False
    """Whether a stop string ended the response; the content ends before it."""

    @property
    def finish_reason(self) -> str:
        """Reason why the response ended."""
        if self.parsed.tool_calls:
            return "tool_calls"
        return "length" if self.completion.truncated and not self.stopped else "stop"


@dataclass(frozen=True)
class Answer:
    """Builds the objects of one request."""

    model: str
    chat: bool
    parameters: Parameters
    renderer: Renderer
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the response to a request without streaming."""
        entries = [self._choice(choice) for choice in choices]
        return self._object("chat.completion" if self.chat else "text_completion", entries) | {"usage": usage(choices)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk of a streamed choice; None if the format has none."""
        return self._chunk(index, {"role": "assistant", "content": ""}) if self.chat else None

    def delta(self, index: int, text: str) -> dict[str, Any]:
        """Return a chunk with further text."""
        return self._chunk(index, {"content": text} if self.chat else text)

    def closing(self, choice: Choice) -> dict[str, Any]:
        """Return the last chunk of a streamed choice, with everything except its text."""
        whole = self._choice(choice)
        calls = [{"index": i, **call} for i, call in enumerate(whole.get("message", {}).get("tool_calls", ()))]
        delta: Any = {"tool_calls": calls} if calls else {}
        if reasoning := choice.parsed.reasoning:
            delta["reasoning_content"] = reasoning
        chunk = self._chunk(choice.index, delta if self.chat else "")
        kept = {name: value for name, value in whole.items() if name not in ("message", "text")}
        chunk["choices"][0] |= kept
        return chunk

    def used(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the chunk with the usage, which follows all choices."""
        return self._object(self._kind, []) | {"usage": usage(choices)}

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(self, index: int, delta: Any) -> dict[str, Any]:
        choice = {"index": index, "delta" if self.chat else "text": delta, "finish_reason": None, "logprobs": None}
        return self._object(self._kind, [choice])

    def _choice(self, choice: Choice) -> dict[str, Any]:
        out: dict[str, Any] = {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs(choice) if self.parameters.logprobs else None,
        }
        if self.chat:
            out["message"] = message(choice)
        else:
            out["text"] = choice.parsed.content
        if self.parameters.return_token_ids:
            out |= {"prompt_token_ids": list(choice.prompt.ids), "token_ids": choice.completion.ids.tolist()}
        return out

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        ids, logprobs = choice.completion.ids.tolist(), choice.completion.logprobs.tolist()
        tokens = [self.renderer.decode([i]) for i in ids]
        if self.chat:
            content = [
                {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="replace")), "top_logprobs": []}
                for token, logprob in zip(tokens, logprobs, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


def message(choice: Choice) -> dict[str, Any]:
    """Return the message of a response."""
    parsed = choice.parsed
    out: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.reasoning is not None:
        out["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        out["content"] = parsed.content or None
        out["tool_calls"] = [
            {
                "id": _call_id(choice, number),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(parsed.tool_calls)
        ]
    return out


def _call_id(choice: Choice, number: int) -> str:
    """Return the id of a tool call: 9 characters, as some templates require, and equal in a repeated run."""
    tokens = (*choice.prompt.ids, *choice.completion.ids.tolist(), choice.index, number)
    return hashlib.sha256(repr(tokens).encode()).hexdigest()[:9]


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Return the token counts of a request. Each prompt counts once."""
    prompt = sum(len(ids) for ids in {id(c.prompt): c.prompt.ids for c in choices}.values())
    sampled = sum(len(choice.completion.ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
