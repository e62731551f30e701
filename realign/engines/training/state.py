"""`EngineState`: the state of an engine in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from realign.engines.network.network import Network
from realign.engines.sampling.compiled.fusion import Fusion
from realign.engines.training.ema import WeightAverage
from realign.engines.training.stepper import Stepper

PARTS = {"value_head": "a value head", "optimizer": "an optimizer", "ema": "averaged weights"}
"""Optional parts of an engine's state, and their names in messages."""


class EngineState:
    """Weights, optimizer moments, step counts and averaged weights of an engine."""

    def __init__(
        self,
        name: str,
        network: Network,
        fusion: Fusion | None,
        stepper: Stepper | None,
        average: WeightAverage | None,
    ) -> None:
        """Collect the parts of the engine of role `name`; parts that the engine lacks are None."""
        self._name = name
        self._network = network
        self._fusion = fusion
        self._stepper = stepper
        self._average = average

    def state_dict(self) -> dict[str, Any]:
        """See `TransformersEngine.state_dict`."""
        state = {name: None if part is None else part.state_dict() for name, part in self._parts().items()}
        module, fusion = self._network.module_state(fixed=False), self._fusion
        decode = None if fusion is None else fusion.path.saved
        return {"module": module, **state, "fused": fusion is not None and fusion.known, "decode": decode}

    def fixed_weights(self) -> dict[str, Any]:
        """See `PipelinableEngine.fixed_weights`."""
        head = self._network.value_head
        fixed = head.state_dict() if head is not None and self._stepper is None else {}
        return {"module": self._network.module_state(fixed=True), "value_head": fixed}

    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Restore the state that `state_dict` returned.

        Args:
            state: state of an engine over the same model.
            weights_only: keep the current optimizer moments and step counts, and restart the average from the loaded
                weights.

        Raises:
            ValueError: only one of state and engine has an optimizer, a value head or averaged weights; or a
                different set of weights is trained.
        """
        if self._fusion is not None:
            if state.get("fused"):
                self._fusion.compare()
            self._fusion.path.resumed = state.get("decode")
        parts = self._parts()
        if weights_only:
            parts = {"value_head": parts["value_head"]}
        for name, part in parts.items():
            if (state[name] is None) != (part is None):
                lacks, has = ("saved state", "engine") if part is not None else ("engine", "saved state")
                raise ValueError(f"models.{self._name}: the {has} has {PARTS[name]}, but the {lacks} does not")
        self._network.load_module_state(state["module"])
        for name, part in parts.items():
            if part is not None:
                part.load_state_dict(state[name])
        if weights_only and self._average is not None:
            self._average.restart()

    def resident(self) -> Iterator[Tensor]:
        """See `TransformersEngine.resident`."""
        yield from self._network.parameters()
        yield from self._network.buffers()
        if self._stepper is not None:
            yield from self._stepper.moments()
        if self._average is not None:
            yield from self._average.average

    def _parts(self) -> dict[str, Any]:
        return {"value_head": self._network.value_head, "optimizer": self._stepper, "ema": self._average}
