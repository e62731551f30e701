import json
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from realign.api import MicroBatchSpec, Model
from realign.errors import ConfigError, TransientError
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.rewards import FailureKind, RewardPool, load_function
from realign.rewards.pool import http
from realign.rewards.pool import pool as pool_module
from realign.rewards.pool.http import HttpReward, OpenRlhfReward, Unreachable
from realign.rewards.pool.worker import Expected, Problem, RewardCall
from realign.rewards.pool.worker import answer as worker_answer
from realign.rewards.terms import FunctionTerm, Openrlhf
from realign.text import headline
from tests.bad_answers import BAD, answered, bad_server
from tests.processes import served
from tests.tiny import random_sample, tiny_tokenizer


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(http, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(http, "_LONGEST_PAUSE_S", 0.02)


@contextmanager
def server(answer):
    """Serve rewards: `answer(request)` returns a status and a body. Yields the URL and the list of requests."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = answer(got[-1])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def log_message(self, *args):
            pass

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield f"{url}/score", got


def test_prompt_response_and_row_are_posted_and_the_reward_comes_back():
    with server(lambda request: (200, {"reward": 2.5})) as (url, got):
        assert load_function(url)("2+2=", "4 ü", {"answer": 4, "file": Path("x")}) == 2.5
    assert got == [{"prompt": "2+2=", "response": "4 ü", "row": {"answer": 4, "file": "x"}}]


def test_dense_rewards_are_asked_for_with_the_tokens():
    with server(lambda request: (200, {"reward": [len(t) for t in request["tokens"]]})) as (url, _):
        interface = RuleRewardInterface(function=url, workers=0, dense=True)
        data = random_sample([[5]]).with_metadata(row=[{}])
        out = interface.inference(Model("reward", None, tiny_tokenizer()), data, MicroBatchSpec())
        interface.close()
    lengths = [len(tiny_tokenizer().decode([i])) for i in data["input_ids"][2:]]
    assert out["dense_rewards"].tolist() == [0, 0, *lengths]


def test_a_busy_server_is_asked_again_and_one_that_refuses_is_not():
    statuses = iter([503, 429, 200])
    with server(lambda request: (next(statuses), {"reward": 1})) as (url, got):
        assert load_function(url)("", "", {}) == 1
        assert len(got) == 3
    with server(lambda request: (403, b"no")) as (url, got):
        with pytest.raises(RuntimeError, match="status 403 Forbidden"):
            load_function(url)("", "", {})
        assert len(got) == 1
    with pytest.raises(Unreachable, match=r"score gave no answer within 0.1 s: .*[Rr]efused"):
        HttpReward(url, within_s=0.1)("", "", {})


@pytest.mark.parametrize("body", [b"<html>", b"[1]", {"score": 1}])
def test_another_answer_is_an_error_that_shows_it(body):
    shown = body if isinstance(body, bytes) else json.dumps(body).encode()
    with (
        server(lambda request: (200, body)) as (url, _),
        pytest.raises(RuntimeError) as caught,
    ):
        load_function(url)("", "", {})
    assert repr(shown) in str(caught.value)


def test_trap_c12_a_failing_request_leaves_its_response_without_reward_and_the_others_alone():
    def answer(request):
        return (500, b"") if request["response"] == "b" else (200, {"reward": len(request["row"])})

    with server(answer) as (url, _):
        pool = RewardPool(url, workers=2, timeout_s=20, memory_mb=None, max_failed_fraction=0.5)
        with pool:
            scores = pool.score(["", "", ""], ["a", "b", "c"], [{}, {}, {"x": 1}])
    assert scores.values == [0.0, None, 1.0]
    assert [(f.index, "status 500" in f.message) for f in scores.failures] == [(1, True)]


def ask(url, responses, **settings):
    """Score responses in this process, with a short timeout per response."""
    defaults = {"workers": 0, "timeout_s": 0.2, "memory_mb": None, "max_failed_fraction": 0.5, "patience_s": 20.0}
    with RewardPool(url, **(defaults | settings)) as pool:
        return pool.score([""] * len(responses), responses, [{}] * len(responses))


def test_a_server_that_restarts_costs_no_reward(caplog):
    """The server is unavailable for longer than the timeout of a response: until the pool says that it retries."""

    def answer(request):
        up = request["response"] in "01" or "are retried" in caplog.text
        return 200 if up else 503, {"reward": float(request["response"])}

    with caplog.at_level(logging.WARNING), server(answer) as (url, _):
        scores = ask(url, [str(i) for i in range(6)])
    assert scores.values == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert scores.failures == []
    assert caplog.text.count("Unanswered items are retried for up to patience_s=20 s") == 1


def test_a_server_that_dies_in_the_middle_stops_the_run_when_patience_is_over():
    with server(lambda request: (200, {"reward": 1})) as (url, _):
        pool = RewardPool(url, workers=2, timeout_s=1.0, patience_s=1.5, memory_mb=None, max_failed_fraction=0.5)
        with pool:
            assert pool.score(["", ""], ["a", "b"], [{}, {}]).values == [1.0, 1.0]
    with pool, pytest.raises(TransientError) as caught:
        pool.score([""] * 40, ["a"] * 40, [{}] * 40)
    assert "failed on 21 of 21 scored items (unreachable 21; 40 items in total)" in str(caught.value)
    assert "Connection refused" in str(caught.value)
    assert "no answer for patience_s=1.5 s" in str(caught.value)


def test_a_response_that_alone_gets_no_answer_fails_alone_when_patience_is_over(monkeypatch):
    """The patience is over when `b` is asked again, after the others got their answers."""
    asked = []
    monkeypatch.setattr(http, "_FIRST_PAUSE_S", 100.0)  # one attempt for each time that the pool asks
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: float(asked.count("b") > 1)))

    def answer(request):
        asked.append(request["response"])
        return (502, b"") if request["response"] == "b" else (200, {"reward": 1})

    with server(answer) as (url, _):
        scores = ask(url, ["a", "b", "c", "d"], timeout_s=20.0, patience_s=0.3)
    assert scores.values == [1.0, None, 1.0, 1.0]
    assert [(f.index, f.kind, "502" in f.message) for f in scores.failures] == [(1, FailureKind.unreachable, True)]


SECRET = "ju/dge s3cret"


@contextmanager
def raw_server(*answers):
    """A server that answers with these bytes, the last ones repeatedly; yields its URL and the received first lines."""
    got = []
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve():
            while True:
                try:
                    connection, _ = door.accept()
                except OSError:
                    return
                with connection, connection.makefile("rb") as request:
                    if not (first := request.readline()):
                        continue  # `HttpReward.reach` connects without a request
                    got.append(first.decode().strip())
                    headers = dict(line.split(b": ", 1) for line in iter(request.readline, b"\r\n"))
                    request.read(int(headers[b"Content-Length"]))
                    connection.sendall(answers[min(len(got), len(answers)) - 1])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{door.getsockname()[1]}", got
        finally:
            door.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("status", "scheme"),
    list(zip([300, 301, 302, 303, 304, 305, 307, 308, 399], ["http", "ftp", "file", "//", ""] * 2, strict=False)),
)
def test_no_redirect_is_followed_and_the_error_names_status_and_location(status, scheme):
    with server(lambda request: (200, {"reward": 7.0})) as (other, asked):
        place = {"http": other, "//": other.removeprefix("http:"), "": "/score"}.get(scheme, f"{scheme}:///etc/passwd")
        answer = f"HTTP/1.1 {status} Moved\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode()
        with raw_server(answer) as (url, got), pytest.raises(RuntimeError) as caught:
            load_function(url)("", "", {})
    assert f"status {status} Moved, a redirect to '{place}'. Redirects are not followed." in str(caught.value)
    assert asked == []
    assert len(got) == 1


def test_text_of_the_server_is_escaped_and_hides_credentials():
    place = b"http://user:pw@h/\x1b[2J?token=abc&n=5&\xe2\x80\xae"
    answer = b"HTTP/1.1 302 \x1b]0;t\x07\r\nLocation: " + place + b"\r\n\r\n"
    with raw_server(answer) as (url, _), pytest.raises(RuntimeError) as caught:
        load_function(url)("", "", {})
    message = str(caught.value)
    assert message.isprintable()
    assert "http://***@h/" in message
    assert "token=***&n=5" in message
    assert "pw" not in message.replace("***", "")


CREDENTIALS = [
    *("user:pw5@h/x", "user@h/x?pw5", "pw5@h/x", ":pw5@h/x", "user:p'pw5@h/x", "user:p pw5@h", "u:pw5@h:bad/"),
    *(
        "h/x?api_key=pw5",
        "h/x?a=1&access_token=pw5",
        "h/x?accessToken=pw5",
        "h/x?tok%65n=pw5",
        "h/x?X-Amz-Signature=pw5",
    ),
    *("h/x?a;secret=pw5", "h/x#password=pw5", "h/x?sig=pw5", "u:\x1bpw5@h/", "h/x?key=123456789pw5"),
]


@pytest.mark.parametrize("rest", CREDENTIALS)
@pytest.mark.parametrize("scheme", ["http", "https", "HTTP", "ftp"])
def test_credentials_in_a_url_are_refused_and_not_shown(rest, scheme):
    with pytest.raises(ConfigError) as caught:
        load_function(f"{scheme}://{rest}")
    assert "pw5" not in str(caught.value).replace("x?pw5", "")
    assert "pw5" not in repr(caught.value.__cause__)
    assert str(caught.value).isprintable()


def test_a_secret_of_the_environment_reaches_the_server_only_if_it_is_allowed_by_name(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    name = "score?token=${oc.env:JUDGE_TOKEN}"
    with pytest.raises(ConfigError, match="JUDGE_TOKEN looks like a secret") as caught:
        load_function(f"http://127.0.0.1:1/{name}")
    assert SECRET not in str(caught.value)
    monkeypatch.setenv("REALIGN_URL_VARIABLES", "OTHER, JUDGE_TOKEN")
    with raw_server(b"HTTP/1.1 404 no ju/dge s3cret\r\n\r\n") as (url, got):
        scores = ask(f"{url}/{name}", ["a"], workers=1, timeout_s=20.0, max_failed_fraction=1.0)
    assert got == ["POST /score?token=ju%2Fdge%20s3cret HTTP/1.1"]
    assert "status 404 no ***" in scores.failures[0].message
    function = load_function(f"http://127.0.0.1:1/{name}")
    for text in (repr(function), scores.failures[0].message):
        assert "s3cret" not in text
        assert "${oc.env:JUDGE_TOKEN}" in text


def test_an_openrlhf_server_gets_one_request_per_group_and_gives_one_reward_per_query():
    def answer(request):
        rewards = [float(len(text)) for text in request["query"]]
        return 200, {"rewards": rewards, "scores": [0.0] * len(rewards), "extra_logs": {"x": [1.0] * len(rewards)}}

    prompts, responses = ["p", "p", "q"], ["ab", "", "abc"]
    rows = [{"answer": 4}, {"answer": 4}, {"answer": 5}]
    with server(answer) as (url, got):
        settings = {"workers": 0, "timeout_s": 20.0, "memory_mb": None, "max_failed_fraction": 0.0}
        with RewardPool(OpenRlhfReward(url, label_column="answer"), **settings) as pool:
            assert pool.score(prompts, responses, rows, [0, 0, 1]).values == [3.0, 1.0, 4.0]
        with RewardPool(OpenRlhfReward(url), **settings) as pool:
            assert pool.score(["p"], ["a"], [{}]).values == [2.0]
    assert got == [
        {"query": ["pab", "p"], "prompts": ["p", "p"], "labels": [4, 4]},
        {"query": ["qabc"], "prompts": ["q"], "labels": [5]},
        {"query": ["pa"], "prompts": ["p"], "labels": [None]},
    ]


def test_the_protocol_is_a_setting_of_a_function_and_sends_special_tokens():
    with server(lambda request: (200, {"rewards": [1.0] * len(request["query"])})) as (url, got):
        functions = {
            "whole": FunctionTerm(url, protocol=Openrlhf()),
            "plain": FunctionTerm(url, protocol=Openrlhf(special_tokens=False), weight=0.5),
        }
        interface = RuleRewardInterface(functions=functions, workers=0)
        data = random_sample([[5, 3], [4]]).with_metadata(row=[{}, {}])
        ids = data["input_ids"].clone()
        ids[data.cu_seqlens()[1:].long() - 1] = tiny_tokenizer().eos_token_id
        data = data.with_tokens(input_ids=ids)
        out = interface.inference(Model("reward", None, tiny_tokenizer()), data, MicroBatchSpec())
        interface.close()
    assert out["rewards"].tolist() == [1.5] * 3
    end = tiny_tokenizer().eos_token
    assert [len(request["query"]) for request in got] == [2, 1, 2, 1]
    assert [all(text.endswith(end) for text in request["query"]) for request in got] == [True, True, False, False]


@pytest.mark.parametrize("kind", [HttpReward, OpenRlhfReward])
def test_no_answer_of_a_bad_server_gives_a_reward(monkeypatch, kind):
    """Each response gets another wrong answer. Headers that never end are for the deadline of the worker."""
    monkeypatch.setattr(http, "LARGEST_ANSWER", 2**21)
    monkeypatch.setattr(http, "_FIRST_PAUSE_S", 100.0)  # the pause leaves no time for a second attempt
    key = "reward" if kind is HttpReward else "rewards"
    values: dict[str, float | list[float] | None] = dict.fromkeys(
        ("NaN", "Infinity", "1e999", "-1e39", '"1"', "{}", "[[1]]", "1" + "0" * 400)
    )
    values |= {"true": 1.0, "0.5": 0.5, "late": 0.5} if kind is HttpReward else {"[0.5]": [0.5], "late": [0.5]}
    values |= {"[1, 2]": None, "[]": None}
    bad = BAD.keys() - {"endlessly provisional", "dripping headers"}

    def answered_with(request, number):
        name = request["response"] if kind is HttpReward else request["prompts"][0]
        if name in bad:
            return BAD[name]()
        shown = name if name != "late" else "0.5" if kind is HttpReward else "[0.5]"
        return [0.1 if name == "late" else 0.0, *answered(f'{{"{key}": {shown}}}'.encode())]

    def asked(name):
        arguments = ("p", name, {}) if kind is HttpReward else (name, ["r"], {})
        expected = Expected() if kind is HttpReward else Expected(1, "response", gaps=True)
        return worker_answer(kind(url, within_s=3.0), RewardCall(arguments, {}, expected))

    with bad_server(answered_with) as url, ThreadPoolExecutor(len(bad) + len(values)) as threads:
        answers = dict(zip([*bad, *values], threads.map(asked, [*bad, *values]), strict=True))
    problems = {name: answer for name, answer in answers.items() if isinstance(answer, Problem)}
    assert answers.keys() - problems.keys() == {name for name, value in values.items() if value is not None}
    assert all(answers[name] == value for name, value in values.items() if value is not None)
    assert {name for name, problem in problems.items() if problem.kind is FailureKind.unreachable} == {
        *("nothing", "half a status", "half a body", "half a chunk", "no chunk", "status 503", "status 429, for a day"),
        *("endless headers", "an endless header", "a dripping body", "silence"),
    }
    assert {name for name, problem in problems.items() if problem.kind is FailureKind.nonsense} == {
        name for name, value in values.items() if value is None
    }
    assert all("http://127.0.0.1" in headline(problems[name].message) for name in bad)
    assert "the answer has more than 2,097,152 bytes" in problems["an endless body"].message
