"""`RunInfo`: the file run.json, with the command, versions, device, git state and graph of a run, and its attempts.

A run has one attempt for each start of its command. A process that was killed leaves its attempt without an end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import socket
import subprocess
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from realign.api import DataflowGraph
from realign.api.callback import EndEvent
from realign.engines.distributed.ranks import command_words
from realign.runtime.metrics.shown_metrics import headline, panels
from realign.runtime.models import lead_role
from realign.runtime.step import LocalRuntime

NAME = "run.json"
PACKAGES = ("realign", "torch", "transformers", "numpy", "datasets", "ray", "peft", "flash-attn")
"""Packages whose versions are recorded."""
GIT_SECONDS = 2.0
"""Time limit of each git command."""


class RunInfo:
    """Writes run.json at the start and at the end of an attempt. A failed write is a warning.

    Args:
        folder: folder of the run.
        runtime: the loaded run.
        command: words of the command line; None for a run that was not started by a command.
        first: first step of this attempt.
        fresh: whether this is a new run, whose file replaces an earlier one.
    """

    def __init__(
        self, folder: Path, runtime: LocalRuntime, command: Sequence[str] | None, first: int, *, fresh: bool
    ) -> None:
        earlier = [] if fresh else attempts_in(folder)
        self._folder = folder
        self._attempt: dict[str, Any] = {
            "command": None if command is None else [*command_words(), *command],
            "started": _now(),
            "ended": None,
            "status": None,
            "reason": "",
            "first_step": first,
            "last_step": first - 1,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._content = _described(runtime) | {"attempts": [*earlier, self._attempt]}
        self._write()

    def end(self, event: EndEvent) -> None:
        """Record how the attempt ended."""
        self._attempt |= {"ended": _now(), "status": str(event.status), "reason": event.reason}
        self._attempt["last_step"] = event.step
        self._write()

    def _write(self) -> None:
        """Replace the file atomically, so that a reader never sees a part of it."""
        try:
            number, new = tempfile.mkstemp(prefix=f".{NAME}.", dir=self._folder)
            try:
                with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(json.dumps(self._content, indent=1, ensure_ascii=False, default=str) + "\n")
                os.replace(new, self._folder / NAME)
            except BaseException:
                os.unlink(new)
                raise
        except OSError as error:
            warnings.warn(f"{NAME} was not written ({error}). The run is not affected.", stacklevel=3)


def attempts_in(folder: Path) -> list[dict[str, Any]]:
    """Return the attempts in the run.json of a folder; none if it is missing or damaged."""
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        path = folder / NAME
        if path.is_file():  # for example a pipe would block
            found = json.loads(path.read_bytes())["attempts"]
            return [dict(attempt) for attempt in found]
    return []


def _described(runtime: LocalRuntime) -> dict[str, Any]:
    e = runtime.experiment
    models = ((role, model.engine) for role, model in runtime.models.items() if model.engine is not None)
    lead = lead_role(e)
    found = {} if e.save_best is None else {e.save_best.removeprefix("-"): not e.save_best.startswith("-")}
    return {
        "name": e.name,
        "steps": e.steps,
        "batch_prompts": e.batch_prompts,
        "seed": e.seed,
        "folder": str(Path.cwd()),
        "versions": {"python": platform.python_version(), **_versions()},
        "device": _device(),
        "git": git_state(Path.cwd()),
        "models": {role: engine.describe() for role, engine in models},
        "graph": graph_record(e.graph),
        "headline": headline(e.graph, e.interfaces, lead, tuple(e.evaluations)),
        "panels": [dataclasses.asdict(panel) for panel in panels(e.graph, e.interfaces, lead)],
        "larger_is_better": found,
    }


def graph_record(graph: DataflowGraph) -> dict[str, Any]:
    """Return a graph as plain values, from which a report builds it again."""
    return {
        "rpcs": [
            {
                "name": rpc.name,
                "model": rpc.model,
                "method": rpc.method,
                "inputs": rpc.inputs,
                "outputs": rpc.outputs,
                "after": rpc.after,
            }
            for rpc in graph.rpcs
        ],
        "dataset_keys": graph.dataset_keys,
        "results": graph.results,
        "sync": {role: dataclasses.asdict(sync) for role, sync in graph.sync.items()},
    }


def git_state(folder: Path) -> Mapping[str, Any] | None:
    """Return commit, branch and changed files of the git repository of a folder; None without one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no") or ""
    return {
        "commit": commit,
        "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "changed": [line[3:] for line in changed.splitlines()],
    }


def _git(folder: Path, *words: str) -> str | None:
    """Return the output of a git command that runs no program that the repository configures; None if it fails."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *words]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
        return done.stdout.rstrip("\n")
    return None


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _device() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": gpus,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


__all__ = ["NAME", "RunInfo", "attempts_in", "git_state", "graph_record"]
