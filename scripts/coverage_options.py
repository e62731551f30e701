"""Check that the tests of a row of docs/coverage.yaml depend on its options: `python scripts/coverage_options.py A24`.

For every option of a row, the field is disconnected: code of the package reads its default, whatever its value is.
Tests, and the code that reads and checks configs, still read the value. At least one test of the row must then fail.
Each test runs in a forked process. Python processes that a test starts see the change too.

Without rows it checks all of them, which takes an hour or more. `--results FILE` keeps the result of every run of a
test, and the next call reads them instead of running the test again. Delete the file after you change code or tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from inspect import getsource
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parents[1]
READS_VALUES = ("realign.settings", "realign.config")
"""Modules of the package that check and copy settings, and therefore read their values."""
PASSED, FAILED, SKIPPED, OTHER = range(4)
"""Exit codes of a run of a test."""
Place = tuple[type, str]
"""Class and name of a field."""
Row = tuple[str, str, list[str]]
"""Row, option, and the tests of the row."""


class Disconnected:
    """A field whose value the package does not see: it reads the default."""

    def __init__(self, name: str, field: dataclasses.Field[Any]) -> None:
        self.name, self.field = name, field

    def default(self) -> Any:
        """Return the default of the field."""
        if self.field.default is not dataclasses.MISSING:
            return self.field.default
        return self.field.default_factory()  # type: ignore[misc]

    def __get__(self, instance: Any, owner: type) -> Any:
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if instance is None or (reader.startswith("realign.") and not reader.startswith(READS_VALUES)):
            return self.default()
        return instance.__dict__[self.name]

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self.name] = value


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Return whether a field has a default."""
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def with_subclasses(cls: type) -> Iterator[type]:
    """Yield a class and all classes that derive from it."""
    yield cls
    for child in cls.__subclasses__():
        yield from with_subclasses(child)


def disconnect(cls: type, name: str) -> bool:
    """Disconnect a field of a dataclass and of its subclasses; return whether the field has a default."""
    if not has_default(cls.__dataclass_fields__[name]):  # type: ignore[attr-defined]
        return False
    for each in with_subclasses(cls):
        setattr(each, name, Disconnected(name, each.__dataclass_fields__[name]))  # type: ignore[attr-defined]
    return True


def disconnect_when_defined(module: str, cls: str, name: str) -> None:
    """Disconnect a field of a dataclass of a module that will be imported, and of its subclasses."""
    original = dataclasses.dataclass

    def dataclass(made: type | None = None, /, **options: Any) -> type | Callable[[type], type]:
        if made is None:
            return lambda later: changed(original(later, **options))
        return changed(original(made, **options))

    def changed(made: type) -> type:
        if any((base.__module__, base.__qualname__) == (module, cls) for base in made.__mro__):
            setattr(made, name, Disconnected(name, made.__dataclass_fields__[name]))  # type: ignore[attr-defined]
        return made

    dataclasses.dataclass = dataclass  # type: ignore[assignment]


def start_file(place: Place) -> str:
    """Return a `sitecustomize.py` that disconnects a field in every Python process that has it on its path."""
    cls, name = place
    code = ["from __future__ import annotations", "import dataclasses, sys", f"READS_VALUES = {READS_VALUES!r}"]
    code += [getsource(Disconnected), getsource(disconnect_when_defined)]
    return "\n".join([*code, f"disconnect_when_defined({cls.__module__!r}, {cls.__qualname__!r}, {name!r})", ""])


def field_of(option: str, roots: dict[str, str]) -> Place | None:
    """Return class and field of an option such as `actor.kl.coef`; None if it names a class or function."""
    names = import_module("tests.docs.test_coverage")
    root, *fields = option.split(".")
    if root == "realign" or not fields:
        return None
    place = names.imported(roots[root])
    for name in fields[:-1]:
        place = names.dataclass_in(get_type_hints(place)[name])
    return place, fields[-1]


def run_items(items: list[pytest.Item], place: Place | None, folder: str) -> int:
    """Run the collected cases of a test in this process, with a disconnected field; return an exit code."""
    if place is not None:
        disconnect(*place)
        Path(folder, "sitecustomize.py").write_text(start_file(place), encoding="utf-8")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    passed = False
    for item, after in zip(items, [*items[1:], None], strict=True):
        reports = runtestprotocol(item, log=False, nextitem=after)
        if any(report.failed for report in reports):
            return FAILED
        passed |= any(report.when == "call" and report.passed for report in reports)
    return PASSED if passed else SKIPPED


def outcome(items: list[pytest.Item], place: Place | None, timeout: float) -> tuple[str, float]:
    """Run the cases of a test with a disconnected field, or with none, in a forked process.

    Returns:
        passed, failed, skipped, slow (out of time), not found, or the exit code of another error. And its CPU seconds.
    """
    if not items:
        return "not found", 0.0
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            code = OTHER
            with suppress(BaseException):
                code = run_items(items, place, folder)
            os._exit(code)
        try:
            return wait_for(child, timeout)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # also the processes that the test started


def wait_for(child: int, timeout: float) -> tuple[str, float]:
    """Return the outcome of a process of `run_items` and its CPU seconds, or `slow` and the timeout."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        found, status, used = os.wait4(child, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            name = {PASSED: "passed", FAILED: "failed", SKIPPED: "skipped"}.get(code, f"error {code}")
            return name, round(used.ru_utime + used.ru_stime, 2)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "slow", timeout


class Results:
    """Runs tests with disconnected fields, and keeps their outcomes and seconds of CPU time, also in a file."""

    def __init__(self, file: Path | None, timeout: float, longest: float = float("inf")) -> None:
        self.file, self.timeout, self.longest = file, timeout, longest
        self.items: dict[str, list[pytest.Item]] = {}
        self.known: dict[tuple[str, str], tuple[str, float]] = {}
        if file is not None and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                test, field, *result = json.loads(line)
                self.known[test, field] = (result[0], result[1])

    def of(self, test: str, place: Place | None) -> str:
        """Return the outcome of a test with a disconnected field, or with none."""
        field = "" if place is None else f"{place[0].__module__}.{place[0].__qualname__}.{place[1]}"
        if (test, field) not in self.known:
            if self.cost(test) > self.longest:
                return "too long"
            result = outcome(self.items.get(test, []), place, self.timeout)
            self.known[test, field] = result
            if self.file is not None:
                with self.file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps([test, field, *result]) + "\n")
        return self.known[test, field][0]

    def cost(self, test: str) -> float:
        """Return the seconds of the longest run of a test, 0 before the first one."""
        return max((seconds for (name, _), (_, seconds) in self.known.items() if name == test), default=0.0)


def check(results: Results, tests: list[str], place: Place | None) -> tuple[str, str]:
    """Return whether tests need a field, and the test that shows it.

    Returns:
        held: the test passes, and fails with the field disconnected. not held: no test failed. unclear: no test failed,
        and the named tests did not run to their end. no default, no field: nothing to disconnect.
    """
    if place is None:
        return "no field", ""
    if not has_default(place[0].__dataclass_fields__[place[1]]):  # type: ignore[attr-defined]
        return "no default", ""
    unclear = []
    for test in sorted(tests, key=results.cost):
        found = results.of(test, place)
        intact = results.of(test, None) if found == "failed" else "passed"
        if found == "failed" and intact == "passed":
            return "held", test
        if found != "passed":
            unclear.append(f"{test} ({found}, with the option {intact})" if intact != "passed" else f"{test} ({found})")
    return ("unclear" if unclear else "not held"), ", ".join(unclear)


class Checks:
    """A plugin of pytest: instead of running each collected test once, it checks the options of rows."""

    def __init__(self, rows: list[Row], roots: dict[str, str], results: Results) -> None:
        self.rows, self.roots, self.results = rows, roots, results
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Collect the tests of the rows, check the options, and return the number of options by what was found."""
        tests = sorted({str(ROOT / "tests" / test) for _, _, tests in self.rows for test in tests})
        arguments = ["-q", "-m", "", "-p", "no:cacheprovider", "--continue-on-collection-errors", *tests]
        if pytest.main(arguments, plugins=[self]) == pytest.ExitCode.USAGE_ERROR:
            raise SystemExit("A test of the rows does not exist. Run tests/docs/test_coverage.py to find its row.")
        return self.counts

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Check every option, and print what was found."""
        for item in session.items:
            name = item.nodeid.removeprefix("tests/").partition("[")[0]
            self.results.items.setdefault(name, []).append(item)
        for row, option, tests in self.rows:
            found, test = check(self.results, tests, field_of(option, self.roots))
            self.counts[found] += 1
            print(f"{row:4} {option:45} {found:9} {test}".rstrip(), flush=True)
        return True


def selected(data: dict[str, Any], names: list[str]) -> list[Row]:
    """Return row, option and tests of the options to check: those of the given rows, or all."""
    every = [
        (row, option, entry.get("tests", []))
        for row, entry in data["rows"].items()
        for option in entry.get("options", [])
    ]
    return [each for each in every if not names or each[0] in names or f"{each[0]}:{each[1]}" in names]


def main() -> int:
    """Check the given rows, or all; return 1 if the tests of a row do not hold one of its options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="rows such as A24, or options of a row such as A24:gae.lam")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one run of a test")
    parser.add_argument(
        "--longest", type=float, default=float("inf"), help="skip tests that used more CPU seconds before"
    )
    parser.add_argument("--results", type=Path, help="file of results, to continue a check that was ended")
    given = parser.parse_args()
    data = yaml.safe_load((ROOT / "docs" / "coverage.yaml").read_text(encoding="utf-8"))
    sys.path.insert(0, str(ROOT))
    rows = selected(data, given.rows)
    if not rows:
        parser.error(f"no options in {', '.join(given.rows)}. Name rows of docs/coverage.yaml, such as A24")
    counts = Checks(rows, data["roots"], Results(given.results, given.timeout, given.longest)).run()
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    return int("not held" in counts)


if __name__ == "__main__":
    sys.exit(main())
