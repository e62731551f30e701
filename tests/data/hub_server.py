"""A server on loopback with the parts of the Hugging Face hub that `datasets` reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from tests.processes import served

NAME = "org/name"


class HubServer(ThreadingHTTPServer):
    """Server of one dataset.

    Attributes:
        files: Content of each file by its path.
        fails: Status that the server returns for every request; 0 for none.
        requests: Method and path of each request.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.fails, self.requests = files, 0, []
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def sha(self) -> str:
        """Commit of the files."""
        content = [(path, hashlib.sha1(data).hexdigest()) for path, data in sorted(self.files.items())]
        return hashlib.sha1(json.dumps(content).encode()).hexdigest()


@contextmanager
def hub(files: dict[str, bytes]) -> Iterator[HubServer]:
    """Serve a dataset `org/name` with these files."""
    server = HubServer(files)
    with served(server):
        yield server


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the body waits 40 ms for the client to confirm the header

    def do_GET(self) -> None:
        """Answer a request."""
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path))
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        if hub.fails:
            return self._send(hub.fails, b"{}")
        api = f"/api/datasets/{NAME}"
        if path.startswith(f"/datasets/{NAME}/resolve/"):
            return self._file("/".join(path.split("/")[6:]))
        if path == api or path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name} for name in hub.files]
            return self._json({"id": NAME, "sha": hub.sha, "siblings": siblings, "private": False, "tags": []})
        if path.startswith(f"{api}/tree/"):
            folder = "/".join(path.split("/")[7:])
            return self._json(self._entries(folder, "recursive=true" in self.path.lower()))
        if path.startswith(f"{api}/paths-info/"):
            return self._json(self._infos(body.decode()))
        self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_POST = do_GET

    def log_message(self, *args: object) -> None:
        """Print nothing."""

    def _entry(self, name: str) -> dict[str, object]:
        data = self.server.files[name]
        return {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name}

    def _entries(self, folder: str, recursive: bool) -> list[dict[str, object]]:
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, object]] = {}
        for name in self.server.files:
            if name.startswith(prefix):
                parts = name[len(prefix) :].split("/")
                for depth in range(1, len(parts)):
                    path = prefix + "/".join(parts[:depth])
                    entries.setdefault(path, {"type": "directory", "oid": "0" * 40, "size": 0, "path": path})
                entries[name] = self._entry(name)
        return [one for path, one in entries.items() if recursive or "/" not in path[len(prefix) :]]

    def _infos(self, body: str) -> list[dict[str, object]]:
        from urllib.parse import parse_qs

        paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
        everything = {str(one["path"]): one for one in self._entries("", recursive=True)}
        return [everything[path] for path in paths if path in everything]

    def _file(self, name: str) -> None:
        if name not in self.server.files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = self.server.files[name]
        headers = {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": self.server.sha,
            "Accept-Ranges": "bytes",
        }
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first or 0), min(int(last or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
            return self._send(206, data[begin : end + 1], headers)
        return self._send(200, data, headers)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
