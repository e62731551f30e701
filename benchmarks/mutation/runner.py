"""Test files run in forked processes, each on a copy of the project in which one file may be mutated.

The processes are forked from one that has imported the packages which tests use, but nothing of the project. The
working tree is never changed, and changes to it during a run have no effect.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

PRELOADED = (
    "torch",
    "torch._dynamo",
    "numpy",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "safetensors.torch",
    "hypothesis",
    "hypothesis.strategies",
    "hydra",
    "omegaconf",
    "pytest",
    "rich.progress",
)
MEMORY = 12 * 2**30
"""Bytes of data that a process may allocate."""
START_LIMIT = 600
"""Seconds in which the preloaded modules must be imported. They are not part of the time of the first test file."""
NOT_COPIED = (".*", "__pycache__", "runs", "outputs", "multirun", "dist", "build")
OK, NO_TESTS = 0, 5
"""Exit codes of pytest without a failure."""


class Job(NamedTuple):
    """Test files to run in order until one fails."""

    name: str
    tests: Sequence[str]
    limit: float
    """Seconds after which the process is killed."""
    mutated: tuple[str, str] | None = None
    """Path of a file and its text during the run."""


@dataclass
class Outcome:
    """The result of a job."""

    result: str = "passed"
    """passed, failed or timeout."""
    failed: str = ""
    """The first test that failed."""
    seconds: float = 0.0
    log: str = ""
    """End of the output."""


@dataclass
class Worker:
    """A copy of the project, and the process that uses it now."""

    folder: Path
    job: Job | None = None
    process: ForkServerProcess | None = None
    results: Connection | None = None
    outcome: Outcome = field(default_factory=Outcome)
    started: float = 0.0

    @property
    def copy(self) -> Path:
        """The root of the copy."""
        return self.folder / "project"


def digest(*paths: Path) -> str:
    """Return a hash of the contents of files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


class Runner:
    """Workers that run jobs concurrently."""

    def __init__(self, root: Path, package: str, folder: Path, workers: int, preloaded: Sequence[str]) -> None:
        """Copy the project for each worker.

        Args:
            root: folder of the project.
            package: name of its package.
            folder: an empty folder for the copies.
            workers: number of concurrent processes.
            preloaded: modules that the processes share.
        """
        self.package, self.stamps = package, itertools.count(1)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(list(preloaded))
        self.workers = [Worker(folder / str(i)) for i in range(workers)]
        for worker in self.workers:
            shutil.copytree(root, worker.copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        self.run([Job("start", [], START_LIMIT)], lambda job, outcome: None)

    def run(self, jobs: Iterable[Job], report: Callable[[Job, Outcome], None]) -> None:
        """Run all jobs and report each one when it ends."""
        queue = iter(jobs)
        try:
            while True:
                for worker in self.workers:
                    if worker.job is None and (job := next(queue, None)) is not None:
                        self._start(worker, job)
                busy = [worker for worker in self.workers if worker.job is not None]
                if not busy:
                    break
                self._wait(busy, report)
        finally:
            for worker in self.workers:
                self._stop(worker)

    def _start(self, worker: Worker, job: Job) -> None:
        if job.mutated is not None:
            self._write(worker.copy / job.mutated[0], job.mutated[1])
        receiving, sending = self.context.Pipe(duplex=False)
        worker.job, worker.results, worker.outcome, worker.started = job, receiving, Outcome(), time.monotonic()
        process = self.context.Process(target=run_tests, args=(worker.folder, self.package, job, sending))
        process.start()
        sending.close()
        worker.process = process

    def _write(self, path: Path, text: str) -> None:
        """Write a source with a time that no other version of it has, or cached bytecode would be used instead."""
        path.with_suffix(".original").unlink(missing_ok=True)
        shutil.copy2(path, path.with_suffix(".original"))
        moment = path.stat().st_mtime + next(self.stamps)
        path.write_text(text, encoding="utf-8")
        os.utime(path, (moment, moment))

    def _wait(self, busy: list[Worker], report: Callable[[Job, Outcome], None]) -> None:
        """Receive what arrives within a second, and end the jobs that are over."""
        wait([worker.results for worker in busy if worker.results is not None], timeout=1)
        for worker in busy:
            over = self._receive(worker)
            late = worker.job is not None and time.monotonic() - worker.started > worker.job.limit
            if worker.job is not None and (over or late):
                if not over:
                    worker.outcome.result = "timeout"
                job, outcome = worker.job, worker.outcome
                outcome.seconds = time.monotonic() - worker.started
                outcome.log = self._log(worker)
                self._stop(worker)
                report(job, outcome)

    def _receive(self, worker: Worker) -> bool:
        """Take the results that have arrived, and return whether the process has sent its last one."""
        assert worker.results is not None
        try:
            while worker.results.poll():
                worker.outcome.result, worker.outcome.failed = worker.results.recv()
                return True
        except EOFError:  # died, such as from a lack of memory
            worker.outcome.result, worker.outcome.failed = "failed", "the process died"
            return True
        return False

    def _stop(self, worker: Worker) -> None:
        """End the processes of a worker, and restore its copy."""
        if worker.process is not None:
            assert worker.process.pid is not None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.kill()
            worker.process.join()
        if worker.results is not None:
            worker.results.close()
        if worker.job is not None and worker.job.mutated is not None:
            path = worker.copy / worker.job.mutated[0]
            path.with_suffix(".original").replace(path)
        worker.job = worker.process = worker.results = None

    def _log(self, worker: Worker) -> str:
        path = worker.folder / "log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""


class FirstFailure:
    """A pytest plugin that remembers the first test that failed."""

    def __init__(self) -> None:
        self.test = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Remember a failed test."""
        if report.failed and not self.test:
            self.test = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        """Remember a file that cannot be imported."""
        if report.failed and not self.test:
            self.test = report.nodeid


def run_tests(folder: Path, package: str, job: Job, results: Connection) -> None:
    """Run the test files of a job in this process, one after the other until one fails, and send the result."""
    os.setsid()
    processor_s = int(job.limit) + 10  # ends an endless loop also after the parent has been killed
    resource.setrlimit(resource.RLIMIT_CPU, (processor_s, processor_s))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    copy = folder / "project"
    with (folder / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _use(copy, package)
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={copy}", f"--basetemp={folder / 'tmp'}"]
    result = ("passed", "")
    for test in job.tests:
        first = FirstFailure()
        code = pytest.main([*options, test], plugins=[first])
        if code not in (OK, NO_TESTS):
            result = ("failed", first.test or test)
            break
    results.send(result)
    sys.stdout.flush()
    os._exit(0)  # threads and pools that a mutant has left behind do not matter


def _use(copy: Path, package: str) -> None:
    """Make a copy of the project the one that this process and its children import."""
    os.chdir(copy)
    sys.path[:] = [
        str(copy),
        *(each for each in sys.path if each and not (Path(each) / package / "__init__.py").exists()),
    ]
    for name in [each for each in sys.modules if each.partition(".")[0] in (package, "tests", "benchmarks")]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(copy.parent / "hypothesis")
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "mutation",
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),  # a failure is enough: it need not be small
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("mutation")
