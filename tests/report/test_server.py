"""Test the viewer's server: what it serves, and what it refuses. Needs the extra `view`."""

from __future__ import annotations

import json
import shutil

import pytest

from realign.errors import ConfigError, SettingsError
from realign.report.server import ViewOptions, application, serve

GET = {"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "root_path": ""}


async def ask(app, path: str, query: str = "", host: str = "127.0.0.1:8765", **headers: str) -> tuple[int, dict, bytes]:
    """Send a request to an ASGI application, and return status, headers and body of the answer."""
    sent: list[dict] = []
    pairs = [(b"host", host.encode()), *((k.replace("_", "-").encode(), v.encode()) for k, v in headers.items())]
    scope = {**GET, "path": path, "raw_path": path.encode(), "query_string": query.encode(), "headers": pairs}

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    await app(scope, receive, send)
    answered = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return sent[0]["status"], answered, b"".join(message.get("body", b"") for message in sent[1:])


def got(app, *args, **kwargs) -> tuple[int, dict, bytes]:
    import anyio

    async def one() -> tuple[int, dict, bytes]:
        return await ask(app, *args, **kwargs)

    return anyio.run(one)


@pytest.fixture
def app(run_folder):
    pytest.importorskip("starlette", reason="the extra view is not installed")
    return application(run_folder.parent, ViewOptions())


def test_the_page_has_a_policy_and_no_data(app):
    code, headers, body = got(app, "/")
    assert code == 200
    assert "connect-src 'self'" in headers["content-security-policy"]
    assert b'data-live="yes"' in body


def test_the_list_and_a_run_are_served_and_an_unchanged_run_is_not_sent_again(app, run_folder):
    listed = json.loads(got(app, "/api/runs")[2])
    assert [one["key"] for one in listed] == ["toy"]
    code, headers, body = got(app, "/api/run", "key=toy")
    assert code == 200
    assert json.loads(body)["metrics"]["step"] == [0, 1, 2, 3, 4]
    assert got(app, "/api/run", "key=toy", if_none_match=headers["etag"])[0] == 304


@pytest.mark.parametrize(
    "content", ['{"attempts": "x", "steps": 1e999}', "{", '{"name": "\\ud800", "headline": null}', "[]"]
)
def test_a_damaged_run_does_not_remove_the_others_from_the_list(content, run_folder, tmp_path):
    pytest.importorskip("starlette", reason="the extra view is not installed")
    shutil.copytree(run_folder, tmp_path / "toy")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text(content)
    app = application(tmp_path, ViewOptions())
    code, _, body = got(app, "/api/runs")
    assert (code, [one["key"] for one in json.loads(body)]) == (200, ["bad", "toy"])
    assert got(app, "/api/run", "key=bad")[0] == 200


def test_a_run_whose_files_cause_an_exception_is_listed_as_unreadable(app, monkeypatch):
    def fail(folder, key):
        raise ArithmeticError("what no schema foresees")

    monkeypatch.setattr("realign.report.server.run_line", fail)
    code, _, body = got(app, "/api/runs")
    assert code == 200
    assert json.loads(body)[0]["status"] == {"state": "unreadable", "reason": "ArithmeticError"}


@pytest.mark.parametrize("key", ["../toy", "/etc", "nope", "", "toy/../toy"])
def test_only_listed_runs_are_served(app, key):
    assert got(app, "/api/run", f"key={key}")[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example"])
def test_a_request_under_another_name_is_refused(app, host):
    assert got(app, "/api/runs", host=host)[0] == 400


def test_other_methods_and_paths_are_refused(app):
    assert got(app, "/run.json")[0] == 404


def test_the_default_address_is_the_loopback():
    assert ViewOptions().is_loopback
    assert ViewOptions(host="::1").is_loopback
    assert ViewOptions(host="localhost").is_loopback
    assert not ViewOptions(host="0.0.0.0").is_loopback
    assert not ViewOptions(host="example.org").is_loopback
    with pytest.raises(SettingsError, match="port"):
        ViewOptions(port=70000)


def test_a_missing_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match="nope"):
        serve(tmp_path / "nope", ViewOptions(), print)
