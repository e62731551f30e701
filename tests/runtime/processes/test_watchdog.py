"""Test the operations of a run, time limits of calls, and two ranks that share a store in one process."""

from __future__ import annotations

import math
import re
import signal
import threading
import time

import pytest
from torch.distributed import HashStore

from realign.errors import TransientError
from realign.ranks import Ranks
from realign.records.checkpoint.folder import list_checkpoints
from realign.runtime import run
from realign.runtime.processes import watchdog
from realign.runtime.processes.watchdog import CallTimeout, RankWatch, Watch, watch_for
from realign.runtime.runtime_spec import Local, Ray
from realign.signals import Interrupted
from tests.processes import until
from tests.toys import CountToken, experiment


def test_operations_are_listed_while_they_run_in_any_thread():
    watch, entered, leave = Watch(), threading.Event(), threading.Event()

    def other():
        with watch.doing("call 'ref_inf'", limited=True):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with watch.doing("call 'reward_inf'", [5]):
        thread.start()
        entered.wait()
        assert [(o.what, o.data) for o in watch.operations()] == [("call 'reward_inf'", [5]), ("call 'ref_inf'", None)]
    leave.set()
    thread.join()
    assert watch.operations() == []


def test_an_error_passes_through_and_ends_the_operation():
    watch = Watch()
    with pytest.raises(ZeroDivisionError), watch.report_errors(), watch.doing("evaluation"):
        1 / 0  # noqa: B018
    assert watch.operations() == []


def test_a_slow_call_without_a_limit_is_a_warning_and_the_run_continues(caplog):
    watch = Watch(0, ends=False)
    with watch.doing("evaluation"), watch.doing("call 'actor_gen'", limited=True):
        until(lambda: caplog.records)
    assert [record.getMessage() for record in caplog.records] == [
        "call 'actor_gen' has not finished after 0 minutes. The run continues. Set runtime.rpc_timeout_minutes to end "
        "a run whose calls hang."
    ]


class Hanging(CountToken):
    """A reward whose second call blocks in a system call, and suppresses all exceptions."""

    calls = 0

    def inference(self, model, data, mb_spec):
        self.calls += 1
        if self.calls == 2:
            try:
                time.sleep(1000)
            except Exception:
                raise AssertionError("suppressed") from None
        return super().inference(model, data, mb_spec)


def test_a_call_that_hangs_ends_the_run_with_exit_code_75_and_the_checkpoint_of_the_last_complete_step(tmp_path):
    watch = Watch(0.05)
    message = r"call 'reward_inf' exceeded runtime\.rpc_timeout_minutes=0\.05\. Restart the run with resume=auto"
    before = signal.getsignal(signal.SIGTERM)
    made = experiment(tmp_path, steps=3)
    made.interfaces["reward"] = Hanging()
    with pytest.raises(CallTimeout, match=message) as caught:
        run(made, watch=watch)
    assert caught.value.exit_code == 75
    assert [checkpoint.step for checkpoint in list_checkpoints(made.output_dir / "checkpoints")] == [1]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        (Local(), (30, False, 0)),
        (Local(rpc_timeout_minutes=5), (5, True, 0)),
        (Ray(), (30, False, 60)),
        (Ray(rpc_timeout_minutes=5), (5, True, 60)),
    ],
)
def test_a_run_without_torchrun_ends_only_if_a_limit_is_set(runtime, expected):
    watch = watch_for(runtime)
    assert (watch.minutes, watch.ends, watch.extra_s) == expected
    assert Watch().minutes == math.inf


def describe(error: BaseException) -> tuple[str, int]:
    if isinstance(error, Interrupted):
        return str(error), error.exit_code
    if isinstance(error, TransientError):
        return f"error: {error}", 75
    return f"Traceback\n{error}", 3


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[RankWatch]:
    monkeypatch.setattr(watchdog, "POLL_S", 0.01)
    monkeypatch.setattr(watchdog, "ANSWER_S", 1.0)
    store = HashStore()
    return [RankWatch(Ranks(rank, 2), store, describe) for rank in range(2)]


def record(ranks: list[RankWatch]) -> list[tuple[int, str, int]]:
    """Return a list to which the ranks add rank, error and exit code of each record."""
    records: list[tuple[int, str, int]] = []
    for rank, one in enumerate(ranks):
        one.record = lambda error, code, rank=rank: records.append((rank, str(error), code))
    return records


def test_the_first_error_is_printed_with_its_operation_and_ends_the_other_rank(two, capsys):
    first, second = two
    with first, second:
        with second.doing("loading"):
            pass
        with (
            pytest.raises(ZeroDivisionError),
            second.report_errors(),
            second.report_errors(),
            second.doing("call 'x'", [5]),
        ):
            1 / 0  # noqa: B018
        until(first._ended.is_set)
        with pytest.raises(SystemExit), first.report_errors():
            first.exit_if_ended()
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"rank 1 of 2 failed first, in call 'x' for \d+ s on \[5\]\nTraceback\ndivision by zero\n", said
    )
    assert (first.code, second.code) == (3, 3)


def test_a_signal_of_the_launcher_after_a_rank_was_killed_is_reported_as_the_loss_of_that_rank(two, capsys):
    """torchrun sends SIGTERM to the other ranks. The second rank does not start its watch here."""
    first = two[0]
    records = record(two)
    with first, pytest.raises(Interrupted), first.report_errors():
        raise Interrupted(signal.SIGTERM)
    lost = "rank 1 of 2 was killed, or its machine failed. Restart the run with resume=auto."
    assert capsys.readouterr().err == f"error: {lost}\n"
    assert (first.code, records) == (75, [(0, lost, 75)])


def test_an_error_of_another_rank_is_printed_by_that_rank(two, capsys, monkeypatch):
    first, second = two
    error = OSError("disk full")
    monkeypatch.setattr(watchdog, "is_of_another_rank", lambda other: other is error)

    def fail_later():
        time.sleep(0.1)
        with pytest.raises(OSError, match="of rank 0"), first.report_errors():
            raise OSError("of rank 0")

    with first, second:
        thread = threading.Thread(target=fail_later)
        thread.start()
        with pytest.raises(OSError, match="disk full"), second.report_errors():
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
    with two[0], pytest.raises(RuntimeError), two[0].report_errors():
        raise RuntimeError(error)
    assert capsys.readouterr().err == f"error: {said} Restart the run with resume=auto.\n"
    assert two[0].code == 75


def test_a_call_that_takes_too_long_on_one_rank_ends_all_with_one_line_and_exit_code_75(two, capfd, monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(watchdog, "GRACE_S", 0.01)
    monkeypatch.setattr(watchdog.os, "_exit", ended.append)
    first, second = two
    second.minutes = 0.001
    records = record(two)
    first._thread.start()
    second._thread.start()
    with first.doing("evaluation"), second.doing("call 'x'", limited=True):
        until(lambda: len(ended) == 2)
    error = "rank 1 of 2: call 'x' exceeded runtime.rpc_timeout_minutes=0.001. Restart the run with resume=auto."
    assert capfd.readouterr().err == f"error: {error}\n"
    assert ended == [75, 75]
    assert records == [(1, error, 75)]
