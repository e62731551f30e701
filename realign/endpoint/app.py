"""The ASGI application of an endpoint (Starlette; needs the extra `serve`)."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from realign.endpoint.caller import ApiCall, Caller
from realign.endpoint.limits import (
    EndpointLimits,
    Guard,
    Receive,
    Scope,
    Send,
    read_body,
    send_json,
    until_disconnected,
)
from realign.endpoint.requests import ApiError
from realign.endpoint.responses import Delta, ResponseStream, ResponseWriter
from realign.endpoint.sessions import Session, Sessions

POLL_S = 0.05
"""Seconds between two chunks of a streamed response."""
_PREFIXES = ("/v1", "/sessions/{session}/v1")


def application(sessions: Sessions, caller: Caller, limits: EndpointLimits, model: str) -> Guard:
    """Return the application.

    Args:
        sessions: the open sessions.
        caller: the threads that call samplers.
        limits: limits of requests.
        model: name of the model in responses.
    """
    created = int(time.time())

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        names = _session(sessions, request).roles or (model,)
        entries = [{"id": name, "object": "model", "created": created, "owned_by": "realign"} for name in names]
        return JSONResponse({"object": "list", "data": entries})

    routes = [Route("/health", health)]
    for prefix in _PREFIXES:
        routes += [
            Route(f"{prefix}/models", models),
            Route(f"{prefix}/chat/completions", Calls(sessions, caller, limits, model), methods=["POST"]),
        ]

    def respond_with_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            served = ", ".join(f"{min(route.methods or ())} {route.path}" for route in routes)
            here = f"{request.method} {request.url.path}"
            error = ApiError(error.status_code, f"No {here} at this endpoint. It serves {served}.", code="not_found")
        assert isinstance(error, ApiError)
        # as ASCII, since the name of an unknown parameter may be text that UTF-8 cannot encode
        return Response(json.dumps(error.body()), error.status, media_type="application/json")

    handlers: Any = {ApiError: respond_with_error, HTTPException: respond_with_error}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), limits)


class Calls:
    """ASGI application of chat completions."""

    def __init__(self, sessions: Sessions, caller: Caller, limits: EndpointLimits, model: str) -> None:
        """Create the application; see `application` for the arguments."""
        self._sessions, self._caller, self._limits, self._model = sessions, caller, limits, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        session = _session(self._sessions, Request(scope))
        body = await read_body(receive, self._limits)
        await until_disconnected(receive, self._serve(session, body, send))

    async def _serve(self, session: Session, body: bytes, send: Send) -> None:
        call = await self._caller.start(session, body)
        answer = ResponseWriter(self._model, call.parameters, session.backend.renderer)
        try:
            if call.parameters.stream:
                await self._stream(call, answer, send)
            else:
                await send_json(send, 200, answer.whole(await self._caller.finish(call)))
        finally:
            self._caller.end(call)

    async def _stream(self, call: ApiCall, answer: ResponseWriter, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._chunks(call, answer, send)
        except ApiError as error:
            await _event(send, error.body())
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _chunks(self, call: ApiCall, answer: ResponseWriter, send: Send) -> None:
        streams = [ResponseStream(call.parameters.stop) for _ in call.handles]
        for index in range(len(streams)):
            await _event(send, answer.opening(index))

        async def send_parts(index: int, parts: list[Delta]) -> None:
            for part in parts:
                await _event(send, answer.delta(index, call.prompt, part))

        finished = asyncio.ensure_future(self._caller.finish(call))
        try:
            readers = [call.reader() for _ in streams] if call.partial else []
            # A sampler without partial results has nothing to poll for.
            while not (await asyncio.wait({finished}, timeout=POLL_S if call.partial else None))[0]:
                for index, stream in enumerate(streams):
                    so_far = await self._caller.so_far(call, index, readers[index])
                    await send_parts(index, stream.part(so_far))
            choices = await finished
        finally:
            finished.cancel()
        for choice, stream in zip(choices, streams, strict=True):
            await send_parts(choice.index, stream.rest(choice.parsed))
            await _event(send, answer.closing(choice))
        if call.parameters.include_usage:
            await _event(send, answer.usage_chunk(choices))


async def _event(send: Send, data: Any) -> None:
    await send({"type": "http.response.body", "body": f"data: {json.dumps(data)}\n\n".encode(), "more_body": True})


def _session(sessions: Sessions, request: Request) -> Session:
    """Return the session of a request.

    Raises:
        ApiError: the key is wrong.
    """
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return sessions.find(key if scheme.lower() == "bearer" else "", request.path_params.get("session"))
