"""What earlier runs have found, on disk: seconds of test files, and results of mutants."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.mutation.mutants import Mutant
from benchmarks.mutation.runner import Job, Outcome, digest


class Measured:
    """Seconds of each test file without a mutant, kept between runs while the files are the same."""

    def __init__(self, root: Path, package: str, path: Path, bounds: Mapping[str, float]) -> None:
        """Read what an earlier run has measured.

        Args:
            root: folder of the project.
            package: name of its package.
            path: file of the measurements.
            bounds: test files, with the seconds after which each is left out.
        """
        self.root, self.path, self.bounds = root, path, bounds
        helpers = (each for each in (root / "tests").rglob("*.py") if not each.name.startswith("test_"))
        self.shared = digest(*sorted((root / package).rglob("*.py")), *sorted(helpers))
        self.found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def version(self, test: str) -> str:
        """Return a hash of all that the result of a test file depends on."""
        return f"{self.shared} {digest(self.root / test)}"

    def missing(self) -> list[str]:
        """Return the test files to measure."""
        return [test for test in self.bounds if not self._known(test)]

    def note(self, job: Job, outcome: Outcome) -> None:
        """Store the measurement of a test file."""
        found = {"version": self.version(job.name), "result": outcome.result, "failed": outcome.failed}
        self.found[job.name] = {**found, "seconds": round(outcome.seconds, 2), "log": outcome.log}
        self.path.write_text(json.dumps(self.found))

    def usable(self, test: str) -> bool:
        """Return whether a test file passes in time."""
        return self.found[test]["result"] == "passed" and self.found[test]["seconds"] <= self.bounds[test]

    def seconds(self, test: str) -> float:
        """Return the seconds of a test file."""
        return float(self.found[test]["seconds"])

    def left_out(self) -> dict[str, str]:
        """Return the test files that are not usable, with the reason."""
        return {
            test: "fails without a mutant" if self.found[test]["result"] == "failed" else f"takes more than {bound:g} s"
            for test, bound in self.bounds.items()
            if not self.usable(test)
        }

    def _known(self, test: str) -> bool:
        found = self.found.get(test)
        if found is None or found["version"] != self.version(test):
            return False
        late = found["result"] == "timeout" and found["seconds"] >= self.bounds[test]
        return found["result"] == "passed" or late


class Results:
    """Results of mutants, kept in a file of JSON lines."""

    def __init__(self, root: Path, path: Path) -> None:
        self.root, self.path = root, path
        lines = path.read_text().splitlines() if path.exists() else []
        self.found: dict[str, dict[str, Any]] = {each["id"]: each for each in map(json.loads, lines)}

    def add(self, mutant: Mutant, tests: Sequence[str], outcome: Outcome) -> None:
        """Store the result of a mutant."""
        record = {
            "id": mutant.id,
            "result": {"passed": "survived", "failed": "killed"}.get(outcome.result, outcome.result),
            "file": mutant.file,
            "where": mutant.where,
            "change": mutant.change,
            "failed": outcome.failed,
            "seconds": round(outcome.seconds, 2),
            "tests": list(tests),
            "file_version": digest(self.root / mutant.file),
            "tests_version": self._version(tests),
        }
        self.found[mutant.id] = record
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def is_current(self, mutant: Mutant, tests: Sequence[str]) -> bool:
        """Return whether a stored result is that of the current files."""
        record = self.found.get(mutant.id)
        if record is None or record["file_version"] != digest(self.root / mutant.file):
            return False
        return record["result"] != "survived" or record["tests_version"] == self._version(tests)

    def _version(self, tests: Sequence[str]) -> str:
        return digest(*(self.root / test for test in tests))
