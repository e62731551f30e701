"""Profile steps of a run with `torch.profiler`, and summarize them by RPC."""

from __future__ import annotations

import bisect
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from realign.api import RPC
from realign.errors import ConfigError
from realign.own_files import OwnFiles, replace_bytes, replace_text
from realign.runtime.calls import MARK
from realign.runtime.local import LocalRuntime
from realign.settings import Count, NonNegativeInt, Settings

TRACE, SUMMARY = "trace.json.gz", "summary.json"
OUTSIDE = "outside of calls"
"""Row of the time that no call accounts for."""


@dataclass
class ProfileOptions(Settings):
    """Steps to profile."""

    start: Count = 2
    """First profiled step of the command. Earlier steps run without the profiler, as a warm-up."""
    steps: Count = 2
    """Number of profiled steps."""
    operators: NonNegativeInt = 3
    """Number of operators to print for each call."""

    @property
    def last(self) -> int:
        """Return the last profiled step of the command."""
        return self.start + self.steps - 1


class Span(NamedTuple):
    """One execution of a call, or one operator."""

    name: str
    thread: int
    start: float
    end: float
    self_s: float = 0.0
    """Seconds without the operators that it calls."""


@dataclass(frozen=True)
class CallProfile:
    """Summary of a call over the profiled steps."""

    name: str
    seconds: float
    """Seconds per step."""
    fraction: float
    """Fraction of the step time. Calls that overlap have a sum above 1."""
    tokens_per_s: float | None
    """Tokens that a model processed per second of the call; sampled tokens for generation."""
    operators: Mapping[str, float]
    """Self time per step in seconds of the operators with the largest self time, over all threads."""


@dataclass(frozen=True)
class StepProfile:
    """Summary of the profiled steps."""

    first: int
    """First profiled step of the run."""
    steps: int
    step_s: float
    """Mean seconds of a step, under the profiler."""
    device: str
    """Device of the self times: cpu or cuda."""
    calls: Sequence[CallProfile]


def profile_steps(runtime: LocalRuntime, options: ProfileOptions, done: int, folder: Path) -> StepProfile:
    """Run steps, profile the last ones of them, and write the trace and the summary.

    Args:
        runtime: the loaded run.
        options: steps to profile.
        done: steps that the run has made before.
        folder: folder for the files.

    Raises:
        ConfigError: the run has too few steps.
    """
    left = runtime.experiment.steps - done
    if options.last > left:
        raise ConfigError(
            f"profile.start={options.start} profile.steps={options.steps}: the command runs {options.last} steps, but "
            f"{left} steps are left. Raise steps, or lower profile.start."
        )
    for step in range(done + 1, done + options.start):
        runtime.step(step)
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    rows: list[Mapping[str, float]] = []
    tokens: dict[str, float] = defaultdict(float)
    # concurrent passes and asynchronous rollout use further threads
    threads = torch.profiler._ExperimentalConfig(profile_all_threads=True)  # type: ignore[attr-defined]
    with profile(activities=activities, experimental_config=threads) as recorded:
        for step in range(done + options.start, done + options.last + 1):
            values, batch = runtime.step(step)
            rows.append(values)
            packed = float(len(batch["input_ids"])) if "input_ids" in batch else 0.0
            for rpc in runtime.graph.order:
                tokens[rpc.name] += _tokens(rpc, runtime, packed, values)
    OwnFiles(folder).claim(TRACE, SUMMARY)
    with TemporaryDirectory() as scratch:
        recorded.export_chrome_trace(str(Path(scratch, TRACE)))
        replace_bytes(folder / TRACE, Path(scratch, TRACE).read_bytes())
    spans = [
        # a kernel on the GPU is counted in the device time of the operator on the CPU that launched it
        Span(
            event.name,
            event.thread,
            event.time_range.start / 1e6,
            event.time_range.end / 1e6,
            (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6,
        )
        for event in recorded.events() or ()
        if event.device_type == DeviceType.CPU
    ]
    profiled = StepProfile(
        done + options.start,
        options.steps,
        sum(row["step_s"] for row in rows) / len(rows),
        "cuda" if cuda else "cpu",
        summarize([rpc.name for rpc in runtime.graph.order], rows, tokens, spans, options.operators),
    )
    replace_text(folder / SUMMARY, json.dumps(asdict(profiled), indent=2) + "\n")
    return profiled


def _tokens(rpc: RPC, runtime: LocalRuntime, packed: float, values: Mapping[str, float]) -> float:
    """Return the tokens that a call processed in a step; 0 for a call without a model."""
    interface = runtime.interfaces[rpc.model]
    if not interface.needs_engine or rpc.method == "credit":
        return 0.0
    if rpc.method == "generate":
        return values.get("rollout_tokens", 0.0)
    return packed * (interface.plan().epochs if rpc.method == "train_step" else 1)


def summarize(
    names: Sequence[str],
    rows: Sequence[Mapping[str, float]],
    tokens: Mapping[str, float],
    spans: Iterable[Span],
    operators: int,
) -> list[CallProfile]:
    """Summarize calls in the order of `names`, and the time outside of calls.

    Args:
        names: names of the calls.
        rows: metrics of each profiled step.
        tokens: tokens of each call over all steps.
        spans: executions of calls and operators.
        operators: number of operators for each call.
    """
    n, step_seconds = len(rows), sum(row["step_s"] for row in rows)
    by_call = self_times(spans)
    seconds = {name: sum(row.get(f"time/{name}_s", 0.0) for row in rows) for name in names}
    outside = step_seconds - sum(seconds.values())
    if outside > 0:
        seconds[OUTSIDE] = outside
    profiles = []
    for name, spent in seconds.items():
        top = sorted(by_call.get(name, {}).items(), key=lambda item: -item[1])[:operators]
        rate = tokens[name] / spent if tokens.get(name) and spent else None
        profiles.append(CallProfile(name, spent / n, spent / step_seconds, rate, {op: x / n for op, x in top if x > 0}))
    return profiles


def self_times(spans: Iterable[Span]) -> Mapping[str, Mapping[str, float]]:
    """Return the self time of each operator, by call.

    An operator belongs to the call that its thread executes. An operator of another thread belongs to the call that is
    active. If several calls are active, it is not counted.
    """
    spans = list(spans)
    calls = [span._replace(name=span.name.removeprefix(MARK)) for span in spans if span.name.startswith(MARK)]
    everywhere = _Timeline(calls)
    threads = {
        thread: _Timeline([call for call in calls if call.thread == thread]) for thread in {c.thread for c in calls}
    }
    seconds_of: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        if span.name.startswith(MARK):
            continue
        # the middle, because the start or end of an operator can coincide with the border of a call
        middle = (span.start + span.end) / 2
        owner = threads[span.thread].at(middle) if span.thread in threads else everywhere.at(middle)
        if owner is not None:
            seconds_of[owner][span.name] += span.self_s
    return seconds_of


class _Timeline:
    """The active call at each time; `OUTSIDE` if there is none, and None if there are several."""

    def __init__(self, calls: Sequence[Span]) -> None:
        # at equal times -1 sorts before 1: a call that starts where another ends does not overlap it
        changes = sorted([(c.start, 1, c.name) for c in calls] + [(c.end, -1, c.name) for c in calls])
        active: Counter[str] = Counter()
        self._times: list[float] = []
        self._owners: list[str | None] = []
        for time, change, name in changes:
            active[name] += change
            names = [name for name, count in active.items() if count > 0]
            self._times.append(time)
            self._owners.append(OUTSIDE if not names else names[0] if len(names) == 1 else None)

    def at(self, time: float) -> str | None:
        """Return the owner of a time."""
        index = bisect.bisect_right(self._times, time) - 1
        return OUTSIDE if index < 0 else self._owners[index]


__all__ = ["OUTSIDE", "CallProfile", "ProfileOptions", "Span", "StepProfile", "profile_steps", "summarize"]
