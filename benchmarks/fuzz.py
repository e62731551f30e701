"""Coverage-guided fuzzing (atheris) of the targets in `tests/fuzz`, for a limited time. Prints one JSON line.

    python -m benchmarks.fuzz                                  # all targets, one minute in total
    python -m benchmarks.fuzz seconds=600 targets=test_files   # targets whose names contain one of these words
    python -m benchmarks.fuzz replay=FILE                      # run one failing input again

The first byte of an input selects the target. hypothesis draws its examples from the other bytes. Inputs that reach new
branches of realign are kept and mutated. Without atheris, bytes are drawn at random, and the JSON object says so. To
install it, run `pip install -c benchmarks/constraints.txt atheris`. A failing target is reported with its input, and
excluded from the rest of the search.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import arguments, facts, table

MODULES = ("test_samples", "test_plans", "test_files", "test_configs", "test_checkpoints")
LONGEST = 2048
"""Maximum size of an input in bytes."""
SEEDS = 8
"""Number of random initial inputs per target."""
FAILED = 77
"""Exit code of a process that found a failing input, as in libFuzzer."""


def all_targets() -> dict[str, Any]:
    """Return the tests that use hypothesis, by `module.test`."""
    found = {}
    for module in MODULES:
        tests = importlib.import_module(f"tests.fuzz.{module}")
        found |= {f"{module}.{name}": test for name, test in vars(tests).items() if hasattr(test, "hypothesis")}
    return found


def dispatch(tests: dict[str, Any], counts: dict[str, int]) -> Callable[[bytes], None]:
    """Return a function that runs an input on the target that its first byte selects, and counts valid examples."""
    names = list(tests)
    calls = [tests[name].hypothesis.fuzz_one_input for name in names]

    def one_input(data: bytes) -> None:
        if data:
            index = data[0] % len(names)
            taken = calls[index](data[1:])  # None: too short, or a rejected example
            counts[names[index]] = counts.get(names[index], 0) + (taken is not None)

    return one_input


def search(folder: Path, names: list[str], seconds: int, seed: int) -> None:
    """Search in this process. A failing input is written to `folder/crash-...`, and the process exits with `FAILED`."""
    guided = importlib.util.find_spec("atheris") is not None
    if guided:
        import atheris

        with atheris.instrument_imports(include=["realign"], enable_loader_override=False):
            tests = all_targets()
    else:
        tests = all_targets()
    counts: dict[str, int] = {}
    tried = 0
    draw = random.Random(seed)
    one_input = dispatch({name: tests[name] for name in names}, counts)

    def counted(data: bytes) -> None:
        try:
            one_input(data)
        except Exception as error:
            target = names[data[0] % len(names)]
            text = " ".join(str(error).split())[:300]
            (folder / "failure.json").write_text(
                json.dumps({"target": target, "error": f"{type(error).__name__}: {text}"})
            )
            raise
        finally:
            nonlocal tried
            tried += 1
            if tried % 64 == 1:
                (folder / "counts.json").write_text(json.dumps(counts))

    if guided:
        corpus = folder / "corpus"
        corpus.mkdir(exist_ok=True)
        for first in range(SEEDS * len(names)):  # libFuzzer starts from the empty input, which is not an example
            (corpus / f"seed_{first}").write_bytes(bytes([first % len(names)]) + draw.randbytes(LONGEST - 1))
        options = [f"-max_total_time={seconds}", f"-max_len={LONGEST}", f"-seed={seed + 1}", "-rss_limit_mb=6144"]
        options += ["-len_control=0"]
        atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={folder}/", str(corpus)], counted)
        atheris.Fuzz()  # exits the process
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data = draw.randbytes(draw.randrange(1, LONGEST))
        try:
            counted(data)
        except Exception:
            (folder / "crash-random").write_bytes(data)
            sys.exit(FAILED)


def replay(file: Path) -> None:
    """Run one input again and raise its error."""
    target, data = file.name.partition("-")[0], file.read_bytes()
    all_targets()[target].hypothesis.fuzz_one_input(data[1:])
    print(f"{target} passes on {file}")


def main() -> int:
    """Run search processes in sequence until the time is over."""
    args = arguments({"seconds": "60", "targets": "", "seed": "0", "folder": "", "child": "", "replay": ""})
    if args["replay"]:
        replay(Path(args["replay"]))
        return 0
    if args["child"]:
        search(Path(args["folder"]), args["child"].split(","), int(args["seconds"]), int(args["seed"]))
        return 0
    words = [word for word in args["targets"].split(",") if word]
    left = [name for name in all_targets() if not words or any(word in name for word in words)]
    if not left:
        sys.exit(f"targets={args['targets']}: no target has a name that contains one of these words.")
    names, end = list(left), time.monotonic() + float(args["seconds"])
    kept = Path(args["folder"] or tempfile.mkdtemp(prefix="fuzz_"))
    kept.mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}
    inputs: dict[str, int] = {}
    coverage = 0
    with Console(stderr=True).status("searching") as status, tempfile.TemporaryDirectory() as work:
        while left and (seconds := round(end - time.monotonic())) > 0:
            status.update(f"searching {len(left)} targets, {seconds} s left, {len(failures)} failed")
            words = [f"seconds={seconds}", f"seed={args['seed']}", f"folder={work}", f"child={','.join(left)}"]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.fuzz", *words], capture_output=True, text=True, check=False
            )
            branches = [int(found) for found in re.findall(r"cov: (\d+)", done.stderr)]
            coverage = max([coverage, *branches])
            with contextlib.suppress(FileNotFoundError):
                for name, n in json.loads(Path(work, "counts.json").read_text()).items():
                    inputs[name] = inputs.get(name, 0) + n
            if done.returncode == 0:
                break
            failure = Path(work, "failure.json")
            if not failure.exists():  # the process did not start, or was killed
                print(done.stdout, done.stderr[-3000:], sep="\n", file=sys.stderr)
                return 1
            found = json.loads(failure.read_text())
            failure.unlink()
            for file in Path(work).glob("crash-*"):
                shutil.move(file, kept / f"{found['target']}-{file.name}")
            failures[found["target"]] = found["error"]
            left.remove(found["target"])
    rows = [[name, f"{inputs.get(name, 0):,}", failures.get(name, "")[:90]] for name in names]
    print(table(["target", "inputs", "failure"], rows))
    guided = importlib.util.find_spec("atheris") is not None
    result = {
        "benchmark": "fuzz",
        "guided_by_coverage": guided,
        "seconds": float(args["seconds"]),
        "targets": len(names),
        "inputs": sum(inputs.values()),
        "branches": coverage if guided else None,
        "failures": failures,
        "inputs_that_failed": str(kept) if failures else None,
        **facts(),
    }
    print(json.dumps(result))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
