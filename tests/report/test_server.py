"""Test the viewer's server: what it serves, and what it refuses."""

from __future__ import annotations

import json
import shutil
import threading
from http.client import HTTPConnection

import pytest

from realign.errors import ConfigError, SettingsError
from realign.records.record_files import parse_object
from realign.report.server import Viewer, ViewOptions, ViewServer, serve


@pytest.fixture
def viewer(run_folder) -> Viewer:
    return Viewer(run_folder.parent, ViewOptions())


def got(viewer: Viewer, target: str, host: str = "127.0.0.1:8765", known: str = "") -> tuple[int, dict, bytes]:
    answer = viewer.answer(target, host, known)
    return int(answer.status), dict(answer.headers), answer.body


def test_the_page_has_a_policy_and_no_data(viewer):
    code, headers, body = got(viewer, "/")
    assert code == 200
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert b'data-live="yes"' in body


def test_the_list_and_a_run_are_served_and_an_unchanged_run_is_not_sent_again(viewer, run_folder):
    listed = json.loads(got(viewer, "/api/runs")[2])
    assert [one["key"] for one in listed] == ["toy"]
    code, headers, body = got(viewer, "/api/run?key=toy")
    assert code == 200
    assert json.loads(body)["metrics"]["step"] == [0, 1, 2, 3, 4]
    assert got(viewer, "/api/run?key=toy", known=headers["ETag"])[0] == 304


@pytest.mark.parametrize(
    "content", ['{"attempts": "x", "steps": 1e999}', "{", '{"name": "\\ud800", "headline": null}', "[]"]
)
def test_a_damaged_run_does_not_remove_the_others_from_the_list(content, run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / "toy")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text(content)
    viewer = Viewer(tmp_path, ViewOptions())
    code, _, body = got(viewer, "/api/runs")
    assert (code, [one["key"] for one in json.loads(body)]) == (200, ["bad", "toy"])
    assert got(viewer, "/api/run?key=bad")[0] == 200


def step_line(step: int) -> str:
    return json.dumps({"step": step, "loss": step / 2}) + "\n"


def test_only_what_was_appended_is_read_again(tmp_path, monkeypatch):
    """A run of 118 MB is listed every few seconds while it trains."""
    read = []
    monkeypatch.setattr("realign.report.data.parse_object", lambda line: read.append(line) or parse_object(line))
    folder, viewer = tmp_path / "toy", Viewer(tmp_path, ViewOptions())
    folder.mkdir()
    file = folder / "metrics.jsonl"

    def steps_and_lines_read() -> tuple[list[int], int]:
        read.clear()
        listed = json.loads(got(viewer, "/api/runs")[2])
        shown = json.loads(got(viewer, "/api/run?key=toy")[2])["metrics"]
        assert [listed[0]["step"], listed[0]["curve"]] == [shown["step"][-1], shown["values"]["loss"]]
        assert shown["values"]["loss"] == [step / 2 for step in shown["step"]]
        return shown["step"], len(read)

    file.write_text("".join(map(step_line, range(4))))
    assert steps_and_lines_read() == ([0, 1, 2, 3], 4)
    assert steps_and_lines_read() == ([0, 1, 2, 3], 0)
    with file.open("a") as end:
        end.write(step_line(4) + step_line(5)[:9])  # the last line is still being written
    assert steps_and_lines_read() == ([0, 1, 2, 3, 4], 1)
    with file.open("a") as end:
        end.write(step_line(5)[9:])
    assert steps_and_lines_read() == ([0, 1, 2, 3, 4, 5], 1)
    file.write_text("".join(map(step_line, (0, 1, 2, 30, 40, 50, 60))))  # a resumed run took steps again
    assert steps_and_lines_read() == ([0, 1, 2, 30, 40, 50, 60], 7)
    file.write_text(step_line(7))
    assert steps_and_lines_read() == ([7], 1)


@pytest.mark.parametrize("key", ["../toy", "/etc", "nope", "", "toy/../toy"])
def test_only_listed_runs_are_served(viewer, key):
    assert got(viewer, f"/api/run?key={key}")[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example"])
def test_a_request_under_another_name_is_refused(viewer, host):
    assert got(viewer, "/api/runs", host=host)[0] == 400


def test_the_default_address_is_the_loopback():
    assert ViewOptions().is_loopback
    assert ViewOptions(host="::1").is_loopback
    assert ViewOptions(host="localhost").is_loopback
    assert not ViewOptions(host="0.0.0.0").is_loopback
    assert not ViewOptions(host="example.org").is_loopback
    with pytest.raises(SettingsError, match="port"):
        ViewOptions(port=70000)


def test_the_server_answers_over_http_with_the_headers_of_the_viewer(viewer):
    viewer.options.port = 0
    with ViewServer(viewer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
        try:
            for path, code in (("/api/runs", 200), ("/nope", 404), ("/", 200)):  # on one connection
                connection.request("GET", path)
                answer = connection.getresponse()
                assert answer.read() or code == 404
                assert (answer.status, answer.headers["X-Content-Type-Options"]) == (code, "nosniff")
            connection.request("POST", "/api/runs")
            assert connection.getresponse().status == 501
        finally:
            connection.close()
            server.shutdown()


def test_a_run_that_cannot_be_read_is_an_answer_and_leaves_the_connection(viewer, monkeypatch, capsys):
    def fail(folder, key, samples_mb, metrics):
        raise ArithmeticError("what no schema foresees")

    monkeypatch.setattr("realign.report.server.run_data", fail)
    viewer.options.port = 0
    with ViewServer(viewer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
        try:
            for path, code in (("/api/run?key=toy", 500), ("/api/runs", 200)):
                connection.request("GET", path)
                answer = connection.getresponse()
                answer.read()
                assert answer.status == code
        finally:
            connection.close()
            server.shutdown()
    assert "what no schema foresees" in capsys.readouterr().err


def test_an_address_that_is_in_use_is_an_error_that_names_the_port(viewer, tmp_path):
    viewer.options.port = 0
    with ViewServer(viewer) as server, pytest.raises(ConfigError, match=r"view\.port=\d+: the address cannot be used"):
        serve(tmp_path, ViewOptions(port=server.server_address[1]), print)
