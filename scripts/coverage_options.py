"""Check that the tests of a row of docs/coverage.yaml depend on its options: `python scripts/coverage_options.py A24`.

For every option of a row, the field is disconnected: code of the package reads its default, whatever its value is.
Tests, and the code that reads and checks configs, still read the value. The tests of the row must then fail. Each check
runs in a forked process. A process that a test starts does not see the change.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

ROOT = Path(__file__).parents[1]
READS_VALUES = ("realign.settings", "realign.config")
"""Modules of the package that check and copy settings, and therefore read their values."""


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


def field_of(option: str, roots: dict[str, str]) -> tuple[type, str] | None:
    """Return class and field of an option such as `actor.kl.coef`; None if it names a class or function."""
    names = import_module("tests.docs.test_coverage")
    root, *fields = option.split(".")
    if root == "realign" or not fields:
        return None
    place = names.imported(roots[root])
    for name in fields[:-1]:
        place = names.dataclass_in(get_type_hints(place)[name])
    return place, fields[-1]


def outcome(tests: list[str], place: tuple[type, str] | None, timeout: float) -> str:
    """Run tests with a disconnected field in a forked process.

    Returns:
        held: a test failed. not held: all passed. no default, no field: nothing to disconnect. slow: out of time.
    """
    if place is None:
        return "no field"
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        code = 9
        with suppress(BaseException), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            if not disconnect(*place):
                code = 8
            else:
                arguments = ["-x", "-q", "-p", "no:cacheprovider", *(str(ROOT / "tests" / test) for test in tests)]
                code = int(pytest.main(arguments))
        os._exit(code)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return {0: "not held", 1: "held", 8: "no default"}.get(code, f"error {code}")
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "slow"


def main() -> int:
    """Check the given rows, or all; return 1 if the tests of a row do not hold one of its options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="rows such as A24, or options of a row such as A24:gae.lam")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the tests of a row")
    given = parser.parse_args()
    data = yaml.safe_load((ROOT / "docs" / "coverage.yaml").read_text(encoding="utf-8"))
    sys.path.insert(0, str(ROOT))
    import_module("tests.tiny")  # imports the package once, for all forked processes
    counts: dict[str, int] = {}
    for row, entry in data["rows"].items():
        for option in entry.get("options", []):
            if given.rows and row not in given.rows and f"{row}:{option}" not in given.rows:
                continue
            found = outcome(entry.get("tests", []), field_of(option, data["roots"]), given.timeout)
            counts[found] = counts.get(found, 0) + 1
            print(f"{row:4} {option:45} {found}", flush=True)
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    return int("not held" in counts)


if __name__ == "__main__":
    sys.exit(main())
