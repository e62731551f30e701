"""A Ray cluster for the time of a run: one of our own on this machine's loopback, or one that is there already."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""Ray takes 127.0.0.1 for a machine that wants to be reached from others, and uses its outer address."""
TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
ANSWER_S = 10.0
"""Seconds that whoever listens at an address has to answer."""
OBJECT_STORE_BYTES = 2**30
"""Of our own cluster, at most half of the machine's shared memory; what does not fit goes to disk."""


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
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    with _own_signal_handlers(), _token(address):
        if address is None:
            cpus = max(os.cpu_count() or 1, processes)
            with _children_that_hear_no_signal():
                ray.init(
                    address="local",
                    num_cpus=cpus,
                    include_dashboard=False,
                    object_store_memory=_store_bytes(),
                    _node_ip_address=LOOPBACK,
                    **quiet,
                )
        else:
            check_answers(address)
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                first = str(error).strip().splitlines()[0]
                raise ValueError(f"runtime.address={address!r}: no Ray cluster answers there: {first}") from error
    try:
        yield
    finally:
        with _own_signal_handlers():
            ray.shutdown()


def check_answers(address: str) -> None:
    """Find out whether anybody listens at an address: Ray itself would go on asking for many minutes.

    Args:
        address: `HOST:PORT`, `ray://HOST:PORT`, or `auto` for the cluster that this machine is part of.

    Raises:
        ValueError: it is no address, or nobody does.
    """
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"runtime.address must be HOST:PORT, ray://HOST:PORT, auto or null, found {address!r}")
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
    if address is None and not any(os.environ.get(name) for name in TOKEN):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # else Ray would make one and leave it in the home folder
    yield


@contextmanager
def _children_that_hear_no_signal() -> Iterator[None]:
    """Processes that are started meanwhile do not end by SIGTERM, which a scheduler sends to all processes of a job.

    The driver decides what becomes of it: a step that is under way needs Ray to end. Ray does the same for Ctrl-C.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Ray sets a handler of SIGTERM that ends the process without a word; ours lets the step end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
