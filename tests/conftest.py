"""What all tests start from, however the suite itself was started, and what to install for the tests that skip."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from realign.demo.tiny import Task

# On a busy machine an example may take any time. `make test-slow` has the profile `full`.
UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("fast", max_examples=15, **UNTIMED)
hypothesis.settings.register_profile("full", max_examples=100, **UNTIMED)
hypothesis.settings.load_profile("fast")

# Tests compare with results of CPUs. Hidden before torch asks, also from processes that tests start.
if not {"tests.virtual_cuda.plugin", "tests.virtual_cuda.real"} & sys.modules.keys():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Before huggingface_hub is imported: asking the hub for a model that isn't here takes 24 s without network.
os.environ["HF_HUB_OFFLINE"] = "1"

INSTALL = {"bwrap is not installed": "bubblewrap", "no C++ compiler is installed": "g++"}
"""Part of the reason of a skip, and the Debian package that the test needs."""


def pytest_configure() -> None:
    # A shell starts background jobs with SIGINT ignored, `nohup` also SIGHUP, and all children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # the longest tests come first: one that begins last keeps one worker after all others are done
    items.sort(key=lambda item: item.get_closest_marker("virtual_cuda") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Visit the millions of objects of modules and tests in no garbage collection: they stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)  # by default, collections take a fifth of the time of the tests
        gc.enable()


@pytest.hookimpl(optionalhook=True)  # without xdist
def pytest_xdist_auto_num_workers() -> int:
    """Return the workers of `-n auto`. Tests wait for processes a third of the time, so more workers than cores run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, 3 * cores // 2)


def package_of(report: pytest.TestReport) -> str | None:
    """Return the Debian package without which the test was skipped; None if it has another reason or was not."""
    return next(
        (package for reason, package in INSTALL.items() if report.skipped and reason in str(report.longrepr)), None
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that skips for want of a package that REQUIRED_PACKAGES names, as .ci/run does."""
    report = yield
    package = package_of(report)
    if package is not None and package in os.environ.get("REQUIRED_PACKAGES", "").split():
        report.outcome, report.longrepr = "failed", f"REQUIRED_PACKAGES names {package}: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    packages = Counter(filter(None, map(package_of, terminalreporter.stats.get("skipped", []))))
    for package, tests in packages.items():
        terminalreporter.write_line(
            f"{tests} tests were skipped. Run `apt-get install {package}` to run them.", yellow=True
        )


@pytest.fixture(autouse=True, scope="session")
def blank_curves() -> Iterator[None]:
    """Let runs write a picture without curves. Drawing them would take most of the time of the runs in tests."""
    from realign.runtime import training

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "draw_curves", lambda phases, path, **_: path.write_bytes(b"\x89PNG\r\n\x1a\n"))
        yield


@pytest.fixture(autouse=True, scope="module")
def same_threads() -> Iterator[None]:
    """Undo what tests of a module leave as the number of threads. With two, small tensors take far longer."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def drawn_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of this test draw their curves."""
    from realign.records.metrics.curves import draw_curves

    monkeypatch.setattr("realign.runtime.training.draw_curves", draw_curves)


@pytest.fixture
def reasoning_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a substitute of reasoning-gym."""
    from tests.demo.reasoning_package import installed  # only a few tests need what it imports

    yield from installed(tmp_path / "packages", monkeypatch)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the models and data of `tests.checkpoint_runs`. Tests only read it."""
    from tests.checkpoint_runs import save_files

    return save_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """Return the demo's additions with few prompts. Tests only read it."""
    from tests.small_task import small_task

    return small_task(tmp_path_factory.mktemp("task"))
