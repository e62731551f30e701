"""The viewer of `realign view`: serves the report page and the records of the runs in a folder."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import socket
import socketserver
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs

from typing_extensions import override

from realign.errors import ConfigError
from realign.records.record_files import METRICS
from realign.report.data import Metrics, ReportOptions, run_data, run_line, status
from realign.report.files import find_runs, run_info, signature, summary
from realign.report.page import policy, report_page
from realign.settings import Range

_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass
class ViewOptions(ReportOptions):
    """Address of the viewer, and size of its pages."""

    host: str = "127.0.0.1"
    """Address to listen on. The default is reachable from this machine only; the viewer has no password."""
    port: Annotated[int, Range(ge=0, le=65535)] = 8765
    """Port to listen on; 0 selects a free one."""

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can reach the viewer."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True)
class Answer:
    """An answer of the viewer."""

    status: HTTPStatus
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class Viewer:
    """Answers the requests for the runs in `root`. It only reads, and only folders of runs."""

    def __init__(self, root: Path, options: ViewOptions) -> None:
        self.root, self.options = root, options
        self._metrics: dict[Path, Metrics] = {}
        self._lines: dict[str, tuple[str, dict[str, Any]]] = {}  # signature and line of each run

    def answer(self, target: str, host: str, known: str = "") -> Answer:
        """Return the answer to a GET request.

        On a loopback address only requests for this address are accepted, so that no web page can reach it by another
        name: a page could let its own name point to this machine, and then read the answers as its own (DNS rebinding).

        Args:
            target: path and query of the request.
            host: its header `Host`.
            known: its header `If-None-Match`.
        """
        if self.options.is_loopback and re.sub(r":\d+$", "", host) not in {*LOOPBACK, self.options.host}:
            return Answer(HTTPStatus.BAD_REQUEST, b"unknown host", {"Content-Type": "text/plain"})
        path, _, query = target.partition("?")
        if path == "/":
            page = report_page([], "realign view", live=True).encode()
            kind = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy(live=True)}
            return Answer(HTTPStatus.OK, page, kind)
        if path == "/api/runs":
            return _json([self._line(folder, key) for key, folder in _runs(self.root).items()])
        if path == "/api/run":
            return self._run(parse_qs(query).get("key", [""])[0], known)
        return Answer(HTTPStatus.NOT_FOUND)

    def _run(self, key: str, known: str) -> Answer:
        # Looked up among the runs, and never joined to a path, so that no key leads out of the folder.
        folder = _runs(self.root).get(key)
        if folder is None:
            return Answer(HTTPStatus.NOT_FOUND, b'{"error": "unknown run"}', {"Content-Type": "application/json"})
        tag = _tag(folder)
        if known == tag:
            return Answer(HTTPStatus.NOT_MODIFIED, headers={"ETag": tag})
        return _json(run_data(folder, key, self.options.samples_mb, self._metrics_of(folder)), ETag=tag)

    def _metrics_of(self, folder: Path) -> Metrics:
        return self._metrics.setdefault(folder, Metrics(folder / METRICS))

    def _line(self, folder: Path, key: str) -> dict[str, Any]:
        """Return the entry of a run in the list. A run that cannot be read does not remove the others."""
        try:
            tag = _tag(folder)
            if self._lines.get(key, ("", {}))[0] != tag:
                self._lines[key] = (tag, run_line(folder, key, self._metrics_of(folder)))
            return self._lines[key][1]
        except Exception as error:  # whatever the files of one folder cause
            state = {"state": "unreadable", "reason": type(error).__name__}
            empty: dict[str, Any] = {"step": 0, "steps": None, "seconds": None, "started": "", "metric": None}
            empty |= {"folder": str(folder.absolute()), "id": "", "parent": {}, "last": {}, "config": {}, "wrong": ""}
            return {"key": key, "name": folder.name, "status": state, "curve": [], **empty}


def _json(content: Any, **headers: str) -> Answer:
    text = json.dumps(content, ensure_ascii=False, default=str)
    return Answer(HTTPStatus.OK, text.encode(errors="replace"), {"Content-Type": "application/json", **headers})


class _Handler(BaseHTTPRequestHandler):
    """Passes requests of one connection to the viewer."""

    protocol_version = "HTTP/1.1"
    timeout = 60  # of an idle connection, in seconds
    viewer: Viewer

    def do_GET(self) -> None:  # the name that http.server calls
        try:
            answer = self.viewer.answer(self.path, self.headers.get("Host", ""), self.headers.get("If-None-Match", ""))
        except Exception:  # whatever the files of one run cause; the page then leaves out this run only
            traceback.print_exc()
            answer = Answer(HTTPStatus.INTERNAL_SERVER_ERROR)
        self.send_response(answer.status)
        for name, value in {**_HEADERS, **answer.headers, "Content-Length": str(len(answer.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)

    @override
    def version_string(self) -> str:
        return "realign"

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal shows the address only."""


class ViewServer(ThreadingHTTPServer):
    """The HTTP server of the viewer, with a thread per connection. Binds when it is created."""

    def __init__(self, viewer: Viewer) -> None:
        host, port = viewer.options.host, viewer.options.port
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), type("Handler", (_Handler,), {"viewer": viewer}))

    @override
    def server_bind(self) -> None:
        # without the lookup of the machine's name, which can take seconds
        socketserver.TCPServer.server_bind(self)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that a browser closed, and show every other error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def _tag(folder: Path) -> str:
    """Return the ETag of a run, which changes with its records and its status."""
    # The status belongs to it: a run that is killed changes none of its files.
    state = status(folder, run_info(folder), summary(folder))
    return f'"{hashlib.sha256(f"{signature(folder)}|{state}".encode()).hexdigest()[:32]}"'


def serve(root: Path, options: ViewOptions, say: Callable[[str], None]) -> None:
    """Serve the viewer until Ctrl-C.

    Raises:
        ConfigError: the folder does not exist, or the address cannot be used.
    """
    if not root.is_dir():
        raise ConfigError(f"{str(root)!r}: this folder does not exist. Name a folder with runs, such as runs/.")
    try:
        server = ViewServer(Viewer(root, options))
    except OSError as error:
        where = f"view.host={options.host} view.port={options.port}"
        raise ConfigError(f"{where}: the address cannot be used ({error}). Choose another port.") from error
    host = f"[{options.host}]" if ":" in options.host else options.host
    say(f"http://{host}:{server.server_address[1]}   runs in {root} (Ctrl-C stops the viewer)")
    if not options.is_loopback:
        say("The viewer has no password: everyone who can reach this address can read the runs.")
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()


def _runs(root: Path) -> dict[str, Path]:
    """Return the folders of runs by their path below `root`."""
    return {
        (folder.relative_to(root).as_posix() if folder != root else root.absolute().name): folder
        for folder in find_runs(root)
    }


__all__ = ["Answer", "ViewOptions", "ViewServer", "Viewer", "serve"]
