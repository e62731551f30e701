"""`Caller`: renders prompts, submits requests and waits for responses, in threads, for an event loop.

A forced tool call (`call_beginning`) begins with the tokens that the chat template writes before the arguments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from realign.api.sampler import Completion, Handle
from realign.chat_template import fixed_arguments
from realign.endpoint.capture import Capture, Prompt
from realign.endpoint.renderer import Renderer
from realign.endpoint.requests import (
    ApiError,
    Parameters,
    forced_tools,
    invalid,
    read_json,
    read_messages,
    read_parameters,
    read_tools,
)
from realign.endpoint.response_parsing import ParsedResponse, ResponseReader, can_parse
from realign.endpoint.responses import ResponseChoice
from realign.endpoint.sessions import Session, closed_error
from realign.environments.event_loops import DaemonThreads

T = TypeVar("T")


@dataclass
class ApiCall:
    """A request that the sampler is processing."""

    session: Session
    capture: Capture
    parameters: Parameters
    tools: list[dict[str, Any]] | None
    prompt: Prompt
    handles: list[Handle] = field(default_factory=list)
    """The responses that were requested, in the order of the choices."""
    ended: bool = False
    """Whether the request has ended. Its responses are then not captured."""

    @property
    def partial(self) -> bool:
        """Whether the text of unfinished responses can be sent."""
        return self.session.backend.sampler.capabilities().abort

    def reader(self) -> ResponseReader | None:
        """Return a parser of a response; None if its content is its whole text."""
        given = self._given if self.prompt.started else self.prompt.text
        return self.session.backend.renderer.reader(given, self.tools)

    def limit_tool_calls(self, parsed: ParsedResponse) -> ParsedResponse:
        """Return a response with its first tool call only, unless the request allows several."""
        return parsed if self.parameters.parallel_tool_calls else replace(parsed, tool_calls=parsed.tool_calls[:1])

    def text(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of a response, including a beginning that the prompt contains."""
        given = self._given
        start_ids = self.prompt.ids[len(given) :]
        return self.session.backend.renderer.decode([*start_ids, *ids], before=given, special=special)

    @property
    def _given(self) -> tuple[int, ...]:
        """The token ids of the prompt before the beginning of its response."""
        return self.prompt.ids[: len(self.prompt.ids) - self.prompt.started]


class Caller:
    """Threads of an endpoint: one for each request that is awaited, and one for each session that prepares a prompt.

    A session prepares its prompts in order, one at a time, so it cannot delay the others. A sampler in this process
    samples in the threads that wait.
    """

    def __init__(self) -> None:
        self._torch_threads = torch.get_num_threads()  # a new thread would use the default of torch
        self._threads = DaemonThreads()

    def _read(self, session: Session, body: Mapping[str, Any]) -> ApiCall:
        """Read a request and prepare its prompt."""
        parameters = read_parameters(body)
        messages, tools = read_messages(body.get("messages")), read_tools(body)
        forced = forced_tools(body, tools)
        renderer = session.backend.renderer
        options = body.get("chat_template_kwargs") or {}
        if not isinstance(options, dict):
            raise invalid("chat_template_kwargs", "expected an object")
        if wrong := fixed_arguments(renderer.tokenizer, options):
            raise invalid(f"chat_template_kwargs.{wrong[0]}", "expected variables of the chat template only")
        if not renderer.has_template:
            raise ApiError(400, "The model has no chat template. Add one to its tokenizer.", code="no_chat_template")

        capture = session.capture_of(body.get("model"))

        try:
            text = renderer.render(messages, tools, options)
            if (hidden := renderer.find_hidden_tool(text, messages, tools, options)) is not None:
                raise invalid(
                    "tools",
                    f"the chat template of the model drops the tool {hidden!r}. Use a model whose chat template "
                    "renders tools, or describe them in a message",
                )
            session.check_length(text)
            prompt = capture.prompt(renderer, text)
            if forced:
                prompt = _with_beginning(renderer, prompt, call_beginning(renderer, messages, forced, tools, options))
        except ValueError as error:
            raise ApiError(400, f"The prompt is invalid: {error}.", code="invalid_prompt") from error
        return ApiCall(session, capture, parameters, tools, prompt)

    async def start(self, session: Session, body: bytes) -> ApiCall:
        """Read a request, prepare its prompt and submit it, in a thread. Stops early if the client leaves.

        Args:
            session: session of the request.
            body: its JSON.

        Raises:
            ApiError: the request is invalid, or the sampler cannot serve it.
        """
        left = False

        def start() -> ApiCall:
            call = self._read(session, read_json(body))
            if left:
                raise closed_error()
            call.handles = session.submit(call.prompt, call.parameters)
            return call

        slot = session.preparing
        await slot.acquire()
        started = asyncio.get_running_loop().run_in_executor(self._threads, start)
        started.add_done_callback(lambda _: slot.release())  # not before: `start` continues if this is canceled
        try:
            # A thread cannot be canceled; `_drop` ends what it has started.
            return await asyncio.shield(started)
        except asyncio.CancelledError:
            left = True
            started.add_done_callback(self._drop)
            raise

    def _drop(self, started: asyncio.Future[ApiCall]) -> None:
        """Cancel a call whose client left while it was being started."""
        if not started.cancelled() and started.exception() is None:
            self._threads.submit(_cancel, started.result())

    async def finish(self, call: ApiCall) -> list[ResponseChoice]:
        """Wait for the responses, capture them, and parse them, in one thread.

        Raises:
            ApiError: a response was canceled, the sampler failed, or the request or the session has ended.
        """

        def finish() -> list[ResponseChoice]:
            torch.set_num_threads(self._torch_threads)
            completions = [call.session.result(handle) for handle in call.handles]
            if call.ended:
                raise closed_error()
            call.session.keep(call.capture, call.prompt, completions)
            return [choice(call, index, completion) for index, completion in enumerate(completions)]

        return await self._aside(finish)

    async def so_far(self, call: ApiCall, index: int, reader: ResponseReader | None) -> ParsedResponse:
        """Return the parts of an unfinished response.

        Args:
            call: the request.
            index: index of the response.
            reader: see `ApiCall.reader`.

        Raises:
            ApiError: the sampler failed.
        """

        def read() -> ParsedResponse:
            ids = call.handles[index].tokens().ids.tolist()
            if reader is None:
                return ParsedResponse(call.text(ids, special=False))
            return call.limit_tool_calls(reader.part(call.text(ids)))

        try:
            return await self._aside(read)
        except RuntimeError as error:
            raise call.session.error_of(error) from error

    async def _aside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def end(self, call: ApiCall) -> None:
        """End a request: cancel its unfinished responses, without waiting."""
        call.ended = True
        if not all(handle.done for handle in call.handles):
            # In a thread, since a sampler may wait for a lock in `cancel`.
            self._threads.submit(_cancel, call)


def _cancel(call: ApiCall) -> None:
    for handle in call.handles:
        handle.cancel()


def choice(call: ApiCall, index: int, completion: Completion) -> ResponseChoice:
    """Parse a response, and score its tokens if the request needs it.

    Raises:
        ApiError: the scorer failed.
    """
    sampled, reader = completion.ids.tolist(), call.reader()
    plain = call.text(sampled, special=False)
    parsed = ParsedResponse(plain) if reader is None else reader.whole(call.text(sampled), plain)
    content, stopped = cut(parsed.content, call.parameters.stop)
    parsed = replace(call.limit_tool_calls(parsed), content=content)
    scores = call.session.score(call.prompt, sampled, call.parameters) if call.parameters.top_logprobs else None
    return ResponseChoice(index, call.prompt, completion, parsed, stopped, scores)


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first stop string, and whether there is one."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


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
    given = renderer.encode(before)
    common = _common([renderer.encode(text.removeprefix(before), before=given) for text in texts])
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
    equal = [len(set(tokens)) == 1 for tokens in places]
    return list(lists[0][: equal.index(False) if False in equal else len(equal)])


def _with_beginning(renderer: Renderer, prompt: Prompt, ids: Sequence[int]) -> Prompt:
    """Return a prompt that ends with the beginning of the response."""
    text = prompt.text + renderer.decode(ids, before=prompt.ids)
    return replace(prompt, ids=(*prompt.ids, *ids), text=text, started=len(ids))


def _unsupported(why: str) -> ApiError:
    return ApiError(
        400,
        f"Unsupported value: 'tool_choice' cannot force a call, since {why}.",
        param="tool_choice",
        code="unsupported_value",
    )
