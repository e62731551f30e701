"""Details that a run records for its report: tokens, spans, warnings and the load of the machine."""

from __future__ import annotations

import math
import os
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from realign.api import SequenceSample
from realign.api.rewards import total_rewards
from realign.api.sample import RESPONSE_INDEX
from realign.api.stats import TracedSequence
from realign.records.metrics.records import Records
from realign.records.metrics.run_log import RunLog
from realign.records.metrics.samples import sequence_places
from realign.run_settings import RecordSpec

_MOST_SPANS = 5_000
"""Maximum number of spans between two writes; older ones are dropped."""


class Spans:
    """Collects spans from any thread. The clock counts seconds since the Unix epoch, but never jumps."""

    def __init__(self) -> None:
        self._done: deque[dict[str, Any]] = deque(maxlen=_MOST_SPANS)
        self._offset = time.time() - time.perf_counter()
        self._process = os.getpid()

    @contextmanager
    def span(self, name: str, kind: str) -> Iterator[None]:
        """Record the duration of the context.

        Args:
            name: name of the call or phase, such as `actor_train`.
            kind: method of a call (`generate`, `inference`, `train_step`), or `phase`.
        """
        started = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self._done.append(
                {
                    "name": name,
                    "kind": kind,
                    "start": round(started + self._offset, 6),
                    "end": round(ended + self._offset, 6),
                    "thread": threading.current_thread().name,
                    "process": self._process,
                }
            )

    def take(self) -> list[dict[str, Any]]:
        """Return the spans that ended since the last call, in the order of their start."""
        spans = []
        # not `list` and `clear`: a span that another thread ends in between would be lost
        while self._done:
            spans.append(self._done.popleft())
        return sorted(spans, key=lambda span: span["start"])


_MOST_SAMPLES = 10_000
"""Maximum number of samples between two steps; older ones are dropped."""
GIB = float(1 << 30)


class SystemMonitor:
    """Samples the load of the machine at a fixed interval until it is closed.

    Args:
        seconds: interval; None starts no thread.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._found: deque[dict[str, Any]] = deque(maxlen=_MOST_SAMPLES)
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
        samples = []
        while self._found:
            samples.append(self._found.popleft())
        return samples

    def _run(self) -> None:
        assert self._seconds is not None
        while not self._closed.wait(self._seconds):
            self._found.append(self.sample())

    def sample(self) -> dict[str, Any]:
        """Return the current load. `process_cpu` is the mean number of busy cores since the last sample."""
        now, used = time.perf_counter(), _cpu_seconds()
        (then, before), self._before = self._before, (now, used)
        load = {"time": round(time.time(), 3), "process_cpu": round((used - before) / max(now - then, 1e-6), 3)}
        with suppress(OSError):
            load["machine_load"] = round(os.getloadavg()[0], 3)
        load["cpu_cores"] = os.cpu_count() or 1
        load["process_memory_gib"] = round(_resident_bytes() / GIB, 3)
        load |= _machine_memory()
        return load | {f"gpu{i}_{name}": x for i in range(_gpus()) for name, x in _gpu(i).items()}


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
    # asking a GPU for its memory creates a CUDA context, which a run on the CPU, or Ray's driver, must not do
    return torch.cuda.device_count() if torch.cuda.is_initialized() else 0


def _gpu(device: int) -> dict[str, float]:
    free, total = torch.cuda.mem_get_info(device)
    load = {"memory_gib": round((total - free) / GIB, 3), "memory_total_gib": round(total / GIB, 3)}
    with suppress(Exception):  # needs NVML, which is optional
        load["utilization"] = round(torch.cuda.utilization(device) / 100, 3)
    return load


PROMPT_TOKENS = 128
"""Number of tokens at the end of a prompt that are recorded."""
COLUMNS: Mapping[str, str] = {
    "logprobs": "logprobs",
    "prox_logprobs": "trainer_logprobs",
    "ref_logprobs": "ref_logprobs",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
    "versions": "versions",
}
"""Column of the record for each key of a batch with one value per token."""
TRACED: Mapping[str, str] = {
    "token/logprob": "trainer_logprobs",
    "token/ratio": "ratio",
    "token/entropy": "entropy",
    "token/advantage": "advantages",
    "token/value": "values",
    "token/kl_penalty": "kl_penalty",
    "token/mask": "mask",
}
"""Column for each value that a loss reports for single tokens. It replaces a column of the batch."""


def token_records(
    batch: SequenceSample,
    traces: Iterable[TracedSequence],
    spec: RecordSpec,
    decode: Callable[..., str],
) -> list[dict[str, Any]]:
    """Return a record for each response of the first prompts of a batch; empty if the batch has no tokens.

    Columns are lists with one entry per token. Values that are not finite, or that no model computed, are null.

    Args:
        batch: the batch of the step, with every key that its calls wrote.
        traces: per-token values from the loss. Of several passes over a response, the last one counts.
        spec: number of prompts, responses and tokens.
        decode: decodes token ids.
    """
    if not {"input_ids", "loss_mask"} <= batch.keys or spec.token_prompts == 0:
        return []
    part = batch.take(range(min(spec.token_prompts, len(batch))))
    lengths = part.lengths["input_ids"]
    columns = {
        name: part.sequences(key)
        for key, name in {"loss_mask": "mask", "prompt_mask": "given", **COLUMNS}.items()
        if key in part.data and part.lengths[key] == lengths
    }
    rewards = total_rewards(part).tolist() if "rewards" in part else None
    traced = {(trace.prompt, trace.response): trace.values for trace in traces}
    records = list[dict[str, Any]]()
    owners, places = part.group_index().tolist(), sequence_places(part)
    for row, (owner, place, ids) in enumerate(zip(owners, places, part.sequences("input_ids"), strict=True)):
        prompt, response = part.ids[owner], place.pop(RESPONSE_INDEX)
        if response >= spec.token_responses:
            continue
        values = {name: rows[row] for name, rows in columns.items()}
        values |= {TRACED[key]: x for key, x in traced.get((prompt, response), {}).items() if key in TRACED}
        reward = None if rewards is None else _plain(rewards[row])
        record = {"id": prompt, "response": response, **place, "reward": reward}
        records.append(record | _columns(ids, values, spec.token_limit, decode))
    return records


def _columns(ids: Tensor, values: Mapping[str, Tensor], limit: int, decode: Callable[..., str]) -> dict[str, Any]:
    """Return the columns of one sequence."""
    given = values.get("given")
    prompt = len(ids) if given is None or bool(given.all()) else int((~given.bool()).nonzero()[0, 0])
    start = max(0, prompt - PROMPT_TOKENS) if given is not None else 0
    window = slice(start, start + limit)
    tokens = ids[window].tolist()
    record: dict[str, Any] = {"start": start, "length": len(ids), "tokens": tokens, "text": pieces(tokens, decode)}
    predicted = torch.ones(len(ids), dtype=torch.bool) if given is None else ~given.bool().cpu()
    # no model predicts the first token
    predicted[0] = False
    for name, x in values.items():
        if name in ("mask", "given"):
            record[name] = x[window].int().tolist()
        elif name == "versions":
            record[name] = [None if version < 0 else version for version in x[window].tolist()]
        else:
            pairs = zip(x[window].tolist(), predicted[window].tolist(), strict=True)
            record[name] = [_plain(value) if here else None for value, here in pairs]
    if "logprobs" in record and "ref_logprobs" in record:
        record["kl"] = [
            None if a is None or b is None else _plain(a - b)
            for a, b in zip(record["logprobs"], record["ref_logprobs"], strict=True)
        ]
    return record


def pieces(tokens: Sequence[int], decode: Callable[..., str]) -> list[str]:
    """Return the text of each token. A character of several tokens belongs to its first one; the others are empty."""
    texts: list[str] = []
    start = 0
    while start < len(tokens):
        # decode with the token before: some tokenizers drop a space at the start of a text
        before = list(tokens[start - 1 : start]) if start else []
        context = _text(before, decode)
        # a character has at most 4 bytes in UTF-8, so at most 4 tokens of single bytes; an incomplete one decodes to
        # U+FFFD
        for end in range(start + 1, min(start + 4, len(tokens)) + 1):
            text = _text([*before, *tokens[start:end]], decode)
            if not text.endswith("\ufffd"):
                break
        else:
            # four tokens without a complete character are invalid UTF-8, and one of them is shown as it is
            end, text = start + 1, _text([*before, tokens[start]], decode)
        if text.startswith(context) and len(text) > len(context):
            text = text[len(context) :]
        else:
            text = _text(tokens[start:end], decode)
        texts += [text, *[""] * (end - start - 1)]
        start = end
    return texts


def _text(tokens: Sequence[int], decode: Callable[..., str]) -> str:
    return decode(list(tokens), skip_special_tokens=False) if tokens else ""


def _plain(value: float) -> float | None:
    """Return a number with 6 significant digits; None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


class RunDetails:
    """Records the details of a run until the context ends. Only rank 0 writes files.

    Args:
        spec: what to record, and how often.
        lead: role whose tokens are recorded.
        decode: decodes its token ids.
        spans: collects the spans of the run.
        records: the record files of the run.
        log: collects the warnings.
    """

    def __init__(
        self, spec: RecordSpec, lead: str, decode: Callable[..., str], spans: Spans, records: Records, log: RunLog
    ) -> None:
        self._spec, self._lead, self._decode = spec, lead, decode
        self._spans, self._records, self._log = spans, records, log
        self._monitor = SystemMonitor(self._spec.system_seconds)
        self._step = 0

    def __enter__(self) -> Self:
        self._monitor.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        with ExitStack() as stack:
            stack.callback(self._flush)
            stack.callback(self._monitor.__exit__, kind, value, tb)

    def after_step(self, step: int, batch: SequenceSample, traces: Mapping[str, Any]) -> None:
        """Write the details of a step.

        Args:
            step: the step.
            batch: its batch.
            traces: traced sequences by role.
        """
        self._step = step
        # taken in every step, or the next recorded step would get those of all steps before it
        spans = self._spans.take()
        if self._spec.due(step):
            for span in spans:
                self._records.spans.write({"step": step, **span})
            for record in token_records(batch, traces.get(self._lead, ()), self._spec, self._decode):
                self._records.tokens.write({"step": step, **record})
        self._flush()

    def _flush(self) -> None:
        for sample in self._monitor.take():
            self._records.system.write({"step": self._step, **sample})
        for warning in self._log.take_warnings():
            self._records.warnings.write({"step": self._step, **warning})
