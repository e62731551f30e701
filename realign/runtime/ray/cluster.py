"""A Ray cluster for the time of a run: one of our own on this machine's loopback, or one that is there already."""

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

LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""Ray takes 127.0.0.1 for a machine that wants to be reached from others, and uses its outer address."""
TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
ANSWER_S = 10.0
"""Seconds that whoever listens at an address has to answer."""
OBJECT_STORE_BYTES = 2**30
"""Of our own cluster, at most half of the machine's shared memory; what does not fit goes to disk."""
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


@contextmanager
def connected(address: str | None, processes: int) -> Iterator[None]:
    """Inside this context this process is connected to a cluster; one that we started ends with it.

    If Ray is initialised already, that cluster is used and left as it is.

    Args:
        address: of a cluster that is there already; None starts one.
        processes: workers that our own cluster must have room for. Roles take turns, so that it may be more than there
            are cores; on GPUs each has its own.

    Raises:
        ValueError: `address` is none, or no cluster answers there.
    """
    if ray.is_initialized():
        yield
        return
    with _token(address), _connected_by_a_thread(lambda: _start(processes) if address is None else _join(address)):
        yield


def _start(processes: int) -> None:
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, processes),
        include_dashboard=False,
        object_store_memory=_store_bytes(),
        _node_ip_address=LOOPBACK,
        **QUIET,
    )


def _join(address: str) -> None:
    check_answers(address)
    try:
        ray.init(address=address, **QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"runtime.address={address!r}: no Ray cluster answers there: {first}") from error


@contextmanager
def _connected_by_a_thread(connect: Callable[[], None]) -> Iterator[None]:
    """Connect to Ray in a thread, in which it can set no handlers of signals: ours are heard meanwhile.

    Its own handler of SIGTERM ends the process without a word. Processes that the thread starts do not end by SIGTERM,
    which a scheduler sends to all processes of a job: the driver decides what becomes of it, and a step that is under
    way needs Ray to end. Ray does the same for Ctrl-C. They do end with the thread, which therefore stays.
    """
    failed: list[BaseException] = []
    there, over = threading.Event(), threading.Event()

    def work() -> None:
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
        there.wait()
        if failed:
            raise failed[0]
        yield
    finally:
        if thread in threading.enumerate():
            there.wait()  # after a signal, too: what is half there could not be shut down
        ray.shutdown()
        over.set()


def check_answers(address: str) -> None:
    """Find out whether anybody listens at an address: Ray itself would go on asking for many minutes.

    Args:
        address: `HOST:PORT`, or `auto` for the cluster that this machine is part of.

    Raises:
        ValueError: it is no address, or nobody does.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ValueError(f"runtime.address must be HOST:PORT, auto or null, found {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"runtime.address={address!r}: nobody answers there: {error}") from error


def _store_bytes() -> int:
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    room = shared.f_bavail * shared.f_frsize // 2 if shared else OBJECT_STORE_BYTES
    return max(80 * 2**20, min(OBJECT_STORE_BYTES, room))  # Ray's own minimum is 75 MiB


@contextmanager
def _token(address: str | None) -> Iterator[None]:
    """Whoever wants to talk to our own cluster needs a token that only this process and its children have.

    Ray answers on all interfaces, and runs what it is sent. It asks for a token unless RAY_AUTH_MODE says otherwise.
    """
    before = {name: os.environ.get(name) for name in TOKEN}
    if address is None and not any(before.values()):
        os.environ["RAY_AUTH_TOKEN"] = _own_token()  # else Ray would make one and leave it in the home folder
    try:
        yield
    finally:  # of a cluster that is there already, a later run reads it elsewhere
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@cache
def _own_token() -> str:
    """The same for every cluster that this process starts: Ray reads its token once."""
    return secrets.token_hex(32)
