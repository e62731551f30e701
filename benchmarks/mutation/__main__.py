"""Mutation testing: how many small changes of the arithmetic and the wiring the tests notice.

    make mutation                                                  # 400 mutants, at most 60 minutes
    python -m benchmarks.mutation folder=runs/mutation             # keeps results; the same command continues
    python -m benchmarks.mutation files=functional/kl,interfaces/ppo mutants=50
    python -m benchmarks.mutation only=runs/mutation/survivors.txt # reruns mutants by id, one in each line

The mutants are a seeded sample, stratified by file, of all mutants of `realign/functional`, `realign/interfaces` and
`realign/interfaces/components`. Each runs the test files that import the mutated file, its mirror first and the others
from the fastest to the slowest, until a test fails. A first run without mutants measures each test file. Test files
that fail, or take longer than `slowest` seconds (mirrors: 4 times as long), are left out and listed. A mutant runs at
most `budget` seconds of test files, not counting the mirror.

With `folder`, a later run repeats a killed mutant only if its file has changed, and a survivor also if its tests have.
`explained.jsonl` beside this file lists survivors that no test can kill, each as an object with `file`, `where`,
`change` (as in the results) and `why`.

Prints a table of the files, the survivors and, as the last line, one JSON object. The score is the fraction of killed
mutants, with its 95% interval (Wilson); a mutant that exceeds its time limit counts as killed. The exit code is 1 if a
survivor is not explained.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.mutation.mutants import Mutant, mutants, required_parameters, sample
from benchmarks.mutation.records import Measured, Results
from benchmarks.mutation.runner import PRELOADED, Job, Outcome, Runner
from benchmarks.mutation.selection import Project
from benchmarks.report import arguments, facts, table

DEFAULTS = {
    "mutants": "400",
    "seed": "0",
    "workers": "2",
    "minutes": "60",
    "slowest": "20",
    "budget": "60",
    "folder": "",
    "files": "",
    "only": "",
}
EXPLAINED = Path(__file__).with_name("explained.jsonl")
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
KILLED = ("failed", "timeout")
MIRROR = 4
"""Times of `slowest` that the mirror of a mutated file may take."""


@dataclass(frozen=True)
class Target:
    """The project whose tests are measured."""

    root: Path = Path(__file__).resolve().parents[2]
    package: str = "realign"
    folders: tuple[str, ...] = ("functional", "interfaces", "interfaces/components")
    """Folders of the package whose files are mutated."""
    preloaded: tuple[str, ...] = PRELOADED
    """Modules that the processes of the tests share."""

    def mutants(self, words: Sequence[str]) -> dict[str, list[Mutant]]:
        """Return all mutants by file, of the files whose path contains one of the words; of all without words."""
        package = self.root / self.package
        required = required_parameters(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
        found = {}
        for path in (path for folder in self.folders for path in sorted((package / folder).glob("*.py"))):
            file = path.relative_to(self.root).as_posix()
            if not words or any(word in file for word in words):
                found[file] = mutants(file, path.read_text(encoding="utf-8"), required)
        return found


def chosen(found: dict[str, list[Mutant]], words: dict[str, str]) -> list[Mutant]:
    """Return the mutants to run: the sample, or those whose ids a file lists."""
    if not words["only"]:
        return sample(found, int(words["mutants"]), int(words["seed"]))
    ids = [line.split()[0] for line in Path(words["only"]).read_text().splitlines() if line.strip()]
    known = {mutant.id: mutant for each in found.values() for mutant in each}
    if unknown := [name for name in ids if name not in known]:
        sys.exit(f"only={words['only']}: no mutant has the id {unknown[0]}. Sample again if the file has changed.")
    return [known[name] for name in ids]


def affordable(tests: Sequence[str], mirror: str, measured: Measured, budget: float) -> list[str]:
    """Return the usable test files in the order to run them, without those that exceed the budget."""
    kept, spent = [], 0.0
    for test in sorted(filter(measured.usable, tests), key=lambda test: (test != mirror, measured.seconds(test))):
        spent += measured.seconds(test) if test != mirror else 0.0
        if spent <= budget:
            kept.append(test)
    return kept


def measure(runner: Runner, measured: Measured, shown: Console) -> None:
    """Run each test file once without a mutant, if that is not known."""
    missing = measured.missing()
    with Progress(*COLUMNS, console=shown) as progress:
        bar = progress.add_task("test files without a mutant", total=len(missing))

        def report(job: Job, outcome: Outcome) -> None:
            measured.note(job, outcome)
            progress.update(bar, advance=1)

        runner.run((Job(test, [test], measured.bounds[test]) for test in missing), report)
    for test in measured.bounds:
        if measured.found[test]["result"] == "failed":
            shown.print(f"{test} fails without a mutant:\n{measured.found[test]['log'][-1500:]}", markup=False)


def run_mutants(
    runner: Runner, results: Results, plan: Sequence[tuple[Mutant, list[str]]], limits: Sequence[float], end: float
) -> None:
    """Run mutants until all are done or the time is up, and store each result.

    Args:
        runner: runs the tests.
        results: receives the results.
        plan: the mutants with their test files.
        limits: seconds that each may take.
        end: time of the monotonic clock after which no further mutant starts.
    """
    mutant_of = {mutant.id: (mutant, tests) for mutant, tests in plan}
    counts: Counter[str] = Counter()
    with Progress(*COLUMNS, console=Console(stderr=True)) as progress:
        bar = progress.add_task("mutants", total=len(plan))

        def jobs() -> Iterator[Job]:
            for (mutant, tests), limit in zip(plan, limits, strict=True):
                if time.monotonic() < end:
                    compile(mutant.mutated, mutant.file, "exec")
                    yield Job(mutant.id, tests, limit, (mutant.file, mutant.mutated))

        def report(job: Job, outcome: Outcome) -> None:
            results.add(*mutant_of[job.name], outcome)
            counts["killed" if outcome.result in KILLED else "survived"] += 1
            text = f"mutants ({counts['killed']} killed, {counts['survived']} survived)"
            progress.update(bar, advance=1, description=text)

        runner.run(jobs(), report)


def interval(killed: int, total: int) -> list[float]:
    """Return the 95% interval of a fraction (Wilson)."""
    if not total:
        return [0.0, 1.0]
    z, p = 1.96, killed / total
    center, spread = p + z * z / (2 * total), z * math.sqrt(p * (1 - p) / total + (z / (2 * total)) ** 2)
    return [round((center + sign * spread) / (1 + z * z / total), 4) for sign in (-1, 1)]


def by_file(records: Sequence[dict[str, Any]]) -> str:
    """Return the table of the files."""
    counts: dict[str, Counter[str]] = {}
    for record in records:
        counts.setdefault(record["file"], Counter())[record["result"]] += 1
    names = ("killed", "timeout", "survived")
    rows = [(file, str(each.total()), *(str(each[name]) for name in names)) for file, each in sorted(counts.items())]
    return table(("file", "mutants", "killed", "timeouts", "survived"), rows)


def explanations(path: Path) -> dict[tuple[str, str, str], str]:
    """Return why survivors cannot be killed, by file, place and change."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.strip()]
    return {(each["file"], each["where"], each["change"]): each["why"] for each in found}


def summarize(records: Sequence[dict[str, Any]], left_out: dict[str, str], folder: Path) -> dict[str, Any]:
    """Print the table and the survivors, write their ids, and return the numbers."""
    why = explanations(EXPLAINED)
    survivors = sorted((each for each in records if each["result"] == "survived"), key=lambda each: each["id"])
    reasons = [why.get((each["file"], each["where"], each["change"]), "") for each in survivors]
    print(by_file(records))
    for test, reason in left_out.items():
        print(f"left out: {test} ({reason})")
    for each, reason in zip(survivors, reasons, strict=True):
        untested = "" if each["tests"] else "\n    no test file imports it"
        print(f"{each['id']} in {each['where'] or 'the module'}\n    {each['change']}{untested}")
        print(f"    explained: {reason}" if reason else "    not explained")
    (folder / "survivors.txt").write_text("".join(f"{each['id']}  # {each['change']}\n" for each in survivors))
    counts = Counter(each["result"] for each in records)
    killed = counts["killed"] + counts["timeout"]
    return {
        "sample": len(records),
        "killed": killed,
        "timeouts": counts["timeout"],
        "survived": counts["survived"],
        "explained": sum(map(bool, reasons)),
        "score": round(killed / len(records), 4) if records else None,
        "interval": interval(killed, len(records)),
        "left_out": list(left_out),
    }


def test_mutants(target: Target, words: dict[str, str], folder: Path) -> dict[str, Any]:
    """Measure the test files, run the mutants, and return the numbers."""
    end = time.monotonic() + 60 * float(words["minutes"])
    project = Project(target.root, target.package)
    found = target.mutants([word for word in words["files"].split(",") if word])
    drawn = chosen(found, words)
    tests_of = {file: project.tests_of(file) for file in {mutant.file for mutant in drawn}}
    slowest, mirrors = float(words["slowest"]), set(map(project.mirror, tests_of))
    tests = sorted({test for each in tests_of.values() for test in each})
    bounds = {test: slowest * (MIRROR if test in mirrors else 1) for test in tests}
    measured = Measured(target.root, target.package, folder / "tests.json", bounds)
    results = Results(target.root, folder / "results.jsonl")
    with tempfile.TemporaryDirectory() as copies:
        runner = Runner(target.root, target.package, Path(copies), int(words["workers"]), target.preloaded)
        measure(runner, measured, Console(stderr=True))
        kept = {f: affordable(t, project.mirror(f), measured, float(words["budget"])) for f, t in tests_of.items()}
        plan = [(mutant, kept[mutant.file]) for mutant in drawn]
        due = plan if words["only"] else [each for each in plan if not results.is_current(*each)]
        # A busy machine may slow a test down several times; a loop without end is still found.
        limits = [60 + 5 * sum(map(measured.seconds, tests)) for _, tests in due]
        run_mutants(runner, results, due, limits, end)
    done = [results.found[mutant.id] for mutant, tests in plan if results.is_current(mutant, tests)]
    return {
        "mutants": sum(map(len, found.values())),
        "complete": len(done) == len(drawn),
        **summarize(done, measured.left_out(), folder),
    }


def main(given: Sequence[str] | None = None, target: Target | None = None) -> int:
    """Run it; 1 if a survivor is not explained."""
    words, start = arguments(DEFAULTS, given), time.time()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(words["folder"] or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        result = test_mutants(target or Target(), words, folder)
    good = result["survived"] == result["explained"]
    print(
        json.dumps(
            {"good": good, **result, "seed": int(words["seed"]), "seconds": round(time.time() - start), **facts()}
        )
    )
    return not good


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the workers too
    sys.exit(main())
