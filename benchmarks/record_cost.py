"""Measure the cost of the detailed records of a run: `python -m benchmarks.record_cost [steps=60] [runs/...]`.

Runs GRPO on the tiny arithmetic model. The records are on in every second step, and off in the others. Prints the
ratio of the median times, the time inside of the recording functions, and the size of the files.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from realign.config import build_experiment, compose
from realign.records.metrics.details import RunDetails
from realign.records.metrics.records import Records
from realign.records.metrics.run_log import RunLog
from realign.records.recorded_calls import CallRecorder
from realign.run_settings import RecordSpec
from realign.runtime.local import LocalRuntime

DEFAULT = RecordSpec()
EVERY = replace(DEFAULT, every_steps=1)
"""Records of each step, which are `DEFAULT.every_steps` times those of a run."""


def measure(overrides: list[str], steps: int) -> str:
    """Return a report of the cost."""
    experiment = build_experiment(compose([*overrides, f"steps={steps}", "evaluation=null"]))
    experiment.records = EVERY
    times: dict[bool, list[float]] = {True: [], False: []}
    inside, writing = list[float](), list[float]()
    with TemporaryDirectory() as folder, Records(Path(folder), None, "") as records:
        runtime = LocalRuntime(experiment)
        starts_workers = experiment.runtime.starts_workers
        runtime.hook = CallRecorder(Path(folder), experiment.graph, starts_workers=starts_workers)
        lead = experiment.lead_role
        decode = runtime.models[lead].tokenizer.decode
        with RunDetails(EVERY, lead, decode, runtime.spans, records, RunLog()) as details:
            for step in range(1, steps + 1):
                on = step % 2 == 0
                runtime.trace_prompts = EVERY.token_prompts if on else 0
                started = time.perf_counter()
                _, batch = runtime.step(step)
                stepped = time.perf_counter()
                runtime.hook.end(step)
                recorded = time.perf_counter()
                writing.append(recorded - stepped)
                started += writing[-1]  # every step has it, so it is no difference of two steps
                if on:
                    details.after_step(step, batch, runtime.traces)
                    inside.append(time.perf_counter() - recorded)
                if step > 4:  # the first steps warm up
                    times[on].append(time.perf_counter() - started)
        runtime.close()
        size = sum((Path(folder) / f"{name}.jsonl").stat().st_size for name in ("tokens", "spans"))
    plain, full = median(times[False]), median(times[True])
    own, written = median(inside), median(writing)
    return (
        f"step without records {1e3 * plain:.1f} ms, with records of every step {1e3 * full:.1f} ms "
        f"(ratio of medians {full / plain:.3f})\n"
        f"inside of the recording functions {1e3 * own:.2f} ms per recorded step: {100 * own / plain:.3f} % of a step; "
        f"{100 * own / plain / DEFAULT.every_steps:.3f} % with records.every_steps={DEFAULT.every_steps}\n"
        f"recorded calls {1e3 * written:.2f} ms per step: {100 * written / plain:.3f} % of a step\n"
        f"size {size / len(inside) / 1e3:.1f} kB per recorded step"
    )


def main(words: list[str]) -> None:
    """Parse the command line, and print the report."""
    steps = next((int(word.partition("=")[2]) for word in words if word.startswith("steps=")), 60)
    overrides = [word for word in words if not word.startswith("steps=")] or ["experiment=grpo_arithmetic"]
    print(measure(overrides, steps))


if __name__ == "__main__":
    main(sys.argv[1:])
