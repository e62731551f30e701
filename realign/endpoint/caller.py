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
from realign.endpoint.limits import EndpointLimits
from realign.endpoint.renderer import Renderer
from realign.endpoint.requests import (
    CHAT,
    COMPLETIONS,
    MOST_CHOICES,
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
from realign.endpoint.sessions import Session, closed
from realign.environments.event_loops import DaemonThreads

T = TypeVar("T")


@dataclass
class ApiCall:
    """A request that the sampler is processing."""

    session: Session
    capture: Capture
    parameters: Parameters
    chat: bool
    """Whether responses are parsed. The text of a completion is its content."""
    tools: list[dict[str, Any]] | None = None
    prompts: list[Prompt] = field(default_factory=list)
    handles: list[list[Handle]] = field(default_factory=list)
    """Handles of the responses to each prompt."""
    ended: bool = False
    """Whether the request has ended. Its responses are then not captured."""

    @property
    def flat(self) -> list[tuple[Prompt, Handle]]:
        """All responses that were requested, in the order of the choices."""
        return [(p, handle) for p, handles in zip(self.prompts, self.handles, strict=False) for handle in handles]

    @property
    def partial(self) -> bool:
        """Whether the text of unfinished responses can be sent."""
        return self.session.backend.sampler.capabilities().abort

    def reader(self, index: int) -> ResponseReader | None:
        """Return a parser of a response; None if its content is its whole text."""
        prompt = self.flat[index][0]
        given = prompt.text if prompt.text is not None and not prompt.begun else prompt.ids[: _given(prompt)]
        return self.session.backend.renderer.reader(given, self.tools) if self.chat else None

    def limited(self, parsed: ParsedResponse) -> ParsedResponse:
        """Return a response with its first tool call only, unless the request allows several."""
        return parsed if self.parameters.parallel_tool_calls else replace(parsed, tool_calls=parsed.tool_calls[:1])

    def text(self, index: int, ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of a response, including a beginning that the prompt contains."""
        prompt = self.flat[index][0]
        given = _given(prompt) if self.chat else len(prompt.ids)
        renderer = self.session.backend.renderer
        return renderer.decode([*prompt.ids[given:], *ids], before=prompt.ids[:given], special=special)


class Caller:
    """Threads of an endpoint: one for each request that is awaited, and one for each session that prepares a prompt.

    A session prepares its prompts in order, one at a time, so it cannot delay the others. A sampler in this process
    samples in the threads that wait.

    Args:
        limits: limits of requests.
    """

    def __init__(self, limits: EndpointLimits) -> None:
        self._torch_threads = torch.get_num_threads()  # a new thread would use the default of torch
        self._threads = DaemonThreads()
        self._most_responses = max(MOST_CHOICES, limits.max_concurrent)

    def close(self) -> None:
        """End idle threads."""
        self._threads.shutdown(wait=False)

    def _chat(self, session: Session, body: Mapping[str, Any]) -> tuple[ApiCall, Iterator[Prompt]]:
        """Read a chat request."""
        parameters = read_parameters(body, CHAT)
        messages, tools = read_messages(body.get("messages")), read_tools(body)
        forced = forced_tools(body, tools)
        renderer = session.backend.renderer
        options = body.get("chat_template_kwargs") or {}
        if not isinstance(options, dict):
            raise invalid("chat_template_kwargs", "expected an object")
        if wrong := fixed_arguments(renderer.tokenizer, options):
            raise invalid(f"chat_template_kwargs.{wrong[0]}", "expected variables of the chat template only")
        if not renderer.has_template:
            raise ApiError(400, "The model has no chat template. Use /v1/completions.", code="no_chat_template")

        capture = session.capture_of(body.get("model"))

        def prompts() -> Iterator[Prompt]:
            text = renderer.render(messages, tools, options)
            if (hidden := renderer.hidden_tool(text, messages, tools, options)) is not None:
                raise invalid(
                    "tools",
                    f"the chat template of the model drops the tool {hidden!r}. Use a model whose chat template "
                    "renders tools, or describe them in a message",
                )
            session.check_length(text)
            prompt = capture.prompt(renderer, text)
            if forced:
                prompt = _with_beginning(renderer, prompt, call_beginning(renderer, messages, forced, tools, options))
            yield prompt

        return ApiCall(session, capture, parameters, True, tools), prompts()

    def _completion(self, session: Session, body: Mapping[str, Any]) -> tuple[ApiCall, Iterator[Prompt]]:
        """Read a completion request."""
        parameters = read_parameters(body, COMPLETIONS)
        given = _prompts(body.get("prompt"))
        if len(given) * parameters.n > self._most_responses:
            raise invalid("prompt", f"a request may have at most {self._most_responses} responses (prompts times n)")
        renderer, capture = session.backend.renderer, session.capture_of(body.get("model"))
        size = len(renderer.tokenizer)

        def prompt(given_prompt: str | list[int]) -> Prompt:
            if isinstance(given_prompt, str):
                session.check_length(given_prompt)
                return capture.prompt(renderer, given_prompt, start=renderer.start_tokens())
            if any(not 0 <= i < size for i in given_prompt):
                raise ValueError(f"the prompt has token ids outside 0 to {size - 1}")
            return capture.prompt_of_ids(given_prompt)

        return ApiCall(session, capture, parameters, False), map(prompt, given)

    async def start(self, session: Session, body: bytes, *, chat: bool) -> ApiCall:
        """Read a request, prepare its prompts and submit them, in a thread. Stops early if the client leaves.

        Args:
            session: session of the request.
            body: its JSON.
            chat: whether it is a chat request; otherwise a completion.

        Raises:
            ApiError: the request is invalid, or the sampler cannot serve it.
        """
        left = False

        def going() -> bool:
            if left:
                raise closed()
            return True

        def start() -> ApiCall:
            call, prompts = (self._chat if chat else self._completion)(session, read_json(body))
            try:
                call.prompts = [prompt for prompt in prompts if going()]
            except ValueError as error:
                raise ApiError(400, f"The prompt is invalid: {error}.", code="invalid_prompt") from error
            try:
                for prompt in call.prompts:
                    going()
                    call.handles.append(call.session.submit(prompt, call.parameters))
            except BaseException:
                _cancel(call)
                raise
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

        def finished() -> list[ResponseChoice]:
            torch.set_num_threads(self._torch_threads)
            completions = [call.session.result(handle) for _, handle in call.flat]
            if call.ended:
                raise closed()
            rest = list(completions)
            for prompt, handles in zip(call.prompts, call.handles, strict=True):
                call.session.keep(call.capture, prompt, rest[: len(handles)])
                rest = rest[len(handles) :]
            return [choice(call, index, completion) for index, completion in enumerate(completions)]

        return await self._aside(finished)

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
            ids = call.flat[index][1].tokens().ids.tolist()
            if reader is None:
                return ParsedResponse(call.text(index, ids, special=False))
            return call.limited(reader.part(call.text(index, ids)))

        try:
            return await self._aside(read)
        except RuntimeError as error:
            raise call.session.failed(error) from error

    async def _aside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def end(self, call: ApiCall) -> None:
        """End a request: cancel its unfinished responses, without waiting."""
        call.ended = True
        if not all(handle.done for _, handle in call.flat):
            # In a thread, since a sampler may wait for a lock in `cancel`.
            self._threads.submit(_cancel, call)


def _cancel(call: ApiCall) -> None:
    for _, handle in call.flat:
        handle.cancel()


def choice(call: ApiCall, index: int, completion: Completion) -> ResponseChoice:
    """Parse a response, and score its tokens if the request needs it.

    Raises:
        ApiError: the scorer failed.
    """
    prompt, sampled, reader = call.flat[index][0], completion.ids.tolist(), call.reader(index)
    plain = call.text(index, sampled, special=False)
    parsed = ParsedResponse(plain) if reader is None else reader.whole(call.text(index, sampled), plain)
    content, stopped = cut(parsed.content, call.parameters.stop)
    parsed = replace(call.limited(parsed), content=content)
    scores = call.session.score([*prompt.ids, *sampled], call.parameters) if call.parameters.scores else None
    return ResponseChoice(index, prompt, completion, parsed, stopped, scores)


def _given(prompt: Prompt) -> int:
    """Return the number of tokens of a prompt before the beginning of its response."""
    return len(prompt.ids) - prompt.begun


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first stop string, and whether there is one."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def _prompts(given: Any) -> list[str | list[int]]:
    """Return the prompts of a completion request: texts or lists of token ids."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if all(isinstance(prompt, str) for prompt in given):
            return given
        if _ids(given):
            return [given]
        if all(isinstance(prompt, list) and prompt and _ids(prompt) for prompt in given):
            return given
    raise invalid("prompt", "expected a text, a list of texts, a list of token ids, or a list of such lists")


def _ids(given: list[Any]) -> bool:
    return all(isinstance(i, int) and not isinstance(i, bool) for i in given)


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
