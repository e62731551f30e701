import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from realign.errors import TransientError
from realign.runtime import run
from realign.runtime.processes import lock as exclusive
from realign.runtime.processes.lock import alone_in
from tests.runtime.test_step import experiment

HOLDER = """
import sys, time
from pathlib import Path
from realign.runtime.processes.lock import alone_in
with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(1000)
"""


def test_a_folder_is_locked_by_one_run_and_free_afterward(tmp_path):
    with alone_in(tmp_path), alone_in(tmp_path.parent):
        for _ in range(2):
            with (
                pytest.raises(TransientError, match=f"output_dir={tmp_path}: another run"),
                alone_in(tmp_path),
            ):
                pass
    with pytest.raises(ZeroDivisionError), alone_in(tmp_path):
        1 / 0  # noqa: B018
    with alone_in(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_killed_process_releases_its_lock(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(exclusive.__file__).parents[3])}
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(TransientError, match="another run is active"), alone_in(tmp_path):
            pass
        holder.kill()
    with alone_in(tmp_path):
        pass


def test_a_disk_without_locks_is_used_without_a_lock(tmp_path, monkeypatch):
    def none(number, how):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", none)
    with alone_in(tmp_path):
        pass


@pytest.mark.parametrize("changes", [{"resume": "auto"}, {"overwrite": True}, {}], ids=str)
def test_a_second_run_does_not_touch_the_records_of_the_first(tmp_path, changes):
    first = experiment(tmp_path, steps=1)
    first.output_dir.mkdir()
    with alone_in(first.output_dir):
        (first.output_dir / "samples.jsonl").write_text("precious\n")
        with pytest.raises(TransientError, match="another run is active"):
            run(experiment(tmp_path, steps=1, **changes))
    assert (first.output_dir / "samples.jsonl").read_text() == "precious\n"
    run(experiment(tmp_path, steps=1, **changes))


def test_a_run_locks_its_folder_from_start_to_end(tmp_path):
    held = []

    class Watcher:
        def log(self, step, metrics):
            with pytest.raises(TransientError, match="another run is active"), alone_in(tmp_path / "run"):
                pass
            held.append(step)

        def close(self):
            pass

    run(experiment(tmp_path, steps=2), trackers=[Watcher()])
    assert held == [0, 1, 2]
    with alone_in(tmp_path / "run"):
        pass
