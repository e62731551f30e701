"""Test the endpoint over real sockets, with the official client."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import httpx2
import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.endpoint import Endpoint, EndpointLimits, Renderer, ServedPolicy, Sessions, server
from realign.endpoint.server import SPARE
from realign.endpoint.sessions import Session
from realign.samplers.in_process.background import StreamingEngine
from tests.endpoint.scripted import CONFIG, HELLO, KEY, letters, served, user
from tests.processes import until
from tests.table_sampler import TableSampler
from tests.tiny import tiny_engine, tiny_tokenizer

CHAT, X = "/v1/chat/completions", json.dumps({"messages": user("x")}).encode()


@pytest.fixture(scope="module")
def endpoint():
    with served() as (running, _):
        yield running


@pytest.fixture(scope="module")
def client(endpoint):
    with OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0) as openai_client:
        yield openai_client


def opened(endpoint: Endpoint, name: str = "p/0", **options) -> Session:
    session = Session(endpoint.sessions.main, name, **options)
    endpoint.sessions.open(session)
    return session


def client_of(endpoint: Endpoint, session: Session, **options) -> OpenAI:
    return OpenAI(base_url=endpoint.base_url(session), api_key=session.key, **{"max_retries": 0, **options})


def post(endpoint: Endpoint, path: str, body: bytes, key: str = KEY) -> httpx2.Response:
    return httpx2.post(f"{endpoint.url}{path}", content=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def test_health_needs_no_key_and_models_lists_the_model(endpoint, client):
    assert httpx2.get(f"{endpoint.url}/health").json() == {"status": "ok"}
    assert [model.id for model in client.models.list()] == ["tiny"]
    session = opened(endpoint, roles=("white", "black"))
    with client_of(endpoint, session) as player:
        assert [model.id for model in player.models.list()] == ["white", "black"]


def test_an_unknown_path_or_method_is_answered_with_what_is_served(endpoint, client):
    with pytest.raises(openai.NotFoundError, match=r"No POST /v1/completions .*POST /v1/chat/completions"):
        client.completions.create(model="tiny", prompt="hello")
    answer = httpx2.get(f"{endpoint.url}{CHAT}", headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 405
    assert answer.json()["error"]["message"].startswith(f"No GET {CHAT} at this endpoint. It serves GET /health")


def test_a_chat_completion_has_text_log_probs_and_usage(client):
    out = client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, n=2, max_completion_tokens=5)
    assert [choice.index for choice in out.choices] == [0, 1]
    for choice in out.choices:
        tokens = choice.logprobs.content
        assert "".join(token.token for token in tokens).removesuffix("<pad>") == choice.message.content
        assert all(token.logprob < 0 for token in tokens if token.token != "<pad>")
        assert choice.finish_reason in ("stop", "length")
        assert choice.message.role == "assistant"
    assert out.usage.prompt_tokens == len("hello")
    assert out.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in out.choices)


def test_a_stream_has_the_text_of_the_response_without_streaming(client):
    ask = {"model": "tiny", "messages": HELLO, "seed": 7, "n": 2, "extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(**ask)
    stream = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask)
    texts, reasons, ids, usage = {0: "", 1: ""}, {}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index], ids[choice.index] = choice.finish_reason, choice.token_ids
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason
        assert ids[choice.index] == choice.token_ids
    assert usage == whole.usage


def test_a_stream_sends_text_before_the_response_ends():
    sampler = TableSampler(letters())
    with served(sampler, GenerationConfig(max_new_tokens=50_000, fixed_length=True), limit=None) as (endpoint, _):
        client = OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0)
        with client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
            text = ""
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if text:
                    break
        assert len(text) < 50_000
        until(lambda: not sampler.active)  # the client left, so its request ended


def test_stop_strings_end_a_response_and_are_not_part_of_its_text():
    with closing(StreamingEngine("actor", tiny_engine())) as sampler, served(sampler) as (endpoint, _):
        client = OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0)
        ask = {"model": "tiny", "messages": HELLO, "seed": 1}
        whole = client.chat.completions.create(**ask).choices[0].message.content
        stop = whole[3:5]
        out = client.chat.completions.create(**ask, stop=stop).choices[0]
        assert out.message.content == whole[: whole.index(stop)]
        assert out.finish_reason == "stop"
        parts = client.chat.completions.create(**ask, stop=[stop], stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == out.message.content


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"stop": "x"}, "stop", "unsupported_parameter"),  # of this sampler
        ({"extra_body": {"min_p": 0.1}}, "min_p", "unsupported_parameter"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 1000}, "n", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens", "invalid_value"),
        ({"seed": 1.5}, "seed", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": ""}]}, None, "empty_prompt"),
    ],
)
def test_a_parameter_that_is_not_served_is_an_error_that_names_it(client, options, param, code):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **options})
    assert (raised.value.param, raised.value.code) == (param, code)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": 5}',
        b'{"messages": [{"role": ["user"]}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "n": true}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 1}',
        b'{"messages": [{"role": "user", "content": "x"}], "stream_options": {"unknown": 1}}',
    ],
)
def test_a_malformed_request_is_a_client_error_and_the_endpoint_continues(endpoint, client, body):
    out = post(endpoint, CHAT, body)
    assert out.status_code == 400, out.text
    assert out.json()["error"]["type"] == "invalid_request_error"
    assert client.chat.completions.create(model="tiny", messages=user("x")).choices


def test_a_model_without_a_chat_template_is_a_client_error():
    sampler = TableSampler(letters())
    with closing(sampler):
        sessions = Sessions(ServedPolicy(sampler, Renderer(tiny_tokenizer()), CONFIG), KEY)
        with closing(Endpoint(sessions, EndpointLimits(), model="tiny")) as endpoint:
            endpoint.start()
            assert post(endpoint, CHAT, X).json()["error"]["code"] == "no_chat_template"


class Counting:
    """A tokenizer that remembers the longest text that it encoded."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.longest = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __call__(self, text, **options):
        self.longest = max(self.longest, len(text))
        return self.tokenizer(text, **options)


@pytest.mark.parametrize(("characters", "least"), [(10_000_000, 0), (600_000, 1)])
def test_a_long_prompt_is_refused_before_all_of_it_is_tokenized(characters, least):
    body = {"messages": user("1+" * (characters // 2))}
    with served() as (endpoint, _):
        renderer = endpoint.sessions.main.renderer
        renderer.tokenizer = Counting(renderer.tokenizer)
        out = post(endpoint, CHAT, json.dumps(body).encode())
        assert (out.status_code, out.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert least <= renderer.tokenizer.longest < 10_000


@pytest.mark.parametrize("key", ["the-ke", "the-key2", "\u00e9", None])
def test_a_wrong_key_is_rejected(endpoint, key):
    session = opened(endpoint)
    for path in ("/v1/models", f"/sessions/{session.id}/v1/models", "/sessions/unknown/v1/models"):
        headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
        out = httpx2.get(f"{endpoint.url}{path}", headers=headers)
        assert (out.status_code, out.json()["error"]["code"]) == (401, "invalid_api_key")
    endpoint.sessions.close(session)


def test_the_key_of_a_session_opens_no_other_session_and_the_main_key_opens_none(endpoint):
    first, second = opened(endpoint), opened(endpoint)
    for key in (second.key, KEY):
        with (
            pytest.raises(openai.AuthenticationError),
            OpenAI(base_url=endpoint.base_url(first), api_key=key, max_retries=0) as client,
        ):
            client.models.list()
    for session in (first, second):
        endpoint.sessions.close(session)


def test_closing_a_session_cancels_its_unfinished_calls():
    config = GenerationConfig(max_new_tokens=1_000_000, fixed_length=True)
    with served(config=config, limit=None) as (endpoint, sampler), ThreadPoolExecutor() as threads:
        session = opened(endpoint)
        with client_of(endpoint, session) as client:
            call = threads.submit(client.chat.completions.create, model="tiny", messages=HELLO)
            until(lambda: sampler.active)
            endpoint.sessions.close(session)
            with pytest.raises(openai.ConflictError, match="session has ended"):
                call.result(60)
        assert not sampler.active
        assert session.capture.sequences() == []


def test_a_session_captures_streams_choices_and_tool_turns(endpoint):
    session = opened(endpoint)
    with client_of(endpoint, session) as client:
        first = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in first)
        turns = [*HELLO, {"role": "assistant", "content": said}, {"role": "tool", "tool_call_id": "1", "content": "5"}]
        client.chat.completions.create(model="tiny", messages=turns, n=2)
    endpoint.sessions.close(session)
    calls = session.capture.calls()
    assert [call.parent for call in calls] == [None, calls[0], calls[0]]
    assert [sequence.calls for sequence in session.capture.sequences()] == [2, 1]


def test_a_body_that_is_too_large_is_rejected_and_the_endpoint_continues():
    with served(max_body_mb=0.01) as (endpoint, _):
        client = OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0)
        for size in (20_000, 60_000):
            with pytest.raises(openai.APIStatusError) as raised:
                client.chat.completions.create(model="tiny", messages=user("x" * size))
            assert (raised.value.status_code, raised.value.code) == (413, "body_too_large")
        assert client.chat.completions.create(model="tiny", messages=user("x")).choices


@pytest.mark.parametrize("value", [b"1", b"[]", b"{}", b'""', b'{"a":1}', b'","', b'"[[["'])
def test_a_body_of_too_many_values_is_rejected_before_it_is_parsed(endpoint, value):
    """While Python parses JSON, no other request is answered."""
    body = b'{"messages": [' + b",".join([value] * 1_000_002) + b"]}"
    out = post(endpoint, CHAT, body)
    assert (out.status_code, out.json()["error"]["code"]) == (413, "body_too_large")


def request_head(length: int) -> bytes:
    lines = [f"POST {CHAT} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


def connected(endpoint: Endpoint) -> socket.socket:
    host, port = endpoint.url.removeprefix("http://").split(":")
    opened = socket.create_connection((host, int(port)))
    opened.settimeout(60)
    return opened


def half_open(endpoint: Endpoint) -> socket.socket:
    opened = connected(endpoint)
    opened.sendall(b"GET /health HTTP/1.1\r\nX: ")
    return opened


def test_half_open_connections_above_a_limit_are_closed_and_do_not_delay_others(monkeypatch):
    monkeypatch.setattr(server, "HEADERS_S", 600)
    with served(max_concurrent=2) as (endpoint, _):
        held = [half_open(endpoint) for _ in range(100)]
        for _ in range(100):  # idle after a request without a key
            held.append(connected(endpoint))
            held[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert held[-1].recv(4096)  # answered: from now on it is idle
        with OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0) as client:
            assert client.chat.completions.create(model="tiny", messages=user("x")).choices
        assert httpx2.get(f"{endpoint.url}/health").status_code == 200
        for one in held[: 200 - 2 - SPARE]:  # the oldest ones
            with suppress(ConnectionResetError):
                while one.recv(4096):
                    pass
        assert len(endpoint._server.server_state.connections) <= 2 + SPARE
        for one in held:
            one.close()


def test_a_client_that_does_not_read_its_stream_is_cut_off_at_the_time_limit():
    config = GenerationConfig(max_new_tokens=10_000_000, fixed_length=True)
    with served(config=config, limit=None, timeout_s=2.0) as (endpoint, sampler), connected(endpoint) as slow:
        body = json.dumps({"messages": HELLO, "stream": True}).encode()
        slow.sendall(request_head(len(body)) + body)
        until(lambda: sampler.active)
        until(lambda: not sampler.active)


def test_a_request_that_takes_too_long_is_an_error_and_its_sampling_ends():
    config = GenerationConfig(max_new_tokens=10_000_000, fixed_length=True)
    with served(config=config, limit=None, timeout_s=1.0) as (endpoint, sampler):
        out = post(endpoint, CHAT, X)
        assert (out.status_code, out.json()["error"]["code"]) == (504, "timeout")
        until(lambda: not sampler.active)


def test_requests_above_the_limit_of_concurrent_ones_are_rejected():
    config = GenerationConfig(max_new_tokens=10_000_000, fixed_length=True)
    with served(config=config, limit=None, max_concurrent=2) as (endpoint, sampler):
        waiting = [connected(endpoint) for _ in range(2)]
        for one in waiting:
            one.sendall(request_head(len(X)) + X)
        until(lambda: len(sampler.active) == 2)
        out = post(endpoint, CHAT, X)
        assert (out.status_code, out.json()["error"]["code"]) == (429, "too_many_requests")
        assert httpx2.get(f"{endpoint.url}/health").status_code == 200
        for one in waiting:
            one.close()
        until(lambda: not sampler.active)


def test_a_client_that_disconnects_cancels_its_request_and_captures_nothing():
    config = GenerationConfig(max_new_tokens=10_000_000, fixed_length=True)
    with served(config=config, limit=None) as (endpoint, sampler):
        session = opened(endpoint)
        body = json.dumps({"messages": HELLO, "n": 3}).encode()
        head = request_head(len(body)).replace(KEY.encode(), session.key.encode())
        with connected(endpoint) as leaving:
            leaving.sendall(head + body)
            until(lambda: session.started == 1 and len(sampler.active) == 3)
        until(lambda: not sampler.active)
        assert len(session.capture) == 0


def test_a_sampler_that_fails_is_a_server_error_and_the_error_is_kept():
    sampler = TableSampler(letters())
    with served(sampler) as (endpoint, _):
        session = opened(endpoint)
        sampler.close()
        with client_of(endpoint, session) as client, pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="tiny", messages=HELLO)
        assert "the table is closed" in str(session.error)


def test_concurrent_sessions_lose_and_duplicate_no_token_and_their_log_probs_equal_rescored_ones():
    engine = tiny_engine()
    config = GenerationConfig(max_new_tokens=5)
    with served(StreamingEngine("actor", tiny_engine()), config) as (endpoint, _):
        sessions = [opened(endpoint, f"p{i}/0", seed=1) for i in range(50)]
        received: dict[str, list[list[int]]] = {session.name: [] for session in sessions}

        async def converse(shared: AsyncOpenAI, session: Session) -> None:
            client = shared.with_options(base_url=endpoint.base_url(session), api_key=session.key)
            messages = [{"role": "user", "content": f"hello{session.name.split('/')[0]}"}]
            for turn in range(3):
                out = await client.chat.completions.create(
                    model="tiny", messages=messages, extra_body={"return_token_ids": True}
                )
                (choice,) = out.choices
                received[session.name].append(choice.token_ids)
                messages += [{"role": "assistant", "content": choice.message.content}]
                messages += [{"role": "user", "content": f"go{turn}"}]

        async def all_of_them() -> None:
            limits = httpx2.Limits(max_connections=50)
            async with AsyncOpenAI(
                base_url="http://x",
                api_key="x",
                max_retries=0,
                timeout=300,
                http_client=openai.DefaultAsyncHttpxClient(limits=limits),
            ) as shared:
                await asyncio.gather(*(converse(shared, session) for session in sessions))

        asyncio.run(all_of_them())
        for session in sessions:
            endpoint.sessions.close(session)
    sequences_of = [session.capture.sequences() for session in sessions]
    for session, sequences in zip(sessions, sequences_of, strict=True):
        captured = [token for s in sequences for token in s.ids[s.sampled].tolist()]
        sent = [token for response in received[session.name] for token in response]
        assert captured == sent, session.name
        assert sum(s.calls for s in sequences) == 3
    sample = SequenceSample.from_sequences(
        [s.name for s in sessions], {"input_ids": [[s.ids for s in sequences] for sequences in sequences_of]}
    )
    again = engine.forward(
        sample, MicroBatchSpec(max_tokens_per_microbatch=2000), lambda out, mb: mb.with_tokens(again=out.logprobs())
    )["again"]
    flat = [s for sequences in sequences_of for s in sequences]
    sampled_T, logprobs_T = torch.cat([s.sampled for s in flat]), torch.cat([s.logprobs for s in flat])
    assert int(sampled_T.sum()) == sum(len(r) for responses in received.values() for r in responses)
    assert (again - logprobs_T)[sampled_T].abs().max() < 1e-4
