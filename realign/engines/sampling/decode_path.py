"""Choice of the implementation of decode steps: the modules of transformers, `FusedTrunk`, or `CompiledTrunk`."""

from __future__ import annotations

import logging
import warnings
from enum import StrEnum

from realign.engines.sampling.compiled_library import CompiledDecode, LibraryError, load_library
from realign.engines.sampling.compiled_trunk import CompiledTrunk, check_supported
from realign.engines.sampling.fused_layers import FusedTrunk
from realign.engines.sampling.trunk import Trunk
from realign.errors import ConfigError

TOLERANCE = 2e-5
"""Largest fp32 rounding error, relative to the largest hidden state; ADR 31 gives measurements.

Rounding differs by about 1e-6. For SmolLM2-135M, 2e-5 corresponds to about 1e-3 nats, the default of `ratio_tolerance`.
"""

logger = logging.getLogger(__name__)


class DecodePath(StrEnum):
    """Implementation of the decode steps of a rollout. The paths differ by rounding."""

    modules = "modules"
    """Modules of the transformers model."""
    fused = "fused"
    """`FusedTrunk`, with operators of torch."""
    compiled = "compiled"
    """`CompiledTrunk`, with the compiled library."""


class DecodeChoice:
    """Chooses what computes the decode steps of a model, and warns if a resumed run chooses something else.

    Args:
        model: name of the model's class, for the log.
        compiled: whether decode steps of a fused trunk run in the compiled library, see `CompiledTrunk`.
    """

    def __init__(self, model: str, compiled: CompiledDecode) -> None:
        self.compiled = compiled
        self.now: DecodePath | None = None
        """What computed the decode steps of the last rollout; None if no rollout has run."""
        self.resumed: str | None = None
        """The `DecodePath` of the checkpoint from which the run resumed, until the first rollout."""
        self._model = model
        self._difference: float | None = None
        """Difference of the library from torch, measured once; training changes its digits, not its size."""
        self._logged: str | None = None

    @property
    def saved(self) -> str | None:
        """The `DecodePath` that a checkpoint records; None if no rollout has run."""
        return self.resumed if self.now is None else self.now.value

    def fastest(self, trunk: FusedTrunk) -> Trunk:
        """Return the trunk with compiled decode steps, if the setting allows them and this machine has the library.

        Raises:
            ConfigError: the setting requires the library.
        """
        if self.compiled is CompiledDecode.off:
            self.record(DecodePath.fused, "compiled_decode=off")
            return trunk
        try:
            compiled = self._compiled_trunk(trunk)
        except ValueError as error:
            self.record(DecodePath.fused, str(error))
            if self._logged != str(error):
                logger.info("Decode steps of %s run in torch, since %s", self._model, error)
            self._logged = str(error)
            return trunk
        self.record(DecodePath.compiled, "a compiled library is available")
        return compiled

    def _compiled_trunk(self, trunk: FusedTrunk) -> CompiledTrunk:
        """Return the trunk with compiled decode steps.

        Raises:
            ValueError: the library does not implement the trunk, is not available, or computes something else.
        """
        check_supported(trunk)
        library = load_library()
        if isinstance(library, LibraryError):
            raise ValueError(str(library))
        compiled = CompiledTrunk(trunk, library)
        if self._difference is None:
            self._difference = compiled.difference()
        if not self._difference <= TOLERANCE:
            raise ValueError(
                f"hidden states of the compiled library differ by {self._difference:.1e} (relative) from torch"
            )
        return compiled

    def record(self, path: DecodePath, reason: str) -> None:
        """Record what computes the decode steps, and warn if it differs from that of the resumed run.

        Raises:
            ConfigError: the setting requires the library.
        """
        if self.compiled is CompiledDecode.on and path is not DecodePath.compiled:
            raise ConfigError(
                f"sampler.compiled_decode=on: decode steps cannot be compiled, since {reason}. "
                "Set compiled_decode=auto."
            )
        if self.resumed is not None and self.resumed != path:
            warnings.warn(
                f"Decode steps of the checkpoint ran in {self.resumed!r}, and those of this run in {path.value!r}, "
                f"since {reason}. The run continues. Its samples can differ slightly from those of an uninterrupted "
                "run.",
                stacklevel=2,
            )
        self.now, self.resumed = path, None
