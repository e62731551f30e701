"""The LLM judge, against a small server with the OpenAI protocol. The client tests need the extra `judge`."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import pickle
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from realign.errors import ConfigError, TransientError
from realign.rewards import FailureKind, RewardPool
from realign.rewards.judge import Judge, Number, Pattern, Structured
from realign.rewards.pool.http import Unreachable
from tests.bad_answers import BAD, answered, bad_server
from tests.processes import served

client = pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs the package openai (extra judge)")
KEY = "s3cret-key"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("REALIGN_URL_VARIABLES", raising=False)


class Server:
    """What a judge server received, and how it answers."""

    def __init__(self, answer):
        self.answer = answer
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.running = self.most = 0
        self.lock = threading.Lock()
        self.url = ""


@contextmanager
def server(answer):
    """Serve chat completions: `answer(request, number)` returns a text, or a status with a body."""
    state = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # otherwise the body waits 40 ms for the client to confirm the header

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.requests.append(request)
                state.headers.append({name.lower(): value for name, value in self.headers.items()})
                number = len(state.requests)
                state.running += 1
                state.most = max(state.most, state.running)
            said = state.answer(request, number)
            with state.lock:
                state.running -= 1
            status, body, headers = 200, said, {}
            if isinstance(said, tuple):
                status, body, headers = (*said, {})[:3]
            elif isinstance(said, str):
                message = {"role": "assistant", "content": said}
                body = {
                    "id": "x",
                    "object": "chat.completion",
                    "created": 0,
                    "model": request["model"],
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                }
            content = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", "Content-Length": len(content), **headers}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        state.url = f"{url}/v1"
        yield state


def ask(judge: Judge, responses, workers=0, row=None, **settings):
    defaults = {"memory_mb": None, "max_failed_fraction": 1.0, "patience_s": 0.0}
    pool = RewardPool(
        judge.load(),
        workers=workers,
        timeout_s=judge.deadline_s(30.0),
        keep_environment=judge.variables,
        concurrency=judge.concurrency,
        **(defaults | settings),
    )
    with pool:
        return pool.score(["2+2="] * len(responses), responses, [row or {}] * len(responses))


def length(request, number):
    """Score the length of the response, which follows "Answer:" in the template."""
    return str(len(request["messages"][-1]["content"].partition("<")[2].partition(">")[0]))


TEMPLATE = "{prompt} <{response}>"


@pytest.mark.parametrize(
    ("score", "answer", "reward"),
    [
        (Number(), "7", 0.7),
        (Number(), "First 3, but then 8.5.", 0.85),
        (Number(low=-1, high=1), "-0.5", 0.25),
        (Number(low=1, high=5), "Score: 5", 1.0),
        (Pattern(), "Score: 2\nScore: 4 of 10", 0.4),
        (Pattern(pattern=r"<s>(\d+)</s>", high=4), "<s>1</s>", 0.25),
        (Structured(), '{"reason": "good", "score": 9}', 0.9),
    ],
)
def test_the_score_is_read_and_scaled_from_its_range(score, answer, reward):
    assert score.reward(answer) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("score", "answer", "message"),
    [
        (Number(), "good", "contains no score: 'good'"),
        (Number(), "", "contains no score"),
        (Number(), "11", r"the judge's score 11 is not in \[0, 10\]: '11'"),
        (Pattern(), "7", "contains no score"),
        (Structured(), "7", "contains no score"),
        (Structured(), '{"score": true}', "contains no score"),
        (Structured(), '{"score": "high"}', "contains no score"),
        (Structured(), "{", "contains no score"),
    ],
)
def test_an_answer_without_a_valid_score_is_a_failure(score, answer, message):
    with pytest.raises(ValueError, match=message):
        score.reward(answer)


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        (4.0, "4"),
        ("", ""),
        (["4", "four"], "['4', 'four']"),
        ({"text": "4"}, "{'text': '4'}"),
        (None, None),
        (float("nan"), None),
        ([], None),
    ],
)
def test_the_judge_reads_numbers_as_written_and_scores_nothing_without_a_value(cell, shown):
    for prompt, row in (("{gold}", {"gold": cell}), ("{a.gold}", {"a": {"gold": cell}})):
        request = Judge("m", prompt=prompt).request("p", "r", row)
        assert (request and request["messages"][0]["content"]) == shown


def test_the_key_is_named_and_goes_only_where_the_environment_allows(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="the environment variable OPENAI_API_KEY is not set"):
        Judge("m").load()
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert Judge("m").variables == ("OPENAI_API_KEY",)
    assert Judge("m").load() is not None
    local = Judge("m", base_url="http://localhost:8000/v1")
    assert (local.variables, local.api_key) == ((), "none")
    elsewhere = Judge("m", base_url="https://judge.example/v1", api_key_variable="OPENAI_API_KEY")
    with pytest.raises(ConfigError, match="Set REALIGN_URL_VARIABLES=OPENAI_API_KEY in the environment") as caught:
        elsewhere.load()
    assert KEY not in str(caught.value)
    monkeypatch.setenv("REALIGN_URL_VARIABLES", "OPENAI_API_KEY")
    assert pickle.loads(pickle.dumps(elsewhere.load())).judge == elsewhere
    assert KEY.encode() not in pickle.dumps(elsewhere.load())


@client
@pytest.mark.parametrize("workers", [0, 1])
def test_each_response_is_scored_by_the_server(workers):
    with server(length) as judge_server:
        judge = Judge("small", base_url=judge_server.url, prompt=TEMPLATE, options={"temperature": 0.5, "seed": 1})
        scores = ask(judge, ["a", "", "abc"], workers)
    assert scores.values == pytest.approx([0.1, 0.0, 0.3])
    assert {request["messages"][0]["content"] for request in judge_server.requests} == {
        "2+2= <a>",
        "2+2= <>",
        "2+2= <abc>",
    }
    request = judge_server.requests[0]
    assert (request["model"], request["temperature"], request["seed"]) == ("small", 0.5, 1)


@client
@pytest.mark.parametrize("workers", [0, 2])
def test_concurrency_bounds_the_requests_at_a_time(workers):
    barrier = threading.Event()

    def slow(request, number):
        barrier.wait(0.05)
        return "5"

    with server(slow) as judge_server:
        judge = Judge("m", base_url=judge_server.url, prompt=TEMPLATE, concurrency=4)
        scores = ask(judge, [str(i) for i in range(24)], workers)
    assert scores.values == [0.5] * 24
    assert 2 <= judge_server.most <= 4


@client
def test_a_busy_server_is_asked_again_and_a_refusal_is_not(monkeypatch):
    def busy_first(request, number):
        return (503, {"error": {"message": "busy"}}, {"Retry-After-Ms": "1"}) if number < 3 else "10"

    with server(busy_first) as judge_server:
        assert ask(Judge("m", base_url=judge_server.url, retries=2), ["a"]).values == [1.0]
        assert len(judge_server.requests) == 3
    with server(lambda request, number: (400, {"error": {"message": "no such model"}})) as judge_server:
        (failure,) = ask(Judge("m", base_url=judge_server.url, retries=2), ["a"]).failures
        assert len(judge_server.requests) == 1
    assert failure.kind is FailureKind.exception
    assert "status 400" in failure.message
    assert "no such model" in failure.message


@client
def test_a_server_that_ends_during_the_run_counts_as_unreachable():
    with server(lambda request, number: "5") as judge_server:
        pool = RewardPool(
            Judge("m", base_url=judge_server.url, retries=0).load(),
            **{"workers": 0, "memory_mb": None, "max_failed_fraction": 0.5, "patience_s": 0.0, "timeout_s": 30.0},
        )
    with pool, pytest.raises(TransientError, match=r"judge m at http://127.* failed on .*Connection error"):
        pool.score(["2+2="] * 4, ["a", "b", "c", "d"], [{}] * 4)


@client
def test_a_request_that_takes_too_long_ends():
    stop = threading.Event()

    def waits(request, number):
        stop.wait(20)
        return "5"

    with server(waits) as judge_server:
        scores = ask(Judge("m", base_url=judge_server.url, timeout_s=0.3, retries=0), ["a"])
        stop.set()
    assert scores.failures[0].kind in (FailureKind.unreachable, FailureKind.timeout)


@client
def test_a_dead_server_is_an_error_before_anything_is_asked():
    with server(lambda request, number: "5") as judge_server:
        url = judge_server.url
    with pytest.raises(TransientError, match=r"judge m at http://127.*: no server accepts connections \(.*refused\)"):
        ask(Judge("m", base_url=url), ["a"])


@client
def test_the_key_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setenv("REALIGN_URL_VARIABLES", "JUDGE_KEY")

    def repeats(request, number):
        return 401, {"error": {"message": f"the key {KEY} is unknown"}}

    with server(repeats) as judge_server:
        judge = Judge("m", base_url=judge_server.url, api_key_variable="JUDGE_KEY")
        (failure,) = ask(judge, ["a"], workers=1).failures
    assert judge_server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert "status 401" in failure.message
    assert "the key *** is unknown" in failure.message
    assert KEY not in failure.message + repr(judge)


@client
def test_a_redirect_is_not_followed():
    with server(length) as other:
        moved = (307, {}, {"Location": f"{other.url}/chat/completions"})
        with server(lambda request, number: moved) as judge_server:
            (failure,) = ask(Judge("m", base_url=judge_server.url, prompt=TEMPLATE), ["a"]).failures
        assert other.requests == []
    assert "status 307" in failure.message


@client
def test_equal_requests_are_sent_once_also_at_the_same_time():
    with server(length) as judge_server:
        judge = Judge("m", base_url=judge_server.url, prompt=TEMPLATE)
        assert ask(judge, ["ab"] * 20 + ["a"] * 20).values == pytest.approx([0.2] * 20 + [0.1] * 20)
        assert len(judge_server.requests) == 2


@client
def test_the_folder_of_answers_serves_other_runs_and_only_the_same_request(tmp_path):
    with server(length) as judge_server:
        settings = {"base_url": judge_server.url, "prompt": TEMPLATE, "cache_dir": str(tmp_path / "answers")}
        for _ in range(2):
            assert ask(Judge("m", **settings), ["abc", "a"], workers=1).values == pytest.approx([0.3, 0.1])
        assert len(judge_server.requests) == 2
        for number, changed in enumerate(
            (Judge("other", **settings), Judge("m", system="x", **settings), Judge("m", options={}, **settings)), 3
        ):
            assert ask(changed, ["abc"]).values == pytest.approx([0.3])
            assert len(judge_server.requests) == number
        for file in (tmp_path / "answers").rglob("*.json"):
            file.write_text("{")
        assert ask(Judge("m", **settings), ["abc"]).values == pytest.approx([0.3])
        assert len(judge_server.requests) == 6


def _completion(text):
    return answered(json.dumps({"choices": [{"message": {"content": text}}]}).encode())


@client
def test_no_answer_of_a_bad_server_gives_a_reward_or_a_traceback_of_the_client(monkeypatch):
    """The server answers each response in another wrong way, and those to `late` and `1e1` well."""
    monkeypatch.setattr("realign.rewards.pool.http.LARGEST_ANSWER", 2**21)
    good = {"late": lambda: [0.1, *_completion("7")], "1e1": lambda: _completion("1e1")}
    wrong = {
        "no choice": lambda: answered(b'{"choices": []}'),
        "no message": lambda: answered(b'{"choices": [null]}'),
        "no text": lambda: _completion(None),
        "1e2": lambda: _completion("1e2"),
        "NaN": lambda: _completion("NaN"),
    }
    answers = BAD | wrong | good

    def answer(request, number):
        return answers[request["messages"][0]["content"]]()

    silent = {
        *("nothing", "half a status", "half a header", "half a body", "half a chunk", "no chunk"),
        *("status 500", "status 503", "status 429, for a day", "endless headers", "an endless header", "silence"),
    }
    late = {"endlessly provisional", "a dripping body", "dripping headers"}

    async def asked(function, name):
        try:
            async with asyncio.timeout(6.0 if name in late else None):
                return await function("p", name, {})
        except Exception as error:
            return error

    async def all_asked():
        function = Judge("m", base_url=url, prompt="{response}", timeout_s=5.0, retries=0).load()
        return await asyncio.gather(*(asked(function, name) for name in answers))

    with bad_server(answer) as url:
        outcomes = dict(zip(answers, asyncio.run(all_asked()), strict=True))
    assert {name: value for name, value in outcomes.items() if isinstance(value, float)} == {"late": 0.7, "1e1": 1.0}
    assert {name for name, error in outcomes.items() if isinstance(error, Unreachable)} == silent
    assert {name for name, error in outcomes.items() if isinstance(error, TimeoutError)} == late
    messages = {name: str(error) for name, error in outcomes.items()}
    for name in {*BAD, "no choice", "no message", "no text"} - late:
        assert messages[name].startswith("judge m at http://127")
        assert len(messages[name].splitlines()) == 1
    assert all(isinstance(outcomes[name], ValueError) for name in ("1e2", "NaN"))
    assert "the answer has more than 2,097,152 bytes" in messages["an endless body"]
    assert "the answer is compressed" in messages["a compression bomb"]
    assert "answered '<html>busy</html>'; expected a chat completion with text" in messages["html"]
