"""Connect to a Ray cluster for a run: a private one on the loopback interface, or an existing one."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import ray

from realign.errors import ConfigError, TransientError

LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""Loopback address of the private cluster. Ray replaces 127.0.0.1 by the machine's external address."""
TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
ANSWER_S = 10.0
"""Timeout in seconds of a connection attempt to a cluster address."""
_OBJECT_STORE_BYTES = 2**30
"""Maximum object store size of the private cluster in bytes, limited to half of the free shared memory.

Ray spills objects that do not fit to disk.
"""
_QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


@contextmanager
def connected(address: str | None, processes: int) -> Iterator[None]:
    """Connect this process to a Ray cluster inside the context, and shut down a private cluster at the end.

    If Ray is already initialized, its cluster is used and not shut down.

    Args:
        address: Address of an existing cluster. None starts a private cluster.
        processes: Number of workers that the private cluster must have room for. It may exceed the number of CPU
            cores, because roles take turns. On GPUs, each worker has its own GPU.

    Raises:
        ConfigError: `address` is invalid.
        TransientError: No cluster is reachable at `address`.
    """
    if ray.is_initialized():
        yield
        return
    with _token(address), _connected_by_a_thread(lambda: _start(processes) if address is None else _join(address)):
        yield


def _start(processes: int) -> None:
    ray.init(
        address="local",
        # Ray only counts these CPUs, it binds no process to a core
        num_cpus=max(os.cpu_count() or 1, processes),
        include_dashboard=False,
        object_store_memory=_store_bytes(),
        _node_ip_address=LOOPBACK,
        **_QUIET,
    )


def _join(address: str) -> None:
    check_answers(address)
    try:
        ray.init(address=address, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise TransientError(
            f"runtime.address={address}: cannot connect to a Ray cluster ({first}). Check that the cluster runs."
        ) from error


@contextmanager
def _connected_by_a_thread(connect: Callable[[], None]) -> Iterator[None]:
    """Connect to Ray in a thread, so that Ray cannot replace the signal handlers of the run.

    Ray's own SIGTERM handler ends the process without a message. A scheduler sends SIGTERM to all processes of a job,
    but the driver needs Ray to finish the current step. Therefore the thread blocks SIGTERM, and the processes that it
    starts inherit this. Ray does the same for Ctrl-C. The thread stays alive, because these processes end with it.
    """
    failed: list[BaseException] = []
    there, over = threading.Event(), threading.Event()

    def work() -> None:
        # before `connect`, because processes inherit the mask when they start
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            connect()
        except BaseException as error:
            failed.append(error)
        there.set()
        over.wait()

    thread = threading.Thread(target=work, name="connected to Ray", daemon=True)
    try:
        thread.start()
        while not there.wait(1):  # wakes up, since a signal that another thread got does not end a wait of this one
            pass
        if failed:
            raise failed[0]
        yield
    finally:
        if thread in threading.enumerate():
            there.wait()  # also after a signal: a partly started cluster cannot be shut down
        ray.shutdown()
        over.set()


def check_answers(address: str) -> None:
    """Check that a process listens at an address. Ray itself would retry for many minutes.

    Args:
        address: `HOST:PORT`, or `auto` for the cluster that this machine is part of.

    Raises:
        ConfigError: The address is invalid.
        TransientError: No process listens at the address.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"runtime.address={address}: must be HOST:PORT, auto or null.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise TransientError(
            f"runtime.address={address}: no process listens there ({error}). Check that the Ray cluster runs."
        ) from error


def _store_bytes() -> int:
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    room = shared.f_bavail * shared.f_frsize // 2 if shared else _OBJECT_STORE_BYTES
    return max(80 * 2**20, min(_OBJECT_STORE_BYTES, room))  # Ray's own minimum is 75 MiB


@contextmanager
def _token(address: str | None) -> Iterator[None]:
    """Protect the private cluster with a token that only this process and its children have.

    Ray listens on all interfaces and runs any code that it receives. It requires a token unless RAY_AUTH_MODE disables
    that.
    """
    before = {name: os.environ.get(name) for name in TOKEN}
    if address is None and not any(before.values()):
        os.environ["RAY_AUTH_TOKEN"] = _own_token()  # otherwise Ray creates a token in the home folder
    try:
        yield
    finally:  # a later run on an existing cluster must not use this token
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@cache
def _own_token() -> str:
    """Return one token for all clusters that this process starts, because Ray reads the token once per process."""
    return secrets.token_hex(32)
