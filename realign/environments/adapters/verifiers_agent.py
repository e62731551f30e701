"""Environments of verifiers (Environments Hub) as agents.

The package pins other versions of the libraries that realign uses. It therefore runs in a separate Python environment,
and its episodes reach the policy over the endpoint. One worker process runs all episodes of a run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path
from typing import Any

from realign.errors import ConfigError
from realign.secrets import without_secrets

WORKER = Path(__file__).with_name("verifiers_worker.py")


async def episode(
    base_url: str, api_key: str, row: Mapping[str, Any], *, python: str, config: Mapping[str, Any]
) -> float:
    """Run an episode with the task of a row, and return its reward.

    Args:
        base_url: base URL of the endpoint.
        api_key: key of the episode.
        row: row of the dataset, with the column `idx`, the index of the task.
        python: interpreter of the environment with verifiers.
        config: configuration of the verifiers environment, such as `{taskset: {id: my_taskset}}`. `path` is a folder
            to import tasksets from.

    Raises:
        ValueError: the episode failed; contains its error.
    """
    worker = _worker(python, json.dumps(dict(config), sort_keys=True))
    number, answer = worker.ask({"base_url": base_url, "api_key": api_key, "idx": row["idx"]})
    try:
        return await asyncio.wrap_future(answer)
    except asyncio.CancelledError:
        worker.send({"number": number, "cancel": True})
        raise


class _Worker:
    """The process that runs episodes. It ends when its stdin closes, as when this process ends."""

    def __init__(self, python: str, config: str) -> None:
        try:
            self._process = subprocess.Popen(
                [python, str(WORKER), config],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=without_secrets(os.environ) | {"PYTHONPATH": ""},
                text=True,
            )
        except OSError as error:
            raise ConfigError(f"python={python}: cannot start this interpreter ({error}).") from error
        self._numbers, self._waiting = itertools.count(), dict[int, Future[float]]()
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="verifiers", daemon=True).start()

    def ask(self, request: Mapping[str, Any]) -> tuple[int, Future[float]]:
        """Start an episode."""
        number, answer = next(self._numbers), Future[float]()
        self._waiting[number] = answer
        self.send({"number": number, **request})
        return number, answer

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises ValueError if the process has ended."""
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
        except OSError as error:
            raise ValueError(f"the worker of verifiers ended with exit code {self._process.poll()}") from error

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            answer = self._waiting.pop(message["number"], None)
            if answer is None or not answer.set_running_or_notify_cancel():
                continue
            if "error" in message:
                answer.set_exception(ValueError(message["error"]))
            else:
                answer.set_result(message["reward"])
        code = self._process.wait()
        for answer in list(self._waiting.values()):
            if answer.set_running_or_notify_cancel():
                answer.set_exception(ValueError(f"the worker of verifiers ended with exit code {code}"))


@lru_cache
def _worker(python: str, config: str) -> _Worker:
    return _Worker(python, config)
