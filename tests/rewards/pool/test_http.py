import json
import logging
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from realign.api import MicroBatchSpec, Model
from realign.errors import ConfigError, TransientError
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.rewards import FailureKind, RewardPool, load_function
from realign.rewards.pool import http
from realign.rewards.pool.http import HttpReward, Unreachable
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

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/score", got
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


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


def test_no_verdict_is_none():
    with server(lambda request: (200, {"reward": None})) as (url, _):
        assert load_function(url)("", "", {}) is None


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


@pytest.mark.parametrize("name", ["ftp://host/x", "http://", "http:///path", "file:///etc/passwd"])
def test_what_is_no_http_url_is_refused(name):
    with pytest.raises(ConfigError, match=r"invalid URL\. Use the form http://host:port/path"):
        load_function(name)


def test_trap_c12_a_failing_request_leaves_its_response_without_reward_and_the_others_alone():
    def answer(request):
        return (500, b"") if request["response"] == "b" else (200, {"reward": len(request["row"])})

    with server(answer) as (url, _):
        pool = RewardPool(url, workers=2, timeout_s=20, memory_mb=None, max_failed_fraction=0.5)
        with pool:
            found = pool.score(["", "", ""], ["a", "b", "c"], [{}, {}, {"x": 1}])
    assert found.values == [0.0, None, 1.0]
    assert [(f.index, "status 500" in f.message) for f in found.failures] == [(1, True)]


def test_a_server_that_is_not_there_is_said_before_anything_is_asked():
    with server(lambda request: (200, {})) as (url, got):
        RuleRewardInterface(function=url).open()
        assert got == []
    with pytest.raises(TransientError, match=r"reward function 'http://127.*/score': no server .*\(.*refused\)"):
        RuleRewardInterface(function=url).open()


def test_behind_a_proxy_only_the_proxy_knows(monkeypatch):
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:1")
    load_function("http://nowhere.invalid/score").reach()


def test_a_url_stands_where_a_function_does():
    with server(lambda request: (200, {"reward": len(request["response"])})) as (url, _):
        interface = RuleRewardInterface(function=url, workers=0)
        data = random_sample([[5, 3], [4]]).with_metadata(row=[{}, {}])
        out = interface.inference(Model("reward", None, tiny_tokenizer()), data, MicroBatchSpec())
        interface.close()
    texts = [tiny_tokenizer().decode(ids[2:], skip_special_tokens=True) for ids in data.sequences("input_ids")]
    assert torch.equal(out["rewards"], torch.tensor([float(len(t)) for t in texts]))


def ask(url, responses, **settings):
    """Score responses in this process, with a short timeout per response."""
    defaults = {"workers": 0, "timeout_s": 0.2, "memory_mb": None, "max_failed_fraction": 0.5, "patience_s": 20.0}
    with RewardPool(url, **(defaults | settings)) as pool:
        return pool.score([""] * len(responses), responses, [{}] * len(responses))


def test_a_server_that_restarts_costs_no_reward(caplog):
    """The server is unavailable for longer than the timeout of a response."""
    down = iter([200, 200] + 60 * [503])

    def answer(request):
        return next(down, 200), {"reward": float(request["response"])}

    with caplog.at_level(logging.WARNING), server(answer) as (url, got):
        found = ask(url, [str(i) for i in range(6)])
    assert found.values == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert found.failures == []
    assert len(got) == 66
    assert caplog.text.count("Unanswered items are retried for up to patience_s=20 s") == 1


def test_a_server_that_dies_in_the_middle_stops_the_run_when_patience_is_over():
    with server(lambda request: (200, {"reward": 1})) as (url, got):
        pool = RewardPool(url, workers=2, timeout_s=1.0, patience_s=1.5, memory_mb=None, max_failed_fraction=0.5)
        with pool:
            assert pool.score(["", ""], ["a", "b"], [{}, {}]).values == [1.0, 1.0]
    with pool, pytest.raises(TransientError) as caught:
        pool.score([""] * 40, ["a"] * 40, [{}] * 40)
    assert "failed on 21 of 21 scored items (unreachable 21; 40 items in total)" in str(caught.value)
    assert "Connection refused" in str(caught.value)
    assert "no answer for patience_s=1.5 s" in str(caught.value)
    assert len(got) == 2


def test_a_response_that_alone_gets_no_answer_fails_alone_when_patience_is_over():
    def answer(request):
        return (502, b"") if request["response"] == "b" else (200, {"reward": 1})

    with server(answer) as (url, _):
        found = ask(url, ["a", "b", "c", "d"], patience_s=0.3)
    assert found.values == [1.0, None, 1.0, 1.0]
    assert [(f.index, f.kind, "502" in f.message) for f in found.failures] == [(1, FailureKind.unreachable, True)]


def test_a_server_that_accepts_and_stays_silent_is_no_answer():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/score"
        with pytest.raises(TransientError, match=r"unreachable 3.* gave no answer within 0\.09 s: TimeoutError"):
            ask(url, ["a"] * 5, timeout_s=0.1, patience_s=0.0)


def test_a_server_that_hangs_up_is_no_answer(monkeypatch):
    monkeypatch.setattr(http, "_FIRST_PAUSE_S", 100.0)  # the pause leaves no time for a second attempt
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(10)
        host = threading.Thread(target=lambda: door.accept()[0].close())
        host.start()
        url = f"http://127.0.0.1:{door.getsockname()[1]}/score"
        with pytest.raises(Unreachable, match="gave no answer within 20 s: "):
            HttpReward(url, within_s=20)("", "", {})
        host.join()
