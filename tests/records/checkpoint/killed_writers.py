"""Kill processes while they write checkpoints. This file runs as a program, since it forks. It prints its results as
JSON.

python killed_writers.py every_point FOLDER    # at each system call of a write, one after the other
python killed_writers.py random FOLDER COUNT   # at random moments of a loop of writes
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from realign.own_files import FILES
from realign.records.checkpoint.folder import CheckpointWriter, HashedFile, list_checkpoints, newest, write_checkpoint


def tree(step, round_=0):
    return {"step": step, "round": round_, "x": torch.full((1000,), float(step)), "y": torch.arange(step)}


def is_whole(newest_one, round_=None):
    checkpoint, read = newest_one
    expected = tree(checkpoint.step, read["round"] if round_ is None else round_)
    return list(read) == list(expected) and all(
        torch.equal(read[key], value) if isinstance(value, torch.Tensor) else read[key] == value
        for key, value in expected.items()
    )


def child(work):
    """Fork a child that runs `work` and exits with 0. Return its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def die_at(point, after):
    """Kill this process before or after its `point`-th call that changes the disk."""
    calls = 0

    def deadly(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            mine = calls
            if mine == point and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if mine == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for owner, name in [
        (os, "fsync"),
        (os, "unlink"),
        (os, "rmdir"),
        (Path, "rename"),
        (Path, "mkdir"),
        (Path, "open"),
        (HashedFile, "write"),
    ]:
        setattr(owner, name, deadly(getattr(owner, name)))


def every_point(folder):
    """Return the checkpoints after a kill at each point of a write, including removal and replacement of older ones."""
    seen = []
    for before, step, keep in [([1, 2], 3, 2), ([1, 2], 3, 1), ([2], 2, 1), ([5, 2], 3, 1), ([], 1, 1)]:
        for after in (False, True):
            for point in range(1, 1000):
                shutil.rmtree(folder, ignore_errors=True)
                for earlier in before:
                    write_checkpoint(folder, earlier, tree(earlier))

                def work(point=point, after=after, keep=keep, step=step):
                    die_at(point, after)
                    writer = CheckpointWriter(folder, keep)
                    writer.write(step, tree(step, 1))
                    writer.close()

                killed = os.waitpid(child(work), 0)[1] == signal.SIGKILL
                warnings = []
                newest_one = newest(folder, warnings.append)
                record = {"before": before, "step": step, "keep": keep, "warnings": warnings, "killed": killed}
                record["newest"] = newest_one[0].step if newest_one else None
                record["whole"] = newest_one is None or is_whole(newest_one)
                writer = CheckpointWriter(folder, keep)
                record["after_start"] = [c.step for c in list_checkpoints(folder)]
                writer.write(9, tree(9))
                writer.close()
                record["next"] = [path.name for path in sorted(folder.iterdir()) if path.name != FILES]
                record["failed"] = writer.take_failures()
                seen.append(record)
                if not killed:
                    break
    return seen


def at_random(folder, count):
    """Return the newest step before and after each of `count` kills.

    Every second kill waits until 3 steps are written, so that slow machines also make progress.
    """
    moments = random.Random(0)
    seen = []
    for number in range(count):
        reads, writes = os.pipe()

        def work(writes=writes):
            newest_one = newest(folder, print)
            writer = CheckpointWriter(folder, keep=2)
            for step in range(newest_one[0].step + 1 if newest_one else 1, 10**6):
                writer.write(step, tree(step))
                if step % 3 == 0:
                    writer.close()
                    os.write(writes, step.to_bytes(4, "big"))

        pid = child(work)
        os.close(writes)
        first = os.read(reads, 4) if number % 2 else b""
        time.sleep(moments.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with os.fdopen(reads, "rb") as pipe:
            told = first + pipe.read()
        warnings = []
        newest_one = newest(folder, warnings.append)
        seen.append(
            {
                "told": int.from_bytes(told[-4:], "big"),
                "newest": newest_one[0].step if newest_one else 0,
                "whole": newest_one is None or is_whole(newest_one, 0),
                "warnings": warnings,
                "leftovers": sum(path.name.startswith(".") for path in folder.iterdir()) if folder.exists() else 0,
            }
        )
    return seen


if __name__ == "__main__":
    os.fsync = lambda number: None  # fsync is slow, and has no effect if only the process is killed
    what, where, *more = sys.argv[1:]
    print(json.dumps(every_point(Path(where)) if what == "every_point" else at_random(Path(where), int(more[0]))))
