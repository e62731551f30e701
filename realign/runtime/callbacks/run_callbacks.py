"""`RunCallbacks`: call the callbacks of a run, check what they return, and keep their state."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from realign.api.callback import (
    Callback,
    CallbackResult,
    EndEvent,
    EvaluationEvent,
    StartEvent,
    StepEvent,
)
from realign.errors import ConfigError, RunError
from realign.ranks import Ranks
from realign.records.checkpoint.schema import load_state

T = TypeVar("T")
E = TypeVar("E")
_RESERVED = ("step", "seconds", "settings")
"""Names that metrics.jsonl uses for something else."""


@dataclass(frozen=True)
class Stop:
    """A stop that a callback or dynamic sampling asked for."""

    key: str
    """Config key of the component that stopped the run, such as `callbacks.early`."""
    reason: str
    """Its reason."""
    settings: str
    """Its settings, see `settings_of`."""

    def describe(self) -> str:
        """Return a human-readable description."""
        return f"{self.key}: {self.reason}"


class RunCallbacks:
    """The callbacks of one run. With several ranks every method is a collective, and only rank 0 calls the callbacks.

    Attributes:
        stop: the first stop that was asked for; None as long as the run continues.
        metrics: name of each metric that callbacks have added, with the name of its callback.
    """

    def __init__(self, callbacks: Mapping[str, Callback], ranks: Ranks) -> None:
        self._callbacks, self._ranks = dict(callbacks), ranks
        # before the first call, since a callback may count in its fields
        self._settings = {name: settings_of(callback) for name, callback in callbacks.items()}
        self._reported: set[str] = set()
        self.stop: Stop | None = None
        self.metrics: dict[str, str] = {}

    def start(self, event: StartEvent) -> None:
        """Call `on_start` of each callback."""
        self._on_rank_0(partial(self._tell, "on_start", event))

    def after_evaluation(
        self, step: int, steps: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        """Call `on_evaluation` of each callback, and return the metrics that they add."""
        view = tuple(MappingProxyType(dict(sample)) for sample in samples)

        def event(known: Mapping[str, float]) -> EvaluationEvent:
            return EvaluationEvent(step, steps, known, view)

        return self._results(lambda callback: callback.on_evaluation, event, metrics)

    def after_step(
        self, step: int, steps: int, metrics: Mapping[str, float], added: Mapping[str, float]
    ) -> dict[str, float]:
        """Call `on_step` of each callback, and return the metrics that they add.

        Args:
            step: the step.
            steps: number of steps of the run.
            metrics: metrics that the run reports for the step.
            added: metrics that the callbacks have added after the evaluation of the step.
        """
        return self._results(
            lambda callback: callback.on_step, lambda known: StepEvent(step, steps, known), metrics, added
        )

    def check_reads(self) -> None:
        """Check after the first step that the run has reported what the callbacks read. Call it on rank 0 only.

        Raises:
            ConfigError: a metric was not reported.
        """
        known = sorted(self._reported | self.metrics.keys())
        for name, callback in self._callbacks.items():
            for metric in callback.reads():
                if metric not in known:
                    near = difflib.get_close_matches(metric, known, n=1)
                    hint = f"Did you mean {near[0]!r}?" if near else f"Valid: {', '.join(known)}."
                    raise ConfigError(f"callbacks.{name}: no metric {metric!r} was measured in the first step. {hint}")

    def end(self, event: EndEvent) -> None:
        """Call `on_end` of each callback after a run without an error."""
        self._on_rank_0(partial(self._tell, "on_end", event))

    def end_after_error(self, event: EndEvent) -> None:
        """Call `on_end` on rank 0 while an error ends the run. Not a collective; a second error is a warning."""
        # the other ranks may be gone or blocked, so this must not wait for them
        if not self._ranks.leader:
            return
        for name, callback in self._callbacks.items():
            try:
                callback.on_end(event)
            except Exception as error:
                warnings.warn(f"callbacks.{name}.on_end failed ({type(error).__name__}: {error}).", stacklevel=2)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each callback, their metrics, and the stop."""
        return self._ranks.lead(self._state)

    def load_state_dict(self, state: Mapping[str, Any], *, stopped: bool) -> None:
        """Restore the callbacks that the state contains. New callbacks start without state.

        Args:
            state: result of `state_dict`.
            stopped: whether the stop in the state still applies. Otherwise the run continues.

        Raises:
            CheckpointError: a callback of realign does not accept its state.
        """
        self.stop = Stop(**state["stop"]) if stopped and state["stop"] is not None else None
        self.metrics.update({name: owner for name, owner in state["metrics"].items() if owner in self._callbacks})
        self._on_rank_0(partial(self._load, state["states"]))

    def _tell(self, method: str, event: Any) -> None:
        for name, callback in self._callbacks.items():
            self._call(name, getattr(callback, method), event)

    def _state(self) -> dict[str, Any]:
        states = {name: self._call(name, callback.state_dict) for name, callback in self._callbacks.items()}
        for name, state in states.items():
            if not isinstance(state, Mapping):
                raise RunError(f"callbacks.{name}.state_dict returned {state!r}. Return a mapping.")
        return {
            "states": states,
            "metrics": dict(self.metrics),
            "stop": None if self.stop is None else dataclasses.asdict(self.stop),
        }

    def _load(self, states: Mapping[str, Any]) -> None:
        for name, callback in self._callbacks.items():
            if name in states:
                load_state(f"callbacks.{name}", callback, states[name], skip="callbacks")

    def _results(
        self,
        method_of: Callable[[Callback], Callable[[E], CallbackResult | None]],
        event: Callable[[Mapping[str, float]], E],
        metrics: Mapping[str, float],
        earlier: Mapping[str, float] = MappingProxyType({}),
    ) -> dict[str, float]:
        """Call a method of each callback on rank 0, and apply its results on all ranks."""
        if not self._callbacks:
            return {}

        def all_of_them() -> tuple[dict[str, float], Stop | None, dict[str, str]]:
            self._check_clashes(metrics)
            added: dict[str, float] = {}
            stop: Stop | None = None
            for name, callback in self._callbacks.items():
                known = MappingProxyType({**metrics, **earlier, **added})  # with the metrics of earlier callbacks
                method = method_of(callback)
                result = self._call(name, method, event(known))
                if result is None:
                    continue
                where = f"callbacks.{name}.{method.__name__}"
                if not isinstance(result, CallbackResult):
                    raise RunError(f"{where} returned {result!r}. Return None or a realign.api.CallbackResult.")
                added |= self._check_metrics(where, name, result.metrics, known)
                if result.stop is not None and stop is None:
                    stop = Stop(f"callbacks.{name}", str(result.stop), self._settings[name])
            # `lead` runs this on rank 0 only, so the other ranks get the names with the result
            return added, stop, self.metrics

        added, stop, names = self._ranks.lead(all_of_them)
        self.metrics.update(names)
        self.stop = self.stop or stop
        return added

    def _check_clashes(self, metrics: Mapping[str, float]) -> None:
        """Check that the run reports no metric that a callback has added before.

        Raises:
            RunError: it reports such a metric.
        """
        self._reported |= metrics.keys()
        for name in metrics:
            if name in self.metrics:
                raise RunError(_clash(f"callbacks.{self.metrics[name]}", name))

    def _check_metrics(
        self, where: str, callback: str, metrics: Mapping[str, float], known: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the metrics that a callback adds, as floats.

        Raises:
            RunError: a name is used by the run or another callback, or a value is no finite number.
        """
        added: dict[str, float] = {}
        for name, value in metrics.items():
            if not isinstance(name, str) or not name.strip() or name in _RESERVED:
                raise RunError(f"{where} returned a metric named {name!r}. Choose another name.")
            if name in known or name in self._reported or self.metrics.get(name, callback) != callback:
                raise RunError(_clash(where, name))
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise RunError(f"{where} returned {name}={value!r}. A metric must be a finite number.")
            added[name] = float(value)
            self.metrics[name] = callback
        return added

    @staticmethod
    def _call(name: str, method: Callable[..., T], *arguments: Any) -> T:
        """Call a method of a callback. Its errors keep their traceback and get a note with the key of the callback."""
        try:
            return method(*arguments)
        except Exception as error:
            error.add_note(f"in callbacks.{name}.{method.__name__}")
            raise

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        if self._callbacks:
            self._ranks.lead(action)


def settings_of(component: object) -> str:
    """Return class and settings of a component as text, to recognize the same one when a run is resumed."""
    fields = repr(component) if dataclasses.is_dataclass(component) else ""  # the default repr contains an address
    return f"{type(component).__module__}.{type(component).__qualname__} {fields}".rstrip()


def _clash(where: str, name: str) -> str:
    return f"{where} returned metric {name!r}, which is already reported by something else. Choose another name."


__all__ = ["RunCallbacks", "Stop", "settings_of"]
