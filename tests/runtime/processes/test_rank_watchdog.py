"""Test two rank watchdogs with a shared store in one process."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from realign.errors import TransientError
from realign.ranks import Ranks
from realign.runtime.processes import watchdog as watch
from realign.runtime.processes.watchdog import RankWatch
from realign.signals import Interrupted


def waited_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def described(error: BaseException) -> tuple[str, int]:
    if isinstance(error, Interrupted):
        return str(error), error.exit_code
    if isinstance(error, TransientError):
        return f"error: {error}", 75
    return f"Traceback\n{error}", 3


@pytest.fixture
def two(monkeypatch) -> list[RankWatch]:
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    monkeypatch.setattr(watch, "ANSWER_S", 1.0)
    store = HashStore()
    return [RankWatch(Ranks(rank, 2), store, described) for rank in range(2)]


def recorded(ranks: list[RankWatch]) -> list[tuple[int, str, int]]:
    """Return a list to which the watchdogs add rank, error and exit code of each record."""
    found: list[tuple[int, str, int]] = []
    for rank, one in enumerate(ranks):
        one.record = lambda error, code, rank=rank: found.append((rank, str(error), code))
    return found


def test_the_first_error_is_printed_with_its_operation_and_ends_the_other_rank(two, capsys):
    first, second = two
    with first, second:
        with second.doing("loading"):
            pass
        with pytest.raises(ZeroDivisionError), second.telling(), second.telling(), second.doing("call 'x'", [5]):
            1 / 0  # noqa: B018
        waited_for(first._ended.is_set)
        with pytest.raises(SystemExit), first.telling():
            first.leave_if_ended()
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"rank 1 of 2 failed first, in call 'x' for \d+ s on \[5\]\nTraceback\ndivision by zero\n", said
    )
    assert (first.code, second.code) == (3, 3)


def test_a_rank_whose_connection_breaks_since_the_first_rank_ended_has_its_exit_code_and_prints_nothing(two, capsys):
    first, second = two
    records = recorded(two)
    with first, second:
        with pytest.raises(KeyError), first.telling():
            raise KeyError("a bug")
        waited_for(second._ended.is_set)
        with pytest.raises(RuntimeError), second.telling():
            raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1416")
    assert capsys.readouterr().err == "rank 0 of 2 failed first\nTraceback\n'a bug'\n"
    assert (first.code, second.code) == (3, 3)
    assert records == [(0, "'a bug'", 3)]


def test_a_record_that_fails_changes_neither_the_message_nor_the_exit_code(two, capfd):
    first = two[0]

    def record(error, code):
        raise ValueError("no such folder")

    first.record = record
    with first, pytest.raises(KeyError), first.telling():
        raise KeyError("a bug")
    said = "rank 0 of 2 failed first\nTraceback\n'a bug'\n"
    said += "warning: the failure of the run was not recorded (ValueError('no such folder')).\n"
    assert (capfd.readouterr().err, first.code) == (said, 3)


def test_a_signal_of_the_launcher_after_a_rank_was_killed_is_reported_as_the_loss_of_that_rank(two, capsys):
    """torchrun sends SIGTERM to the other ranks. The second rank does not start its watchdog here."""
    first = two[0]
    records = recorded(two)
    with first, pytest.raises(Interrupted), first.telling():
        raise Interrupted(signal.SIGTERM)
    lost = "rank 1 of 2 was killed, or its machine failed. Restart the run with resume=auto."
    assert capsys.readouterr().err == f"error: {lost}\n"
    assert (first.code, records) == (75, [(0, lost, 75)])


def test_a_signal_that_all_ranks_survive_is_an_interruption(two, capsys):
    first, second = two
    with first, second:
        for rank in two:
            with pytest.raises(Interrupted), rank.telling():
                raise Interrupted(signal.SIGTERM)
    assert capsys.readouterr().err == "interrupted\n"
    assert (first.code, second.code) == (143, 143)


def test_an_error_of_another_rank_is_printed_by_that_rank(two, capsys, monkeypatch):
    first, second = two
    error = OSError("disk full")
    monkeypatch.setattr(watch, "is_of_another_rank", lambda found: found is error)

    def fails_later():
        time.sleep(0.1)
        with pytest.raises(OSError, match="of rank 0"), first.telling():
            raise OSError("of rank 0")

    with first, second:
        thread = threading.Thread(target=fails_later)
        thread.start()
        with pytest.raises(OSError, match="disk full"), second.telling():
            raise error
        thread.join()
    assert capsys.readouterr().err == "rank 0 of 2 failed first\nTraceback\nof rank 0\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "[pair.cc:553] Connection closed by peer [127.0.0.1]:1416",
            "rank 0 of 2 lost another rank, which was killed or whose machine failed.",
        ),
        (
            "[unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation",
            "rank 0 of 2 waited too long for another rank ([unbound_buffer.cc:81] Timed out waiting 1000ms for recv "
            "operation).",
        ),
    ],
)
def test_a_lost_or_late_rank_is_a_transient_error_in_one_line(two, capsys, error, said):
    with two[0], pytest.raises(RuntimeError), two[0].telling():
        raise RuntimeError(error)
    assert capsys.readouterr().err == f"error: {said} Restart the run with resume=auto.\n"
    assert two[0].code == 75


def test_another_runtime_error_of_torch_keeps_its_traceback(two, capsys):
    with two[0], pytest.raises(RuntimeError), two[0].telling():
        raise RuntimeError("the size of tensor a must match")
    assert capsys.readouterr().err == "rank 0 of 2 failed first\nTraceback\nthe size of tensor a must match\n"


def test_only_a_limited_operation_ends_the_ranks_with_exit_code_75(two, capfd, monkeypatch):
    ended = []
    monkeypatch.setattr(watch, "GRACE_S", 0.01)
    monkeypatch.setattr(watch.os, "_exit", ended.append)
    first, second = two
    first.limit_s = second.limit_s = 0.1
    records = recorded(two)
    first._thread.start()
    second._thread.start()
    with first.doing("evaluation"):
        time.sleep(0.3)
        assert not ended
        with second.doing("call 'x'", limited=True):
            waited_for(lambda: len(ended) == 2)
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("error: call 'x' exceeds runtime.rpc_timeout_minutes=0.001")
    assert re.match(r"rank 0: evaluation for \d+ s in ", said[1])
    assert re.match(r"rank 1: call 'x' for \d+ s in ", said[2])
    assert ended == [75, 75]
    error = "call 'x' exceeds runtime.rpc_timeout_minutes=0.00166667. Restart the run with resume=auto."
    assert [(message, code) for _, message, code in records] == [(error, 75)]
