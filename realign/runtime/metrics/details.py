"""`RunDetails`: writes tokens, spans, warnings and the load of the machine into the record files of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from realign.api import SequenceSample
from realign.runtime.metrics.record_spec import RecordSpec
from realign.runtime.metrics.records import Records
from realign.runtime.metrics.run_log import RunLog
from realign.runtime.metrics.spans import Spans
from realign.runtime.metrics.system_monitor import SystemMonitor
from realign.runtime.metrics.token_records import token_records


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


__all__ = ["RunDetails"]
