import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
import ray

from realign.errors import ConfigError, TransientError
from realign.runtime.ray.cluster import TOKEN, check_answers, connected


@pytest.mark.parametrize(
    "address", ["nowhere", "127.0.0.1", ":6379", "127.0.0.1:port", "127.0.0.1:99999", "ray://127.0.0.1:6379"]
)
def test_an_invalid_address_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.address=.*: must be HOST:PORT, auto or null"):
        check_answers(address)


def test_an_address_without_a_listener_is_a_transient_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_answers(f"127.0.0.1:{port}")
    with pytest.raises(TransientError, match=rf"runtime\.address=127\.0\.0\.1:{port}: no process listens there"):
        check_answers(f"127.0.0.1:{port}")


def test_a_signal_while_ray_starts_is_heard_and_ends_what_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of realign receives the signal, and started processes block it."""
    did, blocked, sent = [], [], threading.Event()

    def init(**settings: object) -> None:
        blocked.extend(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        did.append(bool(os.environ["RAY_AUTH_TOKEN"]))
        os.kill(os.getpid(), signal.SIGTERM)
        assert sent.wait(60)
        did.append("init")

    def heard(number: int, frame: object) -> None:
        sent.set()
        raise KeyError(number)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: did.append("shutdown"))
    for name in TOKEN:
        monkeypatch.delenv(name, raising=False)
    before = signal.signal(signal.SIGTERM, heard)
    try:
        with pytest.raises(KeyError), connected(None, 1):
            raise AssertionError("the run has begun")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert did == [True, "init", "shutdown"]
    assert blocked == [signal.SIGTERM]
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_an_error_while_ray_starts_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: object) -> None:
        raise ConnectionError("no\nbody")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(ConnectionError), connected(None, 1):
        raise AssertionError("the run has begun")
    message = r"runtime\.address=auto: cannot connect to a Ray cluster \(no\)"
    with pytest.raises(TransientError, match=message), connected("auto", 1):
        raise AssertionError("the run has begun")


SCRIPT = """
import os
import signal

import ray

from realign.runtime.ray import connected

before = dict(os.environ), signal.getsignal(signal.SIGTERM)
for number in range(2):
    with connected(None, 1):
        print(ray.get(ray.remote(lambda: number).remote()), len(os.environ["RAY_AUTH_TOKEN"]))
        assert signal.getsignal(signal.SIGTERM) == before[1]
    assert signal.getsignal(signal.SIGTERM) == before[1]
    assert {name for name in os.environ if name.startswith("RAY_AUTH")} <= before[0].keys()
"""


@pytest.mark.ray
@pytest.mark.slow
def test_one_process_can_start_a_cluster_after_another_as_a_recovery_does() -> None:
    environment = {name: x for name, x in os.environ.items() if not name.startswith("RAY_")}
    said = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == ["0", "64", "1", "64"]
