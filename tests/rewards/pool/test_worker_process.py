import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from realign.rewards import FailureKind, RewardPool
from tests.processes import gone

STARTS = Path(__file__).parent / "starting_rewards.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
WAYS = ("child", "session", "grandchild", "deaf", "stopped", "chain")
"""Ways to start a process that ends with a worker that is stopped."""
IN_SESSION = ("child", "grandchild", "deaf", "stopped")
"""Those that end also with a worker that crashes."""
ENDS = {
    "os._exit": FailureKind.crash,
    "SIGKILL": FailureKind.crash,
    "SIGKILL of its group": FailureKind.crash,
    "SIGSEGV": FailureKind.crash,
    "SIGSTOP": FailureKind.timeout,
    "deaf and hangs": FailureKind.timeout,
}


@pytest.fixture
def started(tmp_path):
    """The file in which a reward function writes the pids of all processes that it starts; the fixture ends them."""
    file = tmp_path / "pids"
    file.touch()
    yield file
    for pid in pids(file):
        if runs(pid):
            os.kill(pid, signal.SIGKILL)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids(file):
    return [int(word) for word in file.read_text().split()]


@pytest.mark.parametrize("end", ENDS)
def test_all_processes_that_a_function_started_end_with_its_worker(end, started):
    ways = WAYS if ENDS[end] is FailureKind.timeout else IN_SESSION
    row = {"file": str(started), "ways": ways, "end": end}
    limit_s = 5.0 if ENDS[end] is FailureKind.timeout else 60.0
    with RewardPool(
        f"{STARTS}:start_and_end", workers=1, timeout_s=limit_s, memory_mb=None, max_failed_fraction=1.0
    ) as pool:
        scores = pool.score(["p"], ["r"], [row])
        assert [f.kind for f in scores.failures] == [ENDS[end]]
        assert len(pids(started)) == 1 + len(ways) + ("chain" in ways)
        assert all(gone(pid) for pid in pids(started))
        assert pool.score(["p"], ["r"], [{**row, "ways": (), "end": None}]).values == [1.0]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_processes_that_a_function_started_end_with_the_run(how, started, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import time
            from realign.rewards import RewardPool
            pool = RewardPool({f"{STARTS}:start_and_end"!r}, workers=1, timeout_s=60, memory_mb=None,
                              max_failed_fraction=1)
            row = dict(file={str(started)!r}, ways={WAYS!r}, end=None)
            print(pool.score(["p"], ["r"], [row]).values, flush=True)
            time.sleep(60)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment, text=True)
    assert run.stdout.readline() == "[1.0]\n"
    run.send_signal(how)
    run.communicate(timeout=30)
    assert len(pids(started)) == 2 + len(WAYS)
    assert all(gone(pid) for pid in pids(started))
