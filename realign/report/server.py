"""The viewer of `realign view`: serves the report page and the records of the runs in a folder. Needs extra `view`."""

from __future__ import annotations

import hashlib
import importlib
import ipaddress
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from realign.errors import ConfigError
from realign.report.data import run_data, run_line, status
from realign.report.files import find_runs, run_info, signature, summary
from realign.report.page import policy, report_page
from realign.settings import Range, Settings

HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass
class ViewOptions(Settings):
    """Address of the viewer."""

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


def application(root: Path, options: ViewOptions) -> Any:
    """Return the Starlette application for the runs in `root`. It only reads, and only folders of runs.

    On a loopback address it accepts only requests for this address, so that no web page can reach it by another name.

    Raises:
        ConfigError: Starlette is not installed.
    """
    routing = _extra("starlette.routing")
    responses = _extra("starlette.responses")
    middleware = []
    # A web page could let its own name point to this machine, and then read the answers as its own (DNS rebinding).
    if options.is_loopback:
        trusted = _extra("starlette.middleware.trustedhost").TrustedHostMiddleware
        allowed = [*LOOPBACK, options.host]
        middleware = [_extra("starlette.middleware").Middleware(trusted, allowed_hosts=allowed, www_redirect=False)]

    def page(request: Any) -> Any:
        headers = {**HEADERS, "Content-Security-Policy": policy(live=True)}
        return responses.HTMLResponse(report_page([], "realign view", live=True), headers=headers)

    def runs(request: Any) -> Any:
        return answer([_line(folder, key) for key, folder in _runs(root).items()], HEADERS)

    def answer(content: Any, headers: dict[str, str]) -> Any:
        text = json.dumps(content, ensure_ascii=False, default=str)
        return responses.Response(text.encode(errors="replace"), media_type="application/json", headers=headers)

    def run(request: Any) -> Any:
        key = request.query_params.get("key", "")
        # Looked up among the runs, and never joined to a path, so that no key leads out of the folder.
        folder = _runs(root).get(key)
        if folder is None:
            return responses.JSONResponse({"error": "unknown run"}, status_code=404, headers=HEADERS)
        tag = _tag(folder)
        headers = {**HEADERS, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return responses.Response(status_code=304, headers=headers)
        return answer(run_data(folder, key), headers)

    routes = [routing.Route(path, endpoint) for path, endpoint in (("/", page), ("/api/runs", runs), ("/api/run", run))]
    return _extra("starlette.applications").Starlette(routes=routes, middleware=middleware)


def _line(folder: Path, key: str) -> dict[str, Any]:
    """Return the entry of a run in the list. A run that cannot be read does not remove the others."""
    try:
        return run_line(folder, key)
    except Exception as error:  # whatever the files of one folder cause
        state = {"state": "unreadable", "reason": type(error).__name__}
        empty: dict[str, Any] = {"step": 0, "steps": None, "seconds": None, "started": "", "metric": None, "curve": []}
        return {"key": key, "name": folder.name, "status": state, **empty}


def _tag(folder: Path) -> str:
    """Return the ETag of a run, which changes with its records and its status."""
    # The status belongs to it: a run that is killed changes none of its files.
    state = status(folder, run_info(folder), summary(folder))
    return f'"{hashlib.sha256(f"{signature(folder)}|{state}".encode()).hexdigest()[:32]}"'


def serve(root: Path, options: ViewOptions, say: Callable[[str], None]) -> None:
    """Serve the viewer until Ctrl-C.

    Raises:
        ConfigError: the extra is not installed, the folder does not exist, or the address cannot be used.
    """
    if not root.is_dir():
        raise ConfigError(f"{str(root)!r}: this folder does not exist. Name a folder with runs, such as runs/.")
    uvicorn, app = _extra("uvicorn"), application(root, options)
    config = uvicorn.Config(
        # browsers keep connections open, for which uvicorn would wait after Ctrl-C
        app,
        host=options.host,
        port=options.port,
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    try:
        # Bound before the server starts, so that the line below can name the port that 0 selects.
        listening = config.bind_socket()
    except SystemExit as error:  # uvicorn exits instead of raising
        where = f"view.host={options.host} view.port={options.port}"
        raise ConfigError(f"{where}: the address cannot be used. Choose another port.") from error
    host = f"[{options.host}]" if ":" in options.host else options.host
    say(f"http://{host}:{listening.getsockname()[1]}   runs in {root} (Ctrl-C stops the viewer)")
    if not options.is_loopback:
        say("The viewer has no password: everyone who can reach this address can read the runs.")
    uvicorn.Server(config).run(sockets=[listening])


def _runs(root: Path) -> dict[str, Path]:
    """Return the folders of runs by their path below `root`."""
    return {
        (folder.relative_to(root).as_posix() if folder != root else root.absolute().name): folder
        for folder in find_runs(root)
    }


def _extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"realign view needs {error.name}. Run pip install 'realign-rl[view]'.") from error


__all__ = ["ViewOptions", "application", "serve"]
