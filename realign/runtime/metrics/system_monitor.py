"""`SystemMonitor`: sample CPU, memory and GPU use of the machine in a background thread."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch

MOST = 10_000
"""Maximum number of samples between two steps; older ones are dropped."""
GIB = float(1 << 30)


class SystemMonitor:
    """Samples the load of the machine at a fixed interval until it is closed.

    Args:
        seconds: interval; None starts no thread.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._found: deque[dict[str, Any]] = deque(maxlen=MOST)
        self._closed = threading.Event()
        self._before = (time.perf_counter(), _cpu_seconds())
        self._thread = threading.Thread(target=self._run, name="system monitor", daemon=True)

    def __enter__(self) -> Self:
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def take(self) -> list[dict[str, Any]]:
        """Return the samples since the last call."""
        found = []
        while self._found:
            found.append(self._found.popleft())
        return found

    def _run(self) -> None:
        assert self._seconds is not None
        while not self._closed.wait(self._seconds):
            self._found.append(self.sample())

    def sample(self) -> dict[str, Any]:
        """Return the current load. `process_cpu` is the mean number of busy cores since the last sample."""
        now, used = time.perf_counter(), _cpu_seconds()
        (then, before), self._before = self._before, (now, used)
        found = {"time": round(time.time(), 3), "process_cpu": round((used - before) / max(now - then, 1e-6), 3)}
        with suppress(OSError):
            found["machine_load"] = round(os.getloadavg()[0], 3)
        found["cpu_cores"] = os.cpu_count() or 1
        found["process_memory_gib"] = round(_resident_bytes() / GIB, 3)
        found |= _machine_memory()
        return found | {f"gpu{i}_{name}": x for i in range(_gpus()) for name, x in _gpu(i).items()}


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _resident_bytes() -> int:
    """Return the resident memory of this process. Without /proc, as on macOS, this is its maximum so far."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _machine_memory() -> dict[str, float]:
    with suppress(OSError, ValueError, LookupError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        total, free = (float(lines[name].split()[0]) / (1 << 20) for name in ("MemTotal", "MemAvailable"))
        return {"machine_memory_gib": round(total - free, 3), "machine_memory_total_gib": round(total, 3)}
    return {}


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_initialized() else 0


def _gpu(device: int) -> dict[str, float]:
    free, total = torch.cuda.mem_get_info(device)
    found = {"memory_gib": round((total - free) / GIB, 3), "memory_total_gib": round(total / GIB, 3)}
    with suppress(Exception):  # needs NVML, which is optional
        found["utilization"] = round(torch.cuda.utilization(device) / 100, 3)
    return found


__all__ = ["SystemMonitor"]
